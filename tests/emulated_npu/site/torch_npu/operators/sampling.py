# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vllm-ascend-kvext project
"""Filters of logits before a token is drawn."""

from __future__ import annotations

import torch
from torch import Tensor

from torch_npu.kernels import operator


@operator("npu_top_k_top_p")
def npu_top_k_top_p(logits: Tensor, p: Tensor | None = None, k: Tensor | None = None) -> Tensor:
    """Sets all logits except the best to minus infinity.

    The ``k`` largest logits are candidates. From the largest on, as many candidates stay as are
    needed for a probability of ``p``, at least one.

    Args:
        logits: ``[rows, vocabulary]``. ``p`` and ``k`` (int32) are ``[rows]``.
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
