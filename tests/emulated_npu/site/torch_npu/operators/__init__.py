# SPDX-License-Identifier: Apache-2.0
"""Operators of ``torch_npu`` and of vLLM-Ascend's own library, from their documentation.

``kernels`` registers them.
"""
