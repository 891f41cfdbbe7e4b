"""Compressors: every 4 or 128 tokens become one key, which long-range attention reads.

What a compressor has of the tokens of a window that is not full yet lies in a paged *state*: for every token its
projection (``kv``) and its weight (``score``), both in float32, in one row of the state's page.
"""

import torch

from .partial_rotary import rotate_interleaved

BLOCK_OFFSET, FLAT = 2, 1  # slot_mapping_format


def _rows_of(block_table, block_size, first, last):
    """Returns for the positions [first, last) the page and the row in it."""
    positions = torch.arange(first, last)
    return block_table[positions // block_size].long(), positions % block_size


def compressor_outputs(x, wkv, wgate, state_cache, ape, norm_weight, rope_sin, *args, **kwargs):
    if x.dim() != 2 or state_cache.dim() != 3 or rope_sin.dim() != 2:
        raise RuntimeError("compressor: only x [tokens, hidden] with paged states is emulated")
    return [((rope_sin.shape[0], norm_weight.shape[0]), x.dtype)]


def compressor(
    x, wkv, wgate, state_cache, ape, norm_weight, rope_sin, rope_cos,
    state_block_table, cu_seqlens, seqused, start_pos, rope_head_dim, cmp_ratio, coff, norm_eps, rotary_mode, cache_mode,
):  # fmt: skip
    """Stores the states of all tokens, and returns the keys of the windows that they fill, one behind the other.

    ``coff`` 2 means windows that overlap: a key is made of two windows of tokens, of the first halves of the earlier
    tokens' projections and the second halves of the later ones'. Before the first window there is nothing.
    Rows behind the last key are not written on the device; here they are NaN. What belongs to page 0 is not stored.
    """
    if rotary_mode != 2 or cache_mode != 1 or coff != (2 if cmp_ratio == 4 else 1):
        raise RuntimeError(f"compressor: {rotary_mode=} {cache_mode=} {coff=} {cmp_ratio=} are not emulated")
    head_dim, block_size = norm_weight.shape[0], state_cache.shape[1]
    width = coff * head_dim
    if state_cache.shape[2] != 2 * width or ape.shape != (cmp_ratio, width) or wkv.shape[0] != width:
        raise RuntimeError(f"compressor: state {tuple(state_cache.shape)}, ape {tuple(ape.shape)} do not fit {width=}")
    kv, score = x.float() @ wkv.float().T, x.float() @ wgate.float().T
    result = torch.full((rope_sin.shape[0], head_dim), float("nan"))
    written, bounds = 0, cu_seqlens.tolist()
    for request, (begin, end) in enumerate(zip(bounds, bounds[1:], strict=False)):
        start = int(start_pos[request]) if start_pos is not None else 0
        if seqused is not None:
            end = begin + int(seqused[request])
        stop = start + end - begin
        if stop == start:
            continue
        new = torch.stack((kv[begin:end], score[begin:end] + ape[torch.arange(start, stop) % cmp_ratio]), 1)
        pages, rows = _rows_of(state_block_table[request], block_size, start, stop)
        kept = pages != 0
        state_cache[pages[kept], rows[kept]] = new[kept].flatten(1)
        first_window, behind_window = start // cmp_ratio, stop // cmp_ratio
        if first_window == behind_window:
            continue
        windows = behind_window - first_window
        lowest = max(0, (first_window - coff + 1) * cmp_ratio)
        before = state_cache[_rows_of(state_block_table[request], block_size, lowest, start)].unflatten(1, (2, width))
        tokens = torch.cat((before, new))[: behind_window * cmp_ratio - lowest].unflatten(0, (-1, cmp_ratio))
        if coff == 2:
            if first_window == 0:
                nothing = torch.zeros(1, cmp_ratio, 2, width)
                nothing[:, :, 1] = -2e38
                tokens = torch.cat((nothing, tokens))
            tokens = torch.cat((tokens[:-1, ..., :head_dim], tokens[1:, ..., head_dim:]), dim=1)
        keys = (tokens[:, :, 0] * tokens[:, :, 1].softmax(1)).sum(1)
        result[written : written + windows] = keys
        written += windows
    if written > len(result):
        raise RuntimeError(f"compressor: {written} keys, but rope_sin has {len(result)} rows")
    keys = result[:written]
    keys = keys * torch.rsqrt(keys.square().mean(-1, keepdim=True) + norm_eps) * norm_weight.float()
    keys[:, -rope_head_dim:] = rotate_interleaved(
        keys[:, -rope_head_dim:], rope_cos[:written].float(), rope_sin[:written].float()
    )
    result[:written] = keys
    return [result.to(x.dtype)]


def compressor_metadata_outputs(
    rope_cos, rope_sin, cu_seqlens, start_pos, kv_block_table, kv_block_size, slot_mapping_format, compress_ratio,
    num_compressed_tokens, num_reqs_actual,
):  # fmt: skip
    rope = ((num_compressed_tokens, 1, 1, rope_cos.shape[1]), rope_cos.dtype)
    slots = (num_compressed_tokens, 2) if slot_mapping_format == BLOCK_OFFSET else (num_compressed_tokens,)
    return [rope, rope, (slots, torch.int32)]


def compressor_metadata(
    rope_cos, rope_sin, cu_seqlens, start_pos, kv_block_table, kv_block_size, slot_mapping_format, compress_ratio,
    num_compressed_tokens, num_reqs_actual,
):  # fmt: skip
    """Returns for every key that the compressor will write: cosines and sines of its first token, and its slot.

    Rows that no key belongs to turn by nothing, and their slot is what a scatter leaves out.
    """
    cos = torch.ones(num_compressed_tokens, rope_cos.shape[1], dtype=rope_cos.dtype)
    sin = torch.zeros_like(cos)
    slots = torch.tensor([-1, kv_block_size - 1], dtype=torch.int32).repeat(num_compressed_tokens, 1)
    bounds, row = cu_seqlens.tolist(), 0
    for request in range(num_reqs_actual):
        start = int(start_pos[request])
        stop = start + bounds[request + 1] - bounds[request]
        for window in range(start // compress_ratio, stop // compress_ratio):
            position = window * compress_ratio
            if row < num_compressed_tokens and position < len(rope_cos):
                page = window // kv_block_size
                block_id = int(kv_block_table[request, page]) if page < kv_block_table.shape[1] else -1
                if block_id >= 0:
                    cos[row], sin[row] = rope_cos[position], rope_sin[position]
                    slots[row, 0], slots[row, 1] = block_id, window % kv_block_size
            row += 1
    if slot_mapping_format == FLAT:
        flat = slots[:, 0] * kv_block_size + slots[:, 1]
        slots = torch.where(slots[:, 0] < 0, -1, flat).to(torch.int32)
    return [cos[:, None, None], sin[:, None, None], slots]
