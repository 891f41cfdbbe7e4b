# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vllm-ascend-kvext project
"""Attention residuals: a layer's input is a mixture of what earlier layers left.

A bank holds the sum of residuals at every few layers. The input of a layer is the mean of the
bank's entries and of the present sum, weighted by how well each fits a vector that the layer has
learnt.
"""

from __future__ import annotations

import torch
from torch import Tensor

from torch_npu.kernels import operator
from torch_npu.operators.norms import npu_rms_norm


@operator("_C_ascend.attn_res_fwd")
def attn_res_fwd(
    prefix: Tensor,
    addend: Tensor | None,
    blocks: Tensor,
    proj: Tensor,
    norm: Tensor,
    eps: float,
    valid: int,
    output_norm: Tensor | None = None,
    output_eps: float = 0.0,
    write_idx: int = -1,
    save_materialized: bool = False,
    mix: bool = True,
    optimize_prefill: bool = False,
) -> tuple[Tensor, Tensor, Tensor]:
    """Add to the sum of residuals, mix it with the bank, and norm the mixture.

    Args:
        prefix: the sum of residuals, shape ``[tokens, hidden]``.
        addend: what is added to it first, as ``prefix``.
        blocks: the bank, shape ``[tokens, entries, hidden]``; written.
        proj: the vector of the mixture, shape ``[1, hidden]``.
        norm: the weight of the norm before the vector, shape ``[hidden]``.
        eps: of that norm.
        valid: the number of the bank's entries that count.
        output_norm: the weight of the norm of the mixture, shape ``[hidden]``. Without it, the
            mixture has no norm.
        output_eps: of that norm.
        write_idx: the entry of the bank that gets the sum, or -1.
        save_materialized: whether the mixture before its norm is returned.
        mix: whether the bank counts at all.
        optimize_prefill: a way of the device to the same numbers.

    Returns:
        The normed mixture, the sum, and the mixture or again the first result. All are as
        ``prefix``.
    """
    total = prefix if addend is None else prefix + addend
    if write_idx >= 0:
        blocks[:, write_idx] = total
    mixture = total
    if mix and valid:
        sources = torch.cat((blocks[:, :valid], total.unsqueeze(1)), 1)
        normed, _ = npu_rms_norm(sources.float(), norm, eps)
        weights = (normed @ proj.float().t()).softmax(1)
        mixture = (sources.float() * weights).sum(1).to(prefix.dtype)
    found = mixture if output_norm is None else npu_rms_norm(mixture, output_norm, output_eps)[0]
    return found, total, mixture if save_materialized else found
