# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vllm-ascend-kvext project
"""Says which tokens a KV cache group reads, and how many tokens its pages and rows hold.

No other package reads KV cache specs. The modules read them by their attributes, and import neither
vLLM nor torch. They know no tensors, no requests and no blocks.
"""
