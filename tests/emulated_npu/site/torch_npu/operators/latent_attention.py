# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vllm-ascend-kvext project
"""Operators of multi-head latent attention (MLA), except attention itself."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from torch_npu.kernels import kernel_operator, operator, require
from torch_npu.operators.norms import npu_rms_norm
from torch_npu.operators.paged_cache import write_slots
from torch_npu.operators.rotary import ROPE_SIZE, npu_interleave_rope

LATENT_SIZE = 512  # the only size that npu_kv_rmsnorm_rope_cache takes


@kernel_operator(
    "npu_kv_rmsnorm_rope_cache",
    lambda call: [
        ((*call.kv.shape[:-1], size), call.kv.dtype) for size in (ROPE_SIZE, LATENT_SIZE)
    ],
    lambda made, call: (call.k_cache, call.ckv_cache, *made),
)
def npu_kv_rmsnorm_rope_cache(
    kv: Tensor,
    gamma: Tensor,
    cos: Tensor,
    sin: Tensor,
    index: Tensor,
    k_cache: Tensor,
    ckv_cache: Tensor,
    *,
    c_kv_scale: Tensor | None = None,
    epsilon: float = 1e-5,
    cache_mode: str = "Norm",
    is_output_kv: bool = False,
) -> tuple[Tensor, Tensor]:
    """Splits ``kv``, norms the latent part, rotates the rest, and writes both to the cache.

    Args:
        kv: ``[batch, 1, tokens, 512 + 64]``, the latent and then the numbers to rotate,
            interleaved.
        gamma: ``[512]``. ``cos`` and ``sin`` are ``[batch, 1, tokens, 64]``.
        index: int64, ``[batch * tokens]``, slots. Negative slots are skipped.
        k_cache: ``[blocks, block_size, 1, 64]``. ``ckv_cache`` is ``[blocks, block_size, 1, 512]``.

    Returns:
        The rotated part and the normed latent, each ``[batch, 1, tokens, size]``. The operator
        returns the two caches before them.
    """
    name = "npu_kv_rmsnorm_rope_cache"
    require(name, c_kv_scale is None, "c_kv_scale is not emulated")
    require(name, cache_mode == "PA", f"cache_mode {cache_mode} is not emulated")
    require(name, kv.shape[-1] == LATENT_SIZE + ROPE_SIZE, "kv holds 512 + 64 numbers for a token")
    latent, to_turn = kv.split((LATENT_SIZE, ROPE_SIZE), dim=-1)
    normed, _ = npu_rms_norm(latent, gamma, epsilon)
    turned = npu_interleave_rope(to_turn, cos, sin)
    write_slots(turned.flatten(0, 2), k_cache, index)
    write_slots(normed.flatten(0, 2), ckv_cache, index)
    return turned, normed


@operator("npu_attention_update")
def npu_attention_update(
    lse: Sequence[Tensor], local_out: Sequence[Tensor], update_type: int
) -> tuple[Tensor, Tensor | None]:
    """Combines attention over several parts of the keys to attention over all keys.

    Args:
        lse: for each part, the logarithms of the sums of exponentials, ``[num_rows]`` in float32.
        local_out: for each part, its output, ``[num_rows, head_size]``.
        update_type: 0 for the combined output only, 1 for the output and its logarithms.
    """
    parts = torch.stack(list(lse))
    total = parts.logsumexp(0)
    weights = torch.exp(parts - total).unsqueeze(-1)
    joined = (torch.stack(list(local_out)).float() * weights).sum(0).to(local_out[0].dtype)
    return joined, total if update_type == 1 else None
