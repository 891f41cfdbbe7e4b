# SPDX-License-Identifier: Apache-2.0
"""Fused attention over sequences of different lengths, with or without a paged cache.

Layouts name the dimensions of the query, and behind a ``_`` those of the output: T tokens of all
sequences, B sequences, S tokens of one sequence, N heads, D numbers of a head.

What pre_tokens counts
----------------------
``sparse_mode`` 4 is a band: a query sees some keys before its own place (``pre_tokens``) and some
behind it (``next_tokens``). Places are counted from the last token of the sequence. The reference
code in the documentation of ``npu_fusion_attention`` compares this mode with a mask that hides the
keys more than ``pre_tokens`` places before the query's own: a query sees ``pre_tokens + 1`` keys.
vllm-ascend 0.23.0 passes the size of vLLM's window, which includes the query's own key
(``attention_v1.py``, lines 1290 and 1331). Read literally, its windows are one key wider than
vLLM's, and that key can lie in a block that vLLM has given away.

No hardware was asked, so both readings are here. The default is vLLM's window. With
``EMULATED_NPU_LITERAL_BAND=1`` the number is taken as documented.

The documentation also says that the mask has no effect if each sequence has one query. Taken
literally, a decode step of vllm-ascend would have no window. Here the mask holds for every query.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass

import torch

from torch_npu.operators.paged_cache import read_pages
from torch_npu.operators.refusals import refuse_given, require

UNLIMITED = 2147483647
NO_MASK, CAUSAL, BAND = 0, 3, 4  # the values of sparse_mode that vllm-ascend uses
MASK_SIDE = 2048  # of the mask that modes 3 and 4 take
LAYOUTS = ("TND", "TND_NTD", "BNSD", "BNSD_NBSD")
LATENT_SIZES = (128, 512)  # of a head whose rotary part comes as a tensor of its own

Lengths = Sequence[int] | torch.Tensor
Shapes = list[tuple[tuple[int, ...], torch.dtype]]


@dataclass(frozen=True, slots=True)
class Mask:
    """Which keys a query sees: all, those before it, or a band of those."""

    sparse_mode: int
    pre_tokens: int
    next_tokens: int

    def hidden(self, num_queries: int, num_keys: int) -> torch.Tensor | None:
        """True where a key is not seen: bool, shape ``[num_queries, num_keys]``.

        The last query is at the place of the last key.
        """
        if self.sparse_mode == NO_MASK:
            return None
        places = torch.arange(num_keys - num_queries, num_keys).unsqueeze(1)
        keys = torch.arange(num_keys).unsqueeze(0)
        if self.sparse_mode == CAUSAL:
            return keys > places
        is_literal = os.environ.get("EMULATED_NPU_LITERAL_BAND") == "1"
        num_before = self.pre_tokens if is_literal else self.pre_tokens - 1
        return (keys > places + self.next_tokens) | (keys < places - num_before)


@dataclass(frozen=True, slots=True)
class _Rope:
    """The part of each head that is turned by its position, if it comes as tensors of its own."""

    query: torch.Tensor | None
    key: torch.Tensor | None


def npu_fused_infer_attention_score(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    *,
    query_rope: torch.Tensor | None = None,
    key_rope: torch.Tensor | None = None,
    pse_shift: torch.Tensor | None = None,
    atten_mask: torch.Tensor | None = None,
    actual_seq_lengths: Lengths | None = None,
    actual_seq_lengths_kv: Lengths | None = None,
    block_table: torch.Tensor | None = None,
    antiquant_scale: torch.Tensor | None = None,
    antiquant_mode: int = 0,
    num_heads: int = 1,
    num_key_value_heads: int = 0,
    scale: float = 1.0,
    pre_tokens: int = UNLIMITED,
    next_tokens: int = UNLIMITED,
    input_layout: str = "BSH",
    sparse_mode: int = 0,
    block_size: int = 0,
    softmax_lse_flag: bool = False,
) -> tuple[torch.Tensor, torch.Tensor]:
    """``softmax(query @ key * scale + mask) @ value``, computed in float32.

    Args:
        query: ``[T, N, D]`` (TND) or ``[B, N, S, D]`` (BNSD).
        key: without pages ``[T, kv heads, D]``; with pages ``[blocks, block_size, kv heads * D]``
            or ``[blocks, kv heads, block_size, D]``. ``value`` alike; its D can differ.
        query_rope: further 64 numbers of each head, as ``query``, to multiply with ``key_rope``.
        atten_mask: bool or int8, ``[2048, 2048]``, ones above the diagonal. Sparse modes 3 and 4
            need it. Its values are not read: no other are allowed.
        actual_seq_lengths: TND: where each sequence ends in ``query``.
        actual_seq_lengths_kv: the length of each sequence, without pages where it ends in ``key``.
        block_table: int32, ``[sequences, max_blocks]``.
        sparse_mode: 0 no mask, 3 causal, 4 band.

    Returns:
        The output, and the logarithm of each query's sum of exponentials in float32: ``[T, N, 1]``
        (TND) or ``[B, N, S, 1]``; without ``softmax_lse_flag`` a zero. A query without keys gets
        zeros, and minus infinity.
    """
    name = "npu_fused_infer_attention_score"
    not_emulated = {"pse_shift": pse_shift, "antiquant_scale": antiquant_scale}
    refuse_given(name, not_emulated | {"antiquant_mode": antiquant_mode})
    mask = Mask(sparse_mode, pre_tokens, next_tokens)
    _check(name, mask, atten_mask, query, query_rope, block_table, block_size)
    output, lse = _attend_all(
        name,
        input_layout,
        (query, key, value),
        _Rope(query_rope, key_rope),
        (num_heads, num_key_value_heads or num_heads),
        (actual_seq_lengths, actual_seq_lengths_kv),
        block_table,
        mask,
        scale,
        None,
    )
    return output, lse if softmax_lse_flag else torch.zeros(1)


def npu_fused_infer_attention_score_v2(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    *,
    query_rope: torch.Tensor | None = None,
    key_rope: torch.Tensor | None = None,
    pse_shift: torch.Tensor | None = None,
    atten_mask: torch.Tensor | None = None,
    actual_seq_qlen: Lengths | None = None,
    actual_seq_kvlen: Lengths | None = None,
    block_table: torch.Tensor | None = None,
    learnable_sink: torch.Tensor | None = None,
    num_query_heads: int = 1,
    num_key_value_heads: int = 0,
    softmax_scale: float = 1.0,
    pre_tokens: int = UNLIMITED,
    next_tokens: int = UNLIMITED,
    input_layout: str = "BSH",
    sparse_mode: int = 0,
    block_size: int = 0,
    return_softmax_lse: bool = False,
) -> tuple[torch.Tensor, torch.Tensor]:
    """As ``npu_fused_infer_attention_score``, with other names, and with sinks.

    Args:
        learnable_sink: ``[N]``: the score of one further key of each head, whose value is zero.
    """
    name = "npu_fused_infer_attention_score_v2"
    refuse_given(name, {"pse_shift": pse_shift})
    require(name, learnable_sink is None or input_layout == "TND", "learnable_sink needs TND")
    mask = Mask(sparse_mode, pre_tokens, next_tokens)
    _check(name, mask, atten_mask, query, query_rope, block_table, block_size)
    output, lse = _attend_all(
        name,
        input_layout,
        (query, key, value),
        _Rope(query_rope, key_rope),
        (num_query_heads, num_key_value_heads or num_query_heads),
        (actual_seq_qlen, actual_seq_kvlen),
        block_table,
        mask,
        softmax_scale,
        learnable_sink,
    )
    return output, lse if return_softmax_lse else torch.zeros(1)


def attention_outputs(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, **options: object
) -> Shapes:
    """Shapes and types of what both versions return."""
    layout = str(options.get("input_layout", "BSH"))
    heads = options.get("num_query_heads") or options.get("num_heads") or 1
    kv_heads = options.get("num_key_value_heads") or heads
    assert isinstance(kv_heads, int)
    is_flat = options.get("block_table") is not None and value.dim() == 3
    size = value.shape[-1] // kv_heads if is_flat else value.shape[-1]
    if layout.startswith("TND"):
        num_tokens, num_heads = query.shape[:2]
        shape = (num_tokens, num_heads, size)
        lse = (num_tokens, num_heads, 1)
        shape = (num_heads, num_tokens, size) if layout == "TND_NTD" else shape
    else:
        batch, num_heads, length = query.shape[:3]
        lse = (batch, num_heads, length, 1)
        shape = (batch, num_heads, length, size)
        shape = (num_heads, batch, length, size) if layout == "BNSD_NBSD" else shape
    with_lse = options.get("softmax_lse_flag") or options.get("return_softmax_lse")
    return [(shape, query.dtype), (lse if with_lse else (1,), torch.float32)]


def _check(
    name: str,
    mask: Mask,
    atten_mask: torch.Tensor | None,
    query: torch.Tensor,
    query_rope: torch.Tensor | None,
    block_table: torch.Tensor | None,
    block_size: int,
) -> None:
    """Refuses what the documentation forbids, as far as vllm-ascend's calls can come near to it."""
    require(name, mask.sparse_mode in (NO_MASK, CAUSAL, BAND), f"sparse_mode {mask.sparse_mode}")
    if mask.sparse_mode == NO_MASK:
        refuse_given(name, {"atten_mask with sparse_mode 0": atten_mask})
    else:
        is_given = atten_mask is not None and tuple(atten_mask.shape[-2:]) == (MASK_SIDE, MASK_SIDE)
        require(name, is_given, f"sparse_mode {mask.sparse_mode} needs a 2048 x 2048 atten_mask")
    if query_rope is not None:
        is_allowed = query.shape[-1] in LATENT_SIZES and query_rope.shape[-1] == 64
        require(name, is_allowed, "with query_rope a head has 128 or 512 numbers, and 64 further")
    if block_table is not None:
        is_allowed = 0 < block_size <= 1024 and block_size % 16 == 0
        require(name, is_allowed, f"block_size {block_size} is no multiple of 16 up to 1024")


