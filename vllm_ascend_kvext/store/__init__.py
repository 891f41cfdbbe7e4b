# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vllm-ascend-kvext project
"""The index of the host tier: what is stored where, what can be loaded, and what is evicted.

`tier.HostTier` is the entry point. The modules move no bytes, wait for nothing, and do not know
vLLM.
"""
