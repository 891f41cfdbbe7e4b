# SPDX-License-Identifier: Apache-2.0
"""What multi-head latent attention (MLA) needs beside attention itself."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from torch_npu.operators.norms import npu_rms_norm
from torch_npu.operators.paged_cache import write_slots
from torch_npu.operators.refusals import refuse_given, require
from torch_npu.operators.rotary import ROPE_SIZE, npu_interleave_rope

LATENT_SIZE = 512  # the only one of npu_kv_rmsnorm_rope_cache


def npu_kv_rmsnorm_rope_cache(
    kv: torch.Tensor,
    gamma: torch.Tensor,
    cos: torch.Tensor,
    sin: torch.Tensor,
    index: torch.Tensor,
    k_cache: torch.Tensor,
    ckv_cache: torch.Tensor,
    *,
    k_rope_scale: torch.Tensor | None = None,
    c_kv_scale: torch.Tensor | None = None,
    k_rope_offset: torch.Tensor | None = None,
    c_kv_offset: torch.Tensor | None = None,
    epsilon: float = 1e-5,
    cache_mode: str = "Norm",
    is_output_kv: bool = False,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Splits ``kv``, norms the latent part, turns the rotary part, and writes both to the cache.

    Args:
        kv: ``[batch, 1, tokens, 512 + 64]``: the latent, then the numbers to turn, interleaved.
        gamma: ``[512]``; ``cos`` and ``sin``: ``[batch, 1, tokens, 64]``.
        index: int64, ``[batch * tokens]``: slots; a negative one is left out.
        k_cache: ``[blocks, block_size, 1, 64]``; ``ckv_cache``: ``[blocks, block_size, 1, 512]``.

    Returns:
        The turned part, and the normed latent, each ``[batch, 1, tokens, size]``. The operator
        returns the two caches before them.
    """
    name = "npu_kv_rmsnorm_rope_cache"
    scales = {"k_rope_scale": k_rope_scale, "c_kv_scale": c_kv_scale}
    refuse_given(name, scales | {"k_rope_offset": k_rope_offset, "c_kv_offset": c_kv_offset})
    require(name, cache_mode == "PA", f"cache_mode {cache_mode} is not emulated")
    require(name, kv.shape[-1] == LATENT_SIZE + ROPE_SIZE, "kv holds 512 + 64 numbers for a token")
    latent, to_turn = kv.split((LATENT_SIZE, ROPE_SIZE), dim=-1)
    normed, _ = npu_rms_norm(latent, gamma, epsilon)
    turned = npu_interleave_rope(to_turn, cos, sin)
    write_slots(turned.flatten(0, 2), k_cache, index)
    write_slots(normed.flatten(0, 2), ckv_cache, index)
    return turned, normed


def kv_rmsnorm_rope_cache_outputs(
    kv: torch.Tensor, *arguments: object, **options: object
) -> list[tuple[tuple[int, ...], torch.dtype]]:
    return [((*kv.shape[:-1], size), kv.dtype) for size in (ROPE_SIZE, LATENT_SIZE)]


def npu_transpose_batchmatmul(
    input: torch.Tensor,
    weight: torch.Tensor,
    *,
    bias: torch.Tensor | None = None,
    scale: torch.Tensor | None = None,
    perm_x1: Sequence[int] = (0, 1, 2),
    perm_x2: Sequence[int] = (0, 1, 2),
    perm_y: Sequence[int] = (1, 0, 2),
    batch_split_factor: int = 1,
) -> torch.Tensor:
    """Batched matrix product with reordered dimensions.

    Args:
        input: ``[batch, m, k]`` after ``perm_x1``; ``weight``: ``[batch, k, n]``.

    Returns:
        ``[batch, m, n]`` reordered by ``perm_y``: ``[m, batch, n]``.
    """
    name = "npu_transpose_batchmatmul"
    refuse_given(name, {"bias": bias, "scale": scale})
    given = (tuple(perm_x2), tuple(perm_y), batch_split_factor)
    require(name, given == ((0, 1, 2), (1, 0, 2), 1), f"{given} is not emulated")
    return torch.bmm(input.permute(*perm_x1), weight).permute(*perm_y).contiguous()


def npu_attention_update(
    lse: Sequence[torch.Tensor], local_out: Sequence[torch.Tensor], update_type: int
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Joins attention over several parts of the keys to attention over all of them.

    Args:
        lse: for each part, ``[num_rows]`` in float32: logarithms of the sums of exponentials.
        local_out: for each part, ``[num_rows, head_size]``.
        update_type: 0 the joined output alone, 1 with its logarithms.
    """
    parts = torch.stack(list(lse))
    total = parts.logsumexp(0)
    weights = torch.exp(parts - total).unsqueeze(-1)
    joined = (torch.stack(list(local_out)).float() * weights).sum(0).to(local_out[0].dtype)
    return joined, total if update_type == 1 else None


OPERATORS = {
    "npu_transpose_batchmatmul": npu_transpose_batchmatmul,
    "npu_attention_update": npu_attention_update,
}
KERNELS = {
    "npu_kv_rmsnorm_rope_cache": (
        npu_kv_rmsnorm_rope_cache,
        kv_rmsnorm_rope_cache_outputs,
        # The two caches are the sixth and seventh argument.
        lambda made, *args, **kwargs: (args[5], args[6], *made),
    )
}
