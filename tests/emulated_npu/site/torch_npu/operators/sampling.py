# SPDX-License-Identifier: Apache-2.0
"""Filters of logits before a token is drawn."""

from __future__ import annotations

import torch
from torch import Tensor

from torch_npu.kernels import operator


@operator("npu_top_k_top_p")
def npu_top_k_top_p(logits: Tensor, p: Tensor | None = None, k: Tensor | None = None) -> Tensor:
    """Sets all logits to minus infinity but the best.

    Those stay that are among the ``k`` largest, and of these as many, from the largest on, as are
    needed for a probability of ``p``; one at least.

    Args:
        logits: ``[rows, vocabulary]``; ``p`` and ``k`` (int32): ``[rows]``.
    """
    ordered, places = logits.float().sort(dim=-1, stable=True)
    if k is not None:
        smallest = ordered.gather(-1, (ordered.shape[-1] - k.long()).unsqueeze(-1))
        ordered = ordered.masked_fill(ordered < smallest, float("-inf"))
    if p is not None:
        is_dropped = ordered.softmax(-1).cumsum(-1) <= 1 - p.unsqueeze(-1)
        is_dropped[..., -1] = False
        ordered = ordered.masked_fill(is_dropped, float("-inf"))
    return torch.empty_like(ordered).scatter(-1, places, ordered).to(logits.dtype)
