# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vllm-ascend-kvext project
"""Fused attention over sequences of different lengths, with or without a paged cache.

A layout names the dimensions of the query and, after a ``_``, the dimensions of the output: T
tokens of all sequences, B sequences, S tokens of one sequence, N heads, D numbers of a head.

What pre_tokens counts
----------------------
``sparse_mode`` 4 is a band: a query sees some keys before its own place (``pre_tokens``) and some
behind it (``next_tokens``). Places are counted from the last token of the sequence. The reference
code in the documentation of ``npu_fusion_attention`` uses a mask for this mode. The mask hides the
keys more than ``pre_tokens`` places before the query's own key. So a query sees ``pre_tokens + 1``
keys.
vllm-ascend 0.23.0 passes the size of vLLM's window, which includes the query's own key
(``attention_v1.py``, lines 1290 and 1331). Read literally, its windows are one key wider than
vLLM's, and that key can lie in a block that vLLM has given away.

Nothing was tried on hardware. The emulation takes the number as vLLM's window.

The documentation also says that the mask has no effect if each sequence has one query. Taken
literally, a decode step of vllm-ascend would have no window. The emulation applies the mask to
every query.
"""

from __future__ import annotations

from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any, NamedTuple

import torch
from torch import Tensor

from torch_npu.kernels import kernel_operator, nothing, operator, require
from torch_npu.operators.paged_cache import TILED_DIMENSIONS, read_pages

UNLIMITED = 2147483647
# Values of ``sparse_mode`` that vllm-ascend uses.
NO_MASK = 0
CAUSAL = 3
BAND = 4
MASK_SIDE = 2048  # rows and columns of the mask that modes 3 and 4 take
LAYOUTS = ("TND", "TND_NTD", "BNSD", "BNSD_NBSD")
PER_CHANNEL = 0  # value of ``key_antiquant_mode`` and ``value_antiquant_mode``
LATENT_SIZES = (128, 512)  # sizes of a head whose rotary part is a separate tensor

PRECISION = torch.float32
"""The type in which scores and weights are computed.

In float64 a result in float32 hardly depends on the number of queries that are computed together.
"""

Lengths = Sequence[int] | Tensor
Shapes = list[tuple[tuple[int, ...], torch.dtype]]


class Mask(NamedTuple):
    """The keys that a query sees: all keys, the keys before it, or a band of them."""

    sparse_mode: int
    pre_tokens: int
    next_tokens: int

    def hidden(self, num_queries: int, num_keys: int) -> Tensor | None:
        """True for keys that a query does not see: bool, shape ``[num_queries, num_keys]``.

        The last query is at the place of the last key.
        """
        if self.sparse_mode == NO_MASK:
            return None
        places = torch.arange(num_keys - num_queries, num_keys).unsqueeze(1)
        keys = torch.arange(num_keys).unsqueeze(0)
        if self.sparse_mode == CAUSAL:
            return keys > places
        return (keys > places + self.next_tokens) | (keys <= places - self.pre_tokens)


def attention_outputs(call: SimpleNamespace) -> Shapes:
    """Shapes and types of the results of both versions."""
    given = dict(vars(call))
    given |= {NAMES_OF_V2.get(key, key): value for key, value in given.pop("options", {}).items()}
    num_kv_heads = given.get("num_key_value_heads") or given.get("num_query_heads") or 1
    size = _value_size(call.value, num_kv_heads, given.get("block_table"))
    *shape, _ = call.query.shape
    lse = (*shape, 1) if given.get("return_softmax_lse") else (1,)
    if given.get("input_layout") == "TND_NTD":
        shape = [shape[1], shape[0]]
    elif given.get("input_layout") == "BNSD_NBSD":
        shape = [shape[1], shape[0], shape[2]]
    return [((*shape, size), call.query.dtype), (lse, torch.float32)]


def _value_size(value: Tensor, num_kv_heads: int, block_table: Tensor | None) -> int:
    if value.dim() == TILED_DIMENSIONS:
        return value.shape[2] * value.shape[4]
    is_flat = block_table is not None and value.dim() == 3
    return value.shape[-1] // num_kv_heads if is_flat else value.shape[-1]


