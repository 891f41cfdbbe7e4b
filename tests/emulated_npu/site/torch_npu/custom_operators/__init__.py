# SPDX-License-Identifier: Apache-2.0
"""Operators of vLLM-Ascend's own library, ``torch.ops._C_ascend``. See ``kernels``."""
