# SPDX-License-Identifier: Apache-2.0
"""How keys of a model turn with their positions, and how that is checked.

Imports no vLLM: its rotary modules are read as they are handed in.
"""