NAMES_OF_V2 = {
    "actual_seq_lengths": "actual_seq_qlen",
    "actual_seq_lengths_kv": "actual_seq_kvlen",
    "num_heads": "num_query_heads",
    "scale": "softmax_scale",
    "softmax_lse_flag": "return_softmax_lse",
}


# Behind 8-bit keys, vllm-ascend passes lengths as a tensor of the host.
@kernel_operator("npu_fused_infer_attention_score", attention_outputs, None, ["options"])
def npu_fused_infer_attention_score(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    *,
    antiquant_scale: Tensor | None = None,
    antiquant_mode: int = 0,
    key_antiquant_scale: Tensor | None = None,
    key_antiquant_mode: int = 0,
    value_antiquant_scale: Tensor | None = None,
    value_antiquant_mode: int = 0,
    inner_precise: int = 0,
    **options: Any,
) -> tuple[Tensor, Tensor]:
    """The same as ``npu_fused_infer_attention_score_v2`` with other names and without sinks.

    It also takes tiled pages of 8-bit integers, see `restored`.

    Args:
        key_antiquant_scale: ``[kv heads, 1, D]``, as ``value_antiquant_scale``.
        inner_precise: chooses between speed and precision on the device.
    """
    name = "npu_fused_infer_attention_score"
    refused = (antiquant_scale, antiquant_mode, options.get("learnable_sink"))
    require(name, refused == (None, 0, None), "antiquant and learnable_sink are not emulated")
    modes = (key_antiquant_mode, value_antiquant_mode)
    require(name, modes == (PER_CHANNEL, PER_CHANNEL), f"modes {modes} are not emulated")
    require(name, (key.dtype == torch.int8) == (key_antiquant_scale is not None), "int8 has scales")
    if key_antiquant_scale is not None and value_antiquant_scale is not None:
        key = restored(key, key_antiquant_scale)
        value = restored(value, value_antiquant_scale)
    options = {NAMES_OF_V2.get(key, key): value for key, value in options.items()}
    return npu_fused_infer_attention_score_v2(query, key, value, name=name, **options)


