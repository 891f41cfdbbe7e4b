# SPDX-License-Identifier: Apache-2.0
"""Writes and reads of the paged KV cache.

A cache has the shape ``[num_blocks, block_size, num_heads, head_size]``. A slot is the number of a
token's place in it: ``block * block_size + offset``.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch


def _npu_reshape_and_cache(
    key: torch.Tensor,
    value: torch.Tensor,
    key_cache: torch.Tensor,
    value_cache: torch.Tensor,
    slot_indices: torch.Tensor,
) -> None:
    """Writes one token's key and value to each slot; a negative slot is left out.

    Args:
        key: shape ``[num_tokens, num_heads, head_size]``, as ``value``.
        slot_indices: int32 or int64, shape ``[num_tokens]``.
    """
    write_slots(key, key_cache, slot_indices)
    write_slots(value, value_cache, slot_indices)


def write_slots(tokens: torch.Tensor, cache: torch.Tensor, slots: torch.Tensor) -> None:
    """Writes ``tokens[i]`` to the slot ``slots[i]`` of ``cache``, unless it is negative."""
    is_given = slots >= 0
    slots = slots[is_given].long()
    block_size = cache.shape[1]
    cache[slots // block_size, slots % block_size] = (
        tokens[is_given].reshape(-1, *cache.shape[2:]).to(cache.dtype)
    )


def read_pages(cache: torch.Tensor, blocks: torch.Tensor, num_tokens: int) -> torch.Tensor:
    """The first ``num_tokens`` tokens of the sequence whose block table is ``blocks``.

    Only the blocks that hold them are read: what follows in a block table is not valid.

    Returns:
        Shape ``[num_tokens, *cache.shape[2:]]``.
    """
    num_blocks = -(-num_tokens // cache.shape[1])
    return cache[blocks[:num_blocks].long()].flatten(0, 1)[:num_tokens]


def npu_paged_cache_load(
    key_cache: torch.Tensor,
    value_cache: torch.Tensor,
    block_table: torch.Tensor,
    context_lens: torch.Tensor,
    *,
    seq_starts: torch.Tensor | None = None,
    key: torch.Tensor,
    value: torch.Tensor,
) -> None:
    """Collects parts of sequences from the cache in ``key`` and ``value``, one behind the other.

    Args:
        block_table: int32, shape ``[num_sequences, max_blocks]``.
        context_lens: int32, shape ``[num_sequences]``: tokens of each sequence.
        seq_starts: int32, shape ``[num_sequences]``: the first token of each; it lies at the start
            of a block.
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


KERNELS = {
    "_npu_reshape_and_cache": (_npu_reshape_and_cache,),
    "atb.npu_paged_cache_load": (npu_paged_cache_load,),
}
