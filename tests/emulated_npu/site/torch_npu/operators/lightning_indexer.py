# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vllm-ascend-kvext project
"""The indexer scores compressed keys with 8-bit integers and chooses which attention reads."""

from __future__ import annotations

import torch
from torch import Tensor

from torch_npu.kernels import kernel_operator

HEADS = 64
HEAD_SIZE = 128
UNLIMITED = (1 << 63) - 1


@kernel_operator(
    "_C_ascend.npu_vllm_quant_lightning_indexer",
    lambda call: [
        ((len(call.query), call.key.shape[2], call.sparse_count), torch.int32),
        ((0,), torch.float32),
    ],
)
def quant_lightning_indexer(
    query: Tensor,
    key: Tensor,
    weights: Tensor,
    query_dequant_scale: Tensor,
    key_dequant_scale: Tensor,
    query_quant_mode: int = 0,
    key_quant_mode: int = 0,
    actual_seq_lengths_query: Tensor | None = None,
    actual_seq_lengths_key: Tensor | None = None,
    block_table: Tensor | None = None,
    metadata: Tensor | None = None,
    layout_query: str = "BSND",
    layout_key: str = "BSND",
    sparse_count: int = 2048,
    sparse_mode: int = 3,
    pre_tokens: int = UNLIMITED,
    next_tokens: int = UNLIMITED,
    cmp_ratio: int = 1,
    return_value: bool = False,
) -> tuple[Tensor, Tensor]:
    """Chooses for each token the keys with the best scores among keys whose windows have ended.

    A score is the weighted sum over heads of the positive part of query times key.

    Args:
        query: int8, shape ``[tokens, 64, 128]``.
        key: int8, shape ``[blocks, block_size, 1, 128]``.
        weights: float16, shape ``[tokens, 64]``, as ``query_dequant_scale``.
        key_dequant_scale: float16, shape ``[blocks, block_size, 1]``.
        actual_seq_lengths_query: the end of each request in ``query``, shape ``[requests]``.
        actual_seq_lengths_key: number of tokens of each request before compression, shape
            ``[requests]``.
        block_table: blocks of the keys, shape ``[requests, blocks]``.
        metadata: a plan for the device's cores.

    Returns:
        The chosen keys, int32, shape ``[tokens, 1, sparse_count]``, filled up with -1; and an empty
        tensor.
    """
    form = (layout_query, layout_key, sparse_mode, return_value)
    if form != ("TND", "PA_BSND", 3, False):
        raise RuntimeError(f"npu_vllm_quant_lightning_indexer: {form} is not emulated")
    types = (query.dtype, key.dtype, weights.dtype, key_dequant_scale.dtype)
    if types != (torch.int8, torch.int8, torch.float16, torch.float16):
        raise RuntimeError(f"npu_vllm_quant_lightning_indexer: types {types}")
    if query.shape[1:] != (HEADS, HEAD_SIZE) or metadata is None:
        raise RuntimeError(f"npu_vllm_quant_lightning_indexer: query {query.shape}, {metadata=}")
    chosen = torch.full((query.shape[0], 1, sparse_count), -1, dtype=torch.int32)
    first = 0
    for request, end in enumerate(actual_seq_lengths_query.tolist()):
        num_tokens = int(actual_seq_lengths_key[request])
        ended = (torch.arange(num_tokens - (end - first), num_tokens) + 1) // cmp_ratio
        num_keys = int(ended[-1]) if end > first else 0
        if num_keys:
            blocks = block_table[request, : -(-num_keys // key.shape[1])].long()
            keys = key[blocks].flatten(0, 2)[:num_keys].float()
            # This product has half precision on the device, too.
            factors = weights[first:end] * query_dequant_scale[first:end].view(-1, HEADS)
            scores = torch.stack(  # row by row, because all rows would take gigabytes
                [
                    factor @ (heads @ keys.T).relu_()
                    for heads, factor in zip(query[first:end].float(), factors.float(), strict=True)
                ]
            )
            scores *= key_dequant_scale[blocks].flatten()[:num_keys].float()
            scores.masked_fill_(torch.arange(num_keys) >= ended[:, None], float("-inf"))
            best = scores.topk(min(sparse_count, num_keys), -1)
            places = torch.where(best.values == float("-inf"), -1, best.indices)
            chosen[first:end, 0, : places.shape[1]] = places.to(torch.int32)
        first = end
    return chosen, torch.empty(0)


@kernel_operator(
    "_C_ascend.npu_quant_lightning_indexer_v2",
    lambda call: [
        ((len(call.query), call.key.shape[2], call.topk), torch.int32),
        ((0,), torch.float32),
    ],
)
def quant_lightning_indexer_v2(
    query: Tensor,
    key: Tensor,
    weights: Tensor,
    query_dequant_scale: Tensor,
    key_dequant_scale: Tensor,
    topk: int,
    quant_mode: int,
    *,
    cu_seqlens_q: Tensor | None = None,
    seqused_k: Tensor | None = None,
    cmp_residual_k: Tensor | None = None,
    block_table: Tensor | None = None,
    metadata: Tensor | None = None,
    layout_q: str = "TND",
    layout_k: str = "PA_BBND",
    mask_mode: int = 3,
    cmp_ratio: int = 4,
    return_value: int = 0,
) -> tuple[Tensor, Tensor]:
    """The same as ``quant_lightning_indexer``, with other names.

    Args:
        topk: number of keys to choose.
        quant_mode: 2, which stands for 8-bit integers.
        cu_seqlens_q: first row of each request, and the end of the last; shape ``[requests + 1]``.
        seqused_k: number of compressed keys of each request, shape ``[requests]``.
        cmp_residual_k: number of tokens behind the last complete window, shape of ``seqused_k``.
    """
    form = (layout_q, layout_k, mask_mode, return_value, quant_mode)
    if form != ("TND", "PA_BBND", 3, 0, 2) or seqused_k is None or cmp_residual_k is None:
        raise RuntimeError(f"npu_quant_lightning_indexer_v2: {form} is not emulated")
    return quant_lightning_indexer(
        query,
        key,
        weights,
        query_dequant_scale,
        key_dequant_scale,
        actual_seq_lengths_query=cu_seqlens_q[1:],
        actual_seq_lengths_key=seqused_k * cmp_ratio + cmp_residual_k,
        block_table=block_table,
        metadata=metadata,
        layout_query="TND",
        layout_key="PA_BSND",
        sparse_count=topk,
        cmp_ratio=cmp_ratio,
    )