def _attend_all(
    name: str,
    layout: str,
    tensors: tuple[torch.Tensor, torch.Tensor, torch.Tensor],
    rope: _Rope,
    heads: tuple[int, int],
    lengths: tuple[Lengths | None, Lengths | None],
    block_table: torch.Tensor | None,
    mask: Mask,
    scale: float,
    sinks: torch.Tensor | None,
) -> tuple[torch.Tensor, torch.Tensor]:
    query, key, value = tensors
    require(name, layout in LAYOUTS, f"input_layout {layout} is not emulated")
    require(name, lengths[1] is not None, "the lengths of the keys are needed")
    kv_lengths = [int(length) for length in lengths[1]]  # type: ignore[union-attr]
    if layout.startswith("TND"):
        require(name, lengths[0] is not None, "TND needs the lengths of the queries")
        ends = [int(end) for end in lengths[0]]  # type: ignore[union-attr]
        queries, query_ropes = query, rope.query
    else:
        # One sequence after the other, as TND has them.
        require(name, block_table is not None, f"{layout} without block_table is not emulated")
        batch, _, num_queries = query.shape[:3]
        ends = [num_queries * (row + 1) for row in range(batch)]
        queries = query.transpose(1, 2).flatten(0, 1)
        query_ropes = None if rope.query is None else rope.query.transpose(1, 2).flatten(0, 1)
    is_flat = block_table is not None and value.dim() == 3
    value_size = value.shape[-1] // heads[1] if is_flat else value.shape[-1]
    output = torch.zeros(len(queries), heads[0], value_size)
    lse = torch.full((len(queries), heads[0]), float("-inf"))
    first = first_key = 0
    for row, end in enumerate(ends):
        if block_table is None:
            part = slice(first_key, kv_lengths[row])
            first_key = kv_lengths[row]
            read = lambda tensor, part=part: tensor[part]  # noqa: E731
            num_keys = part.stop - part.start
        else:
            num_keys = kv_lengths[row]
            blocks = block_table[row]
            read = lambda cache, blocks=blocks, num_keys=num_keys: read_pages(  # noqa: E731
                _by_tokens(cache, heads[1]), blocks, num_keys
            )
        if end > first and num_keys > 0:
            q, k = queries[first:end], read(key)
            if query_ropes is not None and rope.key is not None:
                q = torch.cat((q, query_ropes[first:end]), dim=-1)
                k = torch.cat((k, read(rope.key)), dim=-1)
            output[first:end], lse[first:end] = attend(q, k, read(value), mask, scale, sinks)
        first = end
    return _arrange(output.to(query.dtype), lse, layout, query.shape)


