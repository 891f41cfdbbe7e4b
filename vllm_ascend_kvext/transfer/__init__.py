# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vllm-ascend-kvext project
"""Moves pages to one host buffer and back: descriptors and backends.

The modules know neither vLLM nor how a layout is found. Only functions that get tensors import
torch.
"""
