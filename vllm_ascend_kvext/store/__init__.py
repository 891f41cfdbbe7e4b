# SPDX-License-Identifier: Apache-2.0
"""The books of the host tier: what is stored where, what may be used, and what gives way.

`tier.HostTier` is the face of it. Nothing here moves a byte, waits for anything, or knows vLLM.
"""
