# SPDX-License-Identifier: Apache-2.0
"""What a KV cache group is: which tokens it reads, and how many of them a page and a row hold.

The one reader of KV cache specs. Knows neither vLLM nor torch: specs are read by their attributes.
Knows no tensors, no requests and no blocks.
"""
