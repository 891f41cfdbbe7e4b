# SPDX-License-Identifier: Apache-2.0
"""Reuse of KV at other positions: how keys of a model get there.

Imports no vLLM: its rotary modules are read as they are handed in.
"""