# For a decode step with sinks, vllm-ascend passes the lengths as a tensor of the host.
@kernel_operator("npu_fused_infer_attention_score_v2", attention_outputs, None, ["actual_seq_qlen"])
def npu_fused_infer_attention_score_v2(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    *,
    query_rope: Tensor | None = None,
    key_rope: Tensor | None = None,
    atten_mask: Tensor | None = None,
    actual_seq_qlen: Lengths | None = None,
    actual_seq_kvlen: Lengths | None = None,
    block_table: Tensor | None = None,
    num_query_heads: int = 1,
    num_key_value_heads: int = 0,
    softmax_scale: float = 1.0,
    pre_tokens: int = UNLIMITED,
    next_tokens: int = UNLIMITED,
    input_layout: str = "BSH",
    sparse_mode: int = 0,
    block_size: int = 0,
    return_softmax_lse: bool = False,
    learnable_sink: Tensor | None = None,
    name: str = "npu_fused_infer_attention_score_v2",
) -> tuple[Tensor, Tensor]:
    """``softmax(query @ key * softmax_scale + mask) @ value``, one sequence after the other.

    Args:
        query: ``[T, N, D]`` (TND) or ``[B, N, S, D]`` (BNSD).
        key: without pages ``[T, kv heads, D]``; with pages ``[blocks, block_size, kv heads * D]``
            or ``[blocks, kv heads, block_size, D]``. ``value`` alike; its D can differ.
        query_rope: 64 more numbers per head, in the form of ``query``. They are multiplied with
            ``key_rope``.
        atten_mask: bool or int8, ``[2048, 2048]``, ones above the diagonal. Sparse modes 3 and 4
            need it. Its values are not read, because no other values are allowed.
        actual_seq_qlen: for TND, the end of each sequence in ``query``.
        actual_seq_kvlen: the length of each sequence; without pages its end in ``key``.
        block_table: int32, ``[sequences, max_blocks]``.
        sparse_mode: 0 no mask, 3 causal, 4 band.
        learnable_sink: ``[N]``, the score of one more key of each head. The value of this key is
            zero.
        name: the operator's name in errors.

    Returns:
        The output, and the logarithm of each query's sum of exponentials in float32. The logarithms
        have shape ``[T, N, 1]`` (TND) or ``[B, N, S, 1]``; without ``return_softmax_lse`` they are
        one zero. A query without keys gets zeros and minus infinity.
    """
    mask = Mask(sparse_mode, pre_tokens, next_tokens)
    _check(name, mask, atten_mask, query, query_rope, block_table, block_size)
    num_kv_heads = num_key_value_heads or num_query_heads
    is_batch = input_layout in ("BNSD", "BNSD_NBSD")
    require(name, input_layout in LAYOUTS, f"input_layout {input_layout} is not emulated")
    require(name, learnable_sink is None or not is_batch, "learnable_sink needs TND")
    require(name, not is_batch or block_table is not None, f"{input_layout} without block_table")
    if is_batch:
        # TND has one sequence after the other.
        batch, _, num_queries = query.shape[:3]
        actual_seq_qlen = range(num_queries, (batch + 1) * num_queries, num_queries)
        query = query.transpose(1, 2).flatten(0, 1)
        query_rope = None if query_rope is None else query_rope.transpose(1, 2).flatten(0, 1)
    if actual_seq_qlen is None or actual_seq_kvlen is None:
        raise RuntimeError(f"{name}: the lengths of queries and keys are needed")
    value_size = _value_size(value, num_kv_heads, block_table)
    output = torch.zeros(len(query), num_query_heads, value_size)
    lse = torch.full((len(query), num_query_heads), float("-inf"))
    first = 0
    first_key = 0
    for row, (end, length) in enumerate(zip(actual_seq_qlen, actual_seq_kvlen, strict=True)):
        num_keys = int(length) - first_key
        if end > first and num_keys > 0:
            pages = None if block_table is None else block_table[row]
            where = (num_kv_heads, pages, first_key, num_keys)
            queries = query[first:end]
            keys = _rows(key, *where)
            if query_rope is not None and key_rope is not None:
                queries = torch.cat((queries, query_rope[first:end]), dim=-1)
                keys = torch.cat((keys, _rows(key_rope, *where)), dim=-1)
            output[first:end], lse[first:end] = attend(
                queries, keys, _rows(value, *where), mask, softmax_scale, learnable_sink
            )
        first = int(end)
        first_key += num_keys if block_table is None else 0
    output = output.to(query.dtype)
    lse = lse.unsqueeze(-1)
    if is_batch:
        output, lse = (one.unflatten(0, (batch, num_queries)) for one in (output, lse))
        heads_first = (0, 2, 1, 3) if input_layout == "BNSD" else (2, 0, 1, 3)
        output = output.permute(heads_first).contiguous()
        lse = lse.transpose(1, 2).contiguous()
    elif input_layout == "TND_NTD":
        output = output.transpose(0, 1).contiguous()
    return output, lse if return_softmax_lse else torch.zeros(1)


# Graphs have attention in this form. Their updates give it other lengths and the same memory.


def workspace(query: Tensor, *others: Tensor, **options: Any) -> Tensor:
    """Memory that the operator would compute in, of which one byte is enough here."""
    return torch.empty(1, dtype=torch.uint8, device=query.device)


operator("_npu_fused_infer_attention_score_get_max_workspace")(workspace)
operator("_npu_fused_infer_attention_score_v2_get_max_workspace")(workspace)


def write(out: Sequence[Tensor], output: Tensor, lse: Tensor, has_lse: bool) -> None:
    """Write the results to ``out``: the output, and the logarithms if they were asked for."""
    out[0].copy_(output.view(out[0].shape))
    if has_lse:
        out[1].copy_(lse.view(out[1].shape))


@kernel_operator("npu_fused_infer_attention_score.out")
def npu_fused_infer_attention_score_out(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    *,
    workspace: Tensor,
    out: Sequence[Tensor],
    **options: Any,
) -> None:
    """Writes the results of ``npu_fused_infer_attention_score`` to ``out``."""
    found = npu_fused_infer_attention_score(query, key, value, **options)
    write(out, *found, options.get("softmax_lse_flag", False))


@kernel_operator("npu_fused_infer_attention_score_v2.out", nothing, None, ["options"])
def npu_fused_infer_attention_score_v2_out(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    *,
    workspace: Tensor,
    out: Sequence[Tensor],
    **options: Any,
) -> None:
    """Writes the results of ``npu_fused_infer_attention_score_v2`` to ``out``."""
    found = npu_fused_infer_attention_score_v2(query, key, value, **options)
    write(out, *found, options.get("return_softmax_lse", False))


