# SPDX-License-Identifier: Apache-2.0
"""Operators of ``torch_npu``, written from their documentation. See ``kernels``."""
