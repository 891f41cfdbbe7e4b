# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vllm-ascend-kvext project
"""Operators of ``torch_npu`` and of vLLM-Ascend's own library, from their documentation.

``kernels`` registers them.
"""
