# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vllm-ascend-kvext project
"""Attention to a window of tokens and to compressed keys. The keys are the values, too."""

from __future__ import annotations

import itertools

import torch
from torch import Tensor

from torch_npu.kernels import kernel_operator, operator

ROWS_AT_A_TIME = 128
"""Rows computed together. Scores of all rows of a step would take gigabytes."""

PLAN_INTEGERS = 1024


@kernel_operator(
    "_C_ascend.npu_sparse_attn_sharedkv",
    lambda call: [(call.q.shape, call.q.dtype), ((0,), torch.float32)],
)
def sparse_attention(
    q: Tensor,
    *,
    ori_kv: Tensor | None = None,
    cmp_kv: Tensor | None = None,
    cmp_sparse_indices: Tensor | None = None,
    ori_block_table: Tensor | None = None,
    cmp_block_table: Tensor | None = None,
    cu_seqlens_q: Tensor | None = None,
    cu_seqlens_ori_kv: Tensor | None = None,
    cu_seqlens_cmp_kv: Tensor | None = None,
    seqused_kv: Tensor | None = None,
    sinks: Tensor | None = None,
    metadata: Tensor | None = None,
    softmax_scale: float = 0.0,
    cmp_ratio: int = 0,
    ori_mask_mode: int = 4,
    cmp_mask_mode: int = 3,
    ori_win_left: int = 128,
    ori_win_right: int = 0,
    layout_q: str = "BSND",
    layout_kv: str = "PA_ND",
) -> tuple[Tensor, Tensor]:
    """Attends from each token to itself, to the tokens before it, and to compressed keys.

    A head's sink takes part in its softmax and adds nothing.

    Args:
        q: shape ``[tokens, heads, head_size]``.
        ori_kv: keys of tokens, shape ``[blocks, block_size, 1, head_size]``. On the device they
            have the type of ``q``; here they may have a narrower one.
        cmp_kv: compressed keys, shape of ``ori_kv``.
        cmp_sparse_indices: keys of ``cmp_kv`` that each token reads, -1 for none, shape
            ``[tokens, 1, keys]``. Without it, a token reads all keys. The key of a window that has
            not ended is never read.
        cu_seqlens_q: first row of each request, and the end of the last; shape ``[requests + 1]``.
        cu_seqlens_ori_kv: first rows of keys without pages, as ``cu_seqlens_cmp_kv``. Paged keys
            need neither.
        seqused_kv: number of tokens of each request, shape ``[requests]``.
        sinks: float32, shape ``[heads]``.
        metadata: a plan for the device's cores.
        ori_win_left: number of tokens before itself that a token reads.
    """
    form = (layout_q, layout_kv, ori_mask_mode, cmp_mask_mode, ori_win_right)
    if form != ("TND", "PA_ND", 4, 3, 0):
        raise RuntimeError(f"npu_sparse_attn_sharedkv: {form} is not emulated")
    if ori_kv is None or sinks is None or metadata is None or q.shape[-1] != ori_kv.shape[-1]:
        raise RuntimeError("npu_sparse_attn_sharedkv: no ori_kv that fits q, sinks and metadata")
    result = torch.empty_like(q)
    sink = sinks.float()[None, :, None]
    for request, (first, end) in enumerate(itertools.pairwise(cu_seqlens_q.tolist())):
        num_tokens = int(seqused_kv[request])
        compressed = q.new_empty(0, q.shape[-1], dtype=torch.float32)
        if cmp_kv is not None:
            compressed = _read(cmp_kv, cmp_block_table[request], 0, num_tokens // cmp_ratio)
        for row in range(first, end, ROWS_AT_A_TIME):
            rows = slice(row, min(row + ROWS_AT_A_TIME, end))
            positions = torch.arange(rows.start, rows.stop) - end + num_tokens
            lowest = max(0, int(positions[0]) - ori_win_left)
            keys = _read(ori_kv, ori_block_table[request], lowest, int(positions[-1]) + 1)
            distances = positions[:, None] - torch.arange(lowest, lowest + len(keys))
            is_seen = (distances >= 0) & (distances <= ori_win_left)
            if cmp_kv is not None:
                ended = (positions + 1) // cmp_ratio
                is_read = torch.arange(len(compressed)) < ended[:, None]
                if cmp_sparse_indices is not None:
                    is_read &= _is_chosen(cmp_sparse_indices[rows, 0].long(), len(compressed))
                keys = torch.cat((keys, compressed))
                is_seen = torch.cat((is_seen, is_read), 1)
            scores = torch.einsum("thd,kd->thk", q[rows].float(), keys) * softmax_scale
            scores.masked_fill_(~is_seen[:, None], float("-inf"))
            shares = torch.cat((scores, sink.expand(len(scores), -1, 1)), -1).softmax(-1)
            result[rows] = torch.einsum("thk,kd->thd", shares[..., :-1], keys).to(q.dtype)
    return result, torch.empty(0)


def _read(cache: Tensor, block_table: Tensor, first: int, end: int) -> Tensor:
    """The rows ``first`` to ``end`` of a request, shape ``[rows, head_size]``."""
    rows = torch.arange(first, end)
    block_size = cache.shape[1]
    return cache[block_table[rows // block_size].long(), rows % block_size, 0].float()


def _is_chosen(indices: Tensor, num_keys: int) -> Tensor:
    """Whether each key is among the chosen keys of a row. -1 is no key."""
    chosen = torch.zeros(len(indices), num_keys + 1, dtype=torch.bool)
    chosen.scatter_(1, torch.where(indices < 0, num_keys, indices), True)
    return chosen[:, :-1]


@operator("_C_ascend.npu_sparse_attn_sharedkv_metadata")
@operator("_C_ascend.npu_vllm_quant_lightning_indexer_metadata")
@operator("_C_ascend.npu_quant_lightning_indexer_v2_metadata")
def plan(*, device: str, **options: object) -> Tensor:
    """The plan for the cores of the device. The emulation does not read it."""
    return torch.zeros(PLAN_INTEGERS, dtype=torch.int32, device=device)