def _check(
    name: str,
    mask: Mask,
    atten_mask: Tensor | None,
    query: Tensor,
    query_rope: Tensor | None,
    block_table: Tensor | None,
    block_size: int,
) -> None:
    """Raise if the documentation forbids a call; checks only what vllm-ascend could pass."""
    require(name, mask.sparse_mode in (NO_MASK, CAUSAL, BAND), f"sparse_mode {mask.sparse_mode}")
    if mask.sparse_mode == NO_MASK:
        require(name, atten_mask is None, "atten_mask with sparse_mode 0")
    else:
        is_given = atten_mask is not None and tuple(atten_mask.shape[-2:]) == (MASK_SIDE, MASK_SIDE)
        require(name, is_given, f"sparse_mode {mask.sparse_mode} needs a 2048 x 2048 atten_mask")
    if query_rope is not None:
        is_allowed = query.shape[-1] in LATENT_SIZES and query_rope.shape[-1] == 64
        require(name, is_allowed, "with query_rope a head has 128 or 512 numbers, and 64 further")
    if block_table is not None:
        is_allowed = 0 < block_size <= 1024 and block_size % 16 == 0
        require(name, is_allowed, f"block_size {block_size} is no multiple of 16 up to 1024")


def attend(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    mask: Mask,
    scale: float,
    sinks: Tensor | None,
) -> tuple[Tensor, Tensor]:
    """Attention of one sequence. The last query is at the place of the last key.

    Args:
        query: ``[queries, heads, D]``. ``key`` and ``value`` are ``[keys, kv heads, D]``.
            Neighbouring heads share a kv head.

    Returns:
        The output, ``[queries, heads, D of value]``, and the logarithms of the sums, ``[queries,
        heads]``. Both are of the type `PRECISION`.
    """
    num_sharing = query.shape[1] // key.shape[1]
    key, value = (one.to(PRECISION).repeat_interleave(num_sharing, dim=1) for one in (key, value))
    scores = torch.einsum("qhd,khd->hqk", query.to(PRECISION), key) * scale
    hidden = mask.hidden(len(query), len(key))
    if hidden is not None:
        scores = scores.masked_fill(hidden, float("-inf"))
    lse = scores.logsumexp(-1)
    # A sink adds to the sum only.
    total = lse if sinks is None else torch.logaddexp(lse, sinks.to(PRECISION).unsqueeze(1))
    weights = torch.exp(scores - total.unsqueeze(-1))
    return torch.einsum("hqk,khd->qhd", weights, value), total.t()


def restored(pages: Tensor, scale: Tensor) -> Tensor:
    """Keys or values of tiled pages of 8-bit integers: ``[blocks, kv heads, block_size, D]``.

    Args:
        pages: int8, ``[blocks, kv heads, D // 32, block_size, 32]``.
        scale: ``[kv heads, 1, D]``.
    """
    by_heads = pages.transpose(2, 3).flatten(-2)
    return by_heads.float() * scale.float()


def _rows(
    cache: Tensor, num_kv_heads: int, pages: Tensor | None, first: int, num_keys: int
) -> Tensor:
    """The keys or values of one sequence, ``[keys, kv heads, D]``, from any of their forms."""
    if pages is None:
        return cache[first : first + num_keys]
    is_flat = cache.dim() == 3
    by_tokens = cache.unflatten(-1, (num_kv_heads, -1)) if is_flat else cache.transpose(1, 2)
    return read_pages(by_tokens, pages, num_keys)


@operator("npu_fusion_attention")
def npu_fusion_attention(*args: object, **kwargs: object) -> None:
    """Exists because transformers imports it. vllm-ascend calls it only for encoders."""
    raise NotImplementedError("npu_fusion_attention is not emulated")


@operator("_npu_paged_attention")
def _npu_paged_attention(*args: object, **kwargs: object) -> None:
    """Exists because updates of graphs compare operators with it.

    vllm-ascend calls it only for decode steps of the sizes that an option names.
    """
    raise NotImplementedError("_npu_paged_attention is not emulated")