def attend(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    mask: Mask,
    scale: float,
    sinks: torch.Tensor | None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Attention of one sequence; its last query is at the place of its last key.

    Args:
        query: ``[queries, heads, D]``; ``key`` and ``value``: ``[keys, kv heads, D]``. Neighbouring
            heads share a kv head.

    Returns:
        float32, ``[queries, heads, D of value]``, and ``[queries, heads]``, the logarithms of the
        sums.
    """
    num_sharing = query.shape[1] // key.shape[1]
    key, value = (one.float().repeat_interleave(num_sharing, dim=1) for one in (key, value))
    scores = torch.einsum("qhd,khd->hqk", query.float(), key) * scale
    hidden = mask.hidden(len(query), len(key))
    if hidden is not None:
        scores = scores.masked_fill(hidden, float("-inf"))
    lse = scores.logsumexp(-1)
    # A sink takes part in the sum, and in nothing else.
    total = lse if sinks is None else torch.logaddexp(lse, sinks.float().unsqueeze(1))
    # A query that sees no key has a sum of zero: its weights are zeros, and not undefined.
    weights = torch.exp(scores - total.masked_fill(total == float("-inf"), 0.0).unsqueeze(-1))
    return torch.einsum("hqk,khd->qhd", weights, value), total.t()


def _by_tokens(cache: torch.Tensor, num_kv_heads: int) -> torch.Tensor:
    """``[blocks, block_size, kv heads, D]`` of either form of a paged cache."""
    if cache.dim() == 3:
        return cache.unflatten(-1, (num_kv_heads, -1))
    return cache.transpose(1, 2)


def _arrange(
    output: torch.Tensor, lse: torch.Tensor, layout: str, query_shape: torch.Size
) -> tuple[torch.Tensor, torch.Tensor]:
    if layout == "TND":
        return output, lse.unsqueeze(-1)
    if layout == "TND_NTD":
        return output.transpose(0, 1).contiguous(), lse.unsqueeze(-1)
    by_sequence = output.unflatten(0, (query_shape[0], query_shape[2]))  # [B, S, N, D]
    lse = lse.unflatten(0, (query_shape[0], query_shape[2])).transpose(1, 2).unsqueeze(-1)
    order = (0, 2, 1, 3) if layout == "BNSD" else (2, 0, 1, 3)
    return by_sequence.permute(order).contiguous(), lse.contiguous()


def npu_fusion_attention(*args: object, **kwargs: object) -> None:
    """Exists because transformers imports it; vllm-ascend uses it for encoders alone."""
    raise NotImplementedError("npu_fusion_attention is not emulated")


OPERATORS = {"npu_fusion_attention": npu_fusion_attention}
KERNELS = {
    "npu_fused_infer_attention_score": (npu_fused_infer_attention_score, attention_outputs),
    "npu_fused_infer_attention_score_v2": (npu_fused_infer_attention_score_v2, attention_outputs),
}
