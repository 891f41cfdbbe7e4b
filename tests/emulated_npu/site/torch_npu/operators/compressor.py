# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vllm-ascend-kvext project
"""Compressors make one key, which attention reads, of each *window* of 4 or 128 tokens.

A compressor keeps data of tokens in a paged *state*. The row of a token has the token's projection
and its score, both in float32.
"""

from __future__ import annotations

import itertools
from types import SimpleNamespace

import torch
from torch import Tensor

from torch_npu.kernels import kernel_operator
from torch_npu.operators.rotary import npu_rotary_mul

BLOCK_AND_OFFSET = 2
"""The ``slot_mapping_format`` of an A2."""

NOTHING_SCORE = -2e38

Shapes = list[tuple[tuple[int, ...], torch.dtype]]


@kernel_operator(
    "_C_ascend.compressor",
    lambda call: [((len(call.rope_sin), len(call.norm_weight)), call.x.dtype)],
)
def compressor(
    x: Tensor,
    wkv: Tensor,
    wgate: Tensor,
    state_cache: Tensor,
    ape: Tensor,
    norm_weight: Tensor,
    rope_sin: Tensor,
    rope_cos: Tensor,
    state_block_table: Tensor,
    cu_seqlens: Tensor,
    seqused: Tensor | None,
    start_pos: Tensor,
    rope_head_dim: int,
    cmp_ratio: int,
    coff: int,
    norm_eps: float,
    rotary_mode: int,
    cache_mode: int,
) -> Tensor:
    """Stores the states of all tokens, and returns the keys of all windows that are complete now.

    A key is the mean of its window's projections, weighted element by element by the softmax of the
    scores. A norm and a rotation follow. With ``coff`` 2 windows overlap: projections and scores
    are twice as wide, and a key is made of the first halves of the window before its own window and
    of the second halves of its own window. The first window has no window before it.

    Args:
        x: shape ``[tokens, hidden]``.
        wkv: weight of the projection, shape ``[coff * head_size, hidden]``.
        wgate: weight of the scores, shape of ``wkv``.
        state_cache: float32, shape ``[blocks, block_size, 2 * coff * head_size]``. States of
            block 0 are not stored.
        ape: is added to the scores according to the place in the window, shape
            ``[cmp_ratio, coff * head_size]``.
        rope_sin: sines by key, shape ``[rows, rope_head_dim]``.
        state_block_table: shape ``[requests, blocks]``.
        cu_seqlens: first row of each request in ``x``, and the end of the last; shape ``[requests +
            1]``.
        start_pos: position of each request's first row, shape ``[requests]``.

    Returns:
        The keys, one request after the other, shape ``[rows, head_size]``. The device does not
        write the rows behind the last key; here they are NaN.
    """
    head_size = norm_weight.shape[0]
    width = coff * norm_weight.shape[0]
    if (rotary_mode, cache_mode, seqused) != (2, 1, None) or coff != (2 if cmp_ratio == 4 else 1):
        raise RuntimeError(f"compressor: {rotary_mode=} {cache_mode=} {seqused=}: not emulated")
    if state_cache.shape[2] != 2 * width or ape.shape != (cmp_ratio, width):
        raise RuntimeError(f"compressor: state {state_cache.shape} or ape {ape.shape} do not fit")
    kv = x.float() @ wkv.float().T
    scores = x.float() @ wgate.float().T
    keys = [kv.new_empty(0, head_size)]
    for request, (first, end) in enumerate(itertools.pairwise(cu_seqlens.tolist())):
        start = int(start_pos[request])
        stop = start + end - first
        table = state_block_table[request]
        place = torch.arange(start, stop) % cmp_ratio
        states = torch.stack((kv[first:end], scores[first:end] + ape[place]), 1)
        blocks, rows = _places(table, state_cache.shape[1], start, stop)
        is_kept = blocks != 0
        state_cache[blocks[is_kept], rows[is_kept]] = states[is_kept].flatten(1)
        windows = range(start // cmp_ratio, stop // cmp_ratio)
        if windows:
            lowest = max(0, (windows.start + 1 - coff) * cmp_ratio)
            earlier = state_cache[_places(table, state_cache.shape[1], lowest, start)]
            states = torch.cat((earlier.unflatten(1, (2, width)), states))
            states = states[: windows.stop * cmp_ratio - lowest].unflatten(0, (-1, cmp_ratio))
            keys.append(_keys(states, head_size, is_at_first=windows.start == 0))
    found = torch.cat(keys)
    found = found * torch.rsqrt(found.square().mean(-1, keepdim=True) + norm_eps)
    found = found * norm_weight.float()
    cos = rope_cos[: len(found)].float()
    sin = rope_sin[: len(found)].float()
    turned = npu_rotary_mul(found[:, -rope_head_dim:], cos, sin, "interleave")
    found[:, -rope_head_dim:] = turned
    result = torch.full((len(rope_sin), head_size), float("nan"))
    result[: len(found)] = found
    return result.to(x.dtype)


def _keys(states: Tensor, head_size: int, *, is_at_first: bool) -> Tensor:
    """Keys of windows before the norm. Overlapping windows need the window before the first, too.

    Args:
        states: shape ``[windows, cmp_ratio, 2, width]``.
        is_at_first: whether there is no window before the first.
    """
    if states.shape[-1] > head_size:
        if is_at_first:
            nothing = torch.zeros_like(states[:1])
            nothing[:, :, 1] = NOTHING_SCORE
            states = torch.cat((nothing, states))
        states = torch.cat((states[:-1, ..., :head_size], states[1:, ..., head_size:]), 1)
    return (states[:, :, 0] * states[:, :, 1].softmax(1)).sum(1)


def _places(block_table: Tensor, block_size: int, first: int, end: int) -> tuple[Tensor, Tensor]:
    """The blocks of the tokens ``first`` to ``end``, and the rows in these blocks."""
    tokens = torch.arange(first, end)
    return block_table[tokens // block_size].long(), tokens % block_size


def compressor_metadata_outputs(call: SimpleNamespace) -> Shapes:
    num_rows = call.num_compressed_tokens
    cos = call.rope_cos
    rope = ((num_rows, 1, 1, cos.shape[1]), cos.dtype)
    return [rope, rope, ((num_rows, 2), torch.int32)]


@kernel_operator("_C_ascend.compressor_metadata", compressor_metadata_outputs)
def compressor_metadata(
    rope_cos: Tensor,
    rope_sin: Tensor,
    cu_seqlens: Tensor,
    start_pos: Tensor,
    kv_block_table: Tensor,
    kv_block_size: int,
    slot_mapping_format: int,
    compress_ratio: int,
    num_compressed_tokens: int,
    num_reqs_actual: int,
) -> tuple[Tensor, Tensor, Tensor]:
    """Returns rotation and slot of each key that ``compressor`` will return.

    Args:
        rope_cos: cosines by position, shape ``[positions, width]``.
        kv_block_table: blocks of the keys, shape ``[requests, blocks]``.
        num_compressed_tokens: number of rows to return. Rows without a key have no rotation, and
            their slot is one that is skipped.
        num_reqs_actual: number of requests that are read.

    Returns:
        Cosines and sines of the window's first token, ``[rows, 1, 1, width]``, and slots: block
        and offset, ``[rows, 2]``.
    """
    if slot_mapping_format != BLOCK_AND_OFFSET:
        raise RuntimeError(f"compressor_metadata: {slot_mapping_format=} is not emulated")
    cos = torch.ones(num_compressed_tokens, rope_cos.shape[1], dtype=rope_cos.dtype)
    sin = torch.zeros_like(cos)
    slots = torch.tensor([-1, kv_block_size - 1], dtype=torch.int32)
    slots = slots.repeat(num_compressed_tokens, 1)
    bounds = cu_seqlens.tolist()
    keys = (
        (request, window)
        for request in range(num_reqs_actual)
        for start in [int(start_pos[request])]
        for stop in [start + bounds[request + 1] - bounds[request]]
        for window in range(start // compress_ratio, stop // compress_ratio)
    )
    for row, (request, window) in enumerate(itertools.islice(keys, num_compressed_tokens)):
        position = window * compress_ratio
        block = window // kv_block_size
        if position < len(rope_cos) and block < kv_block_table.shape[1]:
            cos[row], sin[row] = rope_cos[position], rope_sin[position]
            slots[row, 0] = kv_block_table[request, block]
            slots[row, 1] = window % kv_block_size
    return cos[:, None, None], sin[:, None, None], slots


@kernel_operator("_C_ascend.compressor_metadata_out")
def compressor_metadata_out(
    rope_cos: Tensor,
    rope_sin: Tensor,
    cu_seqlens: Tensor,
    start_pos: Tensor,
    kv_block_table: Tensor,
    kv_block_size: int,
    slot_mapping_format: int,
    compress_ratio: int,
    num_reqs_actual: int,
    compress_cos: Tensor,
    compress_sin: Tensor,
    slot_mapping: Tensor,
) -> None:
    """The same as ``compressor_metadata``, written to the last three parameters."""
    where = (cu_seqlens, start_pos, kv_block_table, kv_block_size, slot_mapping_format)
    sizes = (compress_ratio, len(slot_mapping), num_reqs_actual)
    found = compressor_metadata(rope_cos, rope_sin, *where, *sizes)
    for target, values in zip((compress_cos, compress_sin, slot_mapping), found, strict=True):
        target.copy_(values)
