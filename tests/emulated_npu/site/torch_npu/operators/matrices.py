# SPDX-License-Identifier: Apache-2.0
"""Operators on weights."""

from __future__ import annotations

import torch

from .refusals import require

NZ_FORMAT, ND_FORMAT = 29, 2


def npu_format_cast(tensor: torch.Tensor, acl_format: int) -> torch.Tensor:
    """Returns ``tensor`` itself: only the order of its numbers in memory would differ.

    The emulated device keeps every tensor in the order of its dimensions (ND).
    """
    is_known = acl_format in (ND_FORMAT, NZ_FORMAT)
    require("npu_format_cast", is_known, f"format {acl_format} is not emulated")
    return tensor


def _npu_matmul_add_fp32(x: torch.Tensor, weight: torch.Tensor, c: torch.Tensor) -> None:
    """Adds ``x.T @ weight`` to ``c``, in float32, in place."""
    c.add_(x.float().t() @ weight.float())


OPERATORS = {
    "npu_format_cast": npu_format_cast,
    "_npu_matmul_add_fp32": _npu_matmul_add_fp32,
}
