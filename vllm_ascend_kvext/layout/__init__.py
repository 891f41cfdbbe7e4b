# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vllm-ascend-kvext project
"""Says which bytes of which page belong to which tokens.

The modules import neither vLLM nor torch. They read specs and tensors by their attributes.
"""
