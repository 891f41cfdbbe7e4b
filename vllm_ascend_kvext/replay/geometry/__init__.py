# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vllm-ascend-kvext project
"""The KV cache groups of a model without its weights: planned by vLLM, or described in a file."""
