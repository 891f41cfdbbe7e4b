# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vllm-ascend-kvext project
"""Writes and reads of the paged KV cache.

A cache has the shape ``[num_blocks, block_size, num_heads, head_size]``. A slot is the number of a
token's place in the cache: ``block * block_size + offset``.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from torch_npu.kernels import kernel_operator, require

TILED_DIMENSIONS = 5
"""The dimensions of a cache whose pages are tiled (NZ)."""


@kernel_operator("_npu_reshape_and_cache")
def _npu_reshape_and_cache(
    key: Tensor, value: Tensor, key_cache: Tensor, value_cache: Tensor, slot_indices: Tensor
) -> None:
    """Writes one token's key and value to each slot, and skips negative slots.

    Args:
        key: shape ``[num_tokens, num_heads, head_size]``, as ``value``.
        slot_indices: int32 or int64, shape ``[num_tokens]``.
    """
    write_slots(key, key_cache, slot_indices)
    write_slots(value, value_cache, slot_indices)


@kernel_operator("npu_scatter_pa_kv_cache")
def npu_scatter_pa_kv_cache(
    key: Tensor,
    value: Tensor,
    key_cache: Tensor,
    value_cache: Tensor,
    slot_mapping: Tensor,
    *,
    cache_mode: str = "Norm",
) -> None:
    """The same as ``_npu_reshape_and_cache``, also for tiled pages.

    Args:
        key_cache: Tiled: ``[num_blocks, num_heads, head_size // tile, block_size, tile]``, where a
            tile has 32 bytes. So has ``value_cache``.
    """
    require("npu_scatter_pa_kv_cache", cache_mode == "Norm", f"cache_mode {cache_mode}")
    if key_cache.dim() == TILED_DIMENSIONS:
        # A view whose rows are those of tokens.
        key_cache, value_cache = (one.permute(0, 3, 1, 2, 4) for one in (key_cache, value_cache))
    _npu_reshape_and_cache(key, value, key_cache, value_cache, slot_mapping)


def write_slots(tokens: Tensor, cache: Tensor, slots: Tensor) -> None:
    """Writes ``tokens[i]`` to the slot ``slots[i]`` of ``cache``, unless the slot is negative."""
    block_size = cache.shape[1]
    scatter_nd_update(cache, torch.stack((slots // block_size, slots % block_size), -1), tokens)


@kernel_operator("_C_ascend.npu_scatter_nd_update_v2")
@kernel_operator("_C_ascend.npu_scatter_nd_update_sk")
def scatter_nd_update(var: Tensor, indices: Tensor, update: Tensor) -> None:
    """Writes ``update[i]`` to ``var[indices[i]]``, unless an index is negative.

    On the device both have the same type. Here ``var`` may have another floating type, because a
    model in float32 keeps its cache in bfloat16.

    Args:
        var: shape ``[blocks, block_size, ...]``.
        indices: int32, shape ``[rows, 2]``.
        update: as many elements as the rows of ``var`` that are written.
    """
    if update.dtype != var.dtype and not (update.is_floating_point() and var.is_floating_point()):
        raise RuntimeError(f"npu_scatter_nd_update_v2: var {var.dtype}, update {update.dtype}")
    places = indices.long()
    is_given = (places >= 0).all(-1)
    rows = update.reshape(len(places), *var.shape[places.shape[-1] :])
    var[tuple(places[is_given].T)] = rows[is_given].to(var.dtype)


def read_pages(cache: Tensor, blocks: Tensor, num_tokens: int) -> Tensor:
    """The first ``num_tokens`` tokens of a sequence with the block table ``blocks``.

    Only the blocks of these tokens are read, because later entries of a block table are not valid.

    Returns:
        Shape ``[num_tokens, *cache.shape[2:]]``.
    """
    num_blocks = -(-num_tokens // cache.shape[1])
    return cache[blocks[:num_blocks].long()].flatten(0, 1)[:num_tokens]


@kernel_operator("atb.npu_paged_cache_load")
def npu_paged_cache_load(
    key_cache: Tensor,
    value_cache: Tensor,
    block_table: Tensor,
    context_lens: Tensor,
    *,
    seq_starts: Tensor | None = None,
    key: Tensor,
    value: Tensor,
) -> None:
    """Copies parts of sequences from the cache to ``key`` and ``value``, one after the other.

    Args:
        block_table: int32, shape ``[num_sequences, max_blocks]``.
        context_lens: int32, shape ``[num_sequences]``, number of tokens of each sequence.
        seq_starts: int32, shape ``[num_sequences]``, the first token of each sequence. It is the
            first token of a block.
        key: written, shape ``[sum of context_lens, num_heads, head_size]``, as ``value``.
    """
    starts: Sequence[int] = [0] * len(context_lens) if seq_starts is None else seq_starts.tolist()
    first = 0
    for row, (num_tokens, start) in enumerate(zip(context_lens.tolist(), starts, strict=True)):
        for cache, gathered in ((key_cache, key), (value_cache, value)):
            if start % cache.shape[1]:
                raise RuntimeError(f"npu_paged_cache_load: token {start} does not start a block")
            blocks = block_table[row, start // cache.shape[1] :]
            part = gathered[first : first + num_tokens]
            part.copy_(read_pages(cache, blocks, num_tokens).view(part.shape))
        first += num_tokens


@kernel_operator("npu_gather_pa_kv_cache")
def npu_gather_pa_kv_cache(
    key_cache: Tensor,
    value_cache: Tensor,
    block_tables: Tensor,
    seq_lens: Tensor,
    key: Tensor,
    value: Tensor,
    *,
    seq_offset: Tensor | None = None,
) -> None:
    """The same as ``npu_paged_cache_load``, with other names."""
    where = (key_cache, value_cache, block_tables, seq_lens)
    npu_paged_cache_load(*where, seq_starts=seq_offset, key=key, value=value)
