# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vllm-ascend-kvext project
"""Reads one KV cache spec of vLLM or vLLM-Ascend by its attributes and class names.

The module knows no layers and no groups. The scheduler side has specs only, and needs no more than
these functions.
"""

from __future__ import annotations

import math
from typing import Any

from vllm_ascend_kvext.errors import GroupError
from vllm_ascend_kvext.groups.kinds import kind_of, stands_for_tokens
from vllm_ascend_kvext.groups.model import GroupKind

_TOKENS_PER_ROW = ("tokens_per_state", "compress_ratio")
"""The two names of one attribute. vLLM uses the first name since 0.30. Earlier releases, and the
windows of vLLM-Ascend, use the second name."""

_STATE_CACHE_SUFFIX = ".state_cache"
"""The end of the names of layers that hold the states of a compressor. To the scheduler, such a
layer is a sliding window."""

_PACKED_ROW_BYTES = {"fp8_ds_mla": {"deepseek_v4": 584}}
"""Bytes per row, by cache dtype and model version, for specs whose ``head_size`` does not determine
them (``real_page_size_bytes`` in ``vllm/v1/kv_cache_interface.py``)."""


def compress_ratio_of(spec: Any) -> int:
    """Tokens per row. It is 1 for layers without compression, and for states (upstream: -1).

    Raises:
        GroupError: If ``tokens_per_state`` and ``compress_ratio`` contradict each other, or if a
            row holds part of a token (encoders that pool).
    """
    declared = {name: getattr(spec, name, None) or 0 for name in _TOKENS_PER_ROW}
    ratios = {value if value > 0 else 1 for value in declared.values() if value}
    ratio = ratios.pop() if ratios else 1
    if ratios or ratio != int(ratio):
        raise GroupError(
            f"{type(spec).__name__}: expected one whole number of tokens per row, found "
            + ", ".join(f"{name} {value}" for name, value in declared.items() if value)
            + "; this layout is not supported"
        )
    return int(ratio)


def tokens_per_page_of(spec: Any) -> int:
    """The number of tokens that one block id of this spec stands for.

    Raises:
        GroupError: If the spec contradicts itself, or if its blocks do not stand for tokens.
    """
    if not stands_for_tokens(spec):
        raise GroupError(
            f"{type(spec).__name__}: expected blocks that stand for tokens, found scratch memory "
            "of one request; such a layer is not supported"
        )
    return tokens_per_page(
        int(spec.block_size),
        compress_ratio_of(spec),
        config_rows=config_rows_of(spec),
        tensor_rows=None,
        where=type(spec).__name__,
    )


def holds_states(spec: Any, layer_name: str) -> bool:
    """Whether the rows of a layer are states of a recurrence or of a compressor."""
    kind = kind_of(spec)
    if kind is not GroupKind.WINDOW:
        return kind is GroupKind.STATE
    return layer_name.endswith(_STATE_CACHE_SUFFIX)


def min_page_bytes_of(spec: Any) -> int:
    """The least number of bytes of a page that are not padding."""
    page_bytes = int(spec.page_size_bytes)
    if kind_of(spec) is GroupKind.STATE:
        return sum(
            math.prod(shape) * int(dtype.itemsize)
            for shape, dtype in zip(spec.shapes, spec.dtypes, strict=True)
        )
    if getattr(spec, "page_size_padded", None) is None:
        return page_bytes
    return min(page_bytes, int(getattr(spec, "real_page_size_bytes", page_bytes)))


def config_rows_of(spec: Any) -> int | None:
    """Rows per page of a compressed layer; None for layers without compression.

    Since vLLM 0.30 the spec has the number. Before, the function derives it from the size of a
    page: ``block_size`` counts rows if so many rows fit into a page, and tokens otherwise.

    Raises:
        GroupError: If the spec contradicts the size of a page.
    """
    compress_ratio = compress_ratio_of(spec)
    if compress_ratio == 1:
        return None
    if _is_declared(spec):
        return _declared_rows(spec)
    by_model = _PACKED_ROW_BYTES.get(getattr(spec, "cache_dtype_str", None) or "", {})
    row_bytes = by_model.get(getattr(spec, "model_version", None) or "")
    if row_bytes is None:
        row_bytes = spec.num_kv_heads * spec.head_size * spec.dtype.itemsize + _scale_bytes(spec)
    block_size = int(spec.block_size)
    is_rows = block_size * row_bytes <= int(spec.page_size_bytes)
    return block_size if is_rows else block_size // compress_ratio


def _declared_rows(spec: Any) -> int:
    rows = int(spec.num_states)
    page_bytes = int(spec.real_page_size_bytes)
    row_bytes = int(spec.num_heads * spec.state_content_size_bytes) + _scale_bytes(spec)
    if rows * row_bytes != page_bytes:
        raise GroupError(
            f"{type(spec).__name__}: block_size {spec.block_size} with {spec.tokens_per_state} "
            f"tokens per row makes {rows} rows of {row_bytes} bytes, but a page has {page_bytes} "
            "bytes without its padding; this layout is not supported"
        )
    return rows


def _scale_bytes(spec: Any) -> int:
    """Bytes of a row's quantization scales, which vLLM-Ascend stores in addition to its keys."""
    item_bytes: int = getattr(spec, "scale_dtype", spec.dtype).itemsize
    return int(spec.num_kv_heads * getattr(spec, "scale_dim", 0) * item_bytes)


def tokens_per_page(
    block_size: int,
    compress_ratio: int,
    *,
    config_rows: int | None,
    tensor_rows: int | None,
    where: str,
) -> int:
    """The number of tokens that one block id of a layer stands for. No other function decides it.

    The ``block_size`` of a compressed group has two meanings. vLLM counts tokens: a page has
    ``block_size / compress_ratio`` rows (``storage_block_size`` in
    ``vllm/v1/kv_cache_interface.py``; since 0.30 ``num_states``). vLLM-Ascend 0.23 counts rows: a
    page holds ``block_size * compress_ratio`` tokens (``CompressAttentionManager`` in
    ``vllm_ascend/core/single_type_kv_cache_manager.py``). vLLM-Ascend 0.30 counts tokens, too.
    Before 0.30 the config does not say which meaning is used. The size of a page shows it, and so
    does the shape of the registered tensor.

    Args:
        config_rows: Rows per page that the page size in the config implies; None if it implies
            no number.
        tensor_rows: Rows per page of the registered tensor. None if there is no tensor (the
            scheduler side), or if its shape does not show the number.

    Raises:
        GroupError: If the numbers contradict each other, or do not tell which meaning is used.
    """
    if block_size < 1 or compress_ratio < 1:
        raise GroupError(
            f"{where}: block_size {block_size} and compress ratio {compress_ratio} must be "
            "positive; report the model and the vLLM version"
        )
    meanings = {block_size: block_size * compress_ratio}
    if block_size % compress_ratio == 0:
        meanings[block_size // compress_ratio] = block_size
    both_known = config_rows is not None and tensor_rows is not None
    if both_known and config_rows != tensor_rows:
        raise GroupError(
            f"{where}: the size of a page in the KV cache config makes {config_rows} rows, the "
            f"registered tensor has {tensor_rows}; this vLLM and vLLM-Ascend lay out pages in a "
            "way that is not supported"
        )
    rows = config_rows if tensor_rows is None else tensor_rows
    if rows is None:
        if len(set(meanings.values())) > 1:
            raise GroupError(
                f"{where}: block_size {block_size} with compress ratio {compress_ratio} may mean "
                f"{block_size} or {block_size * compress_ratio} tokens per page, and neither the "
                "config nor a tensor says which; this layout is not supported"
            )
        return block_size
    if rows not in meanings:
        raise GroupError(
            f"{where}: a page has {rows} rows, expected {' or '.join(map(str, meanings))} from "
            f"block_size {block_size} and compress ratio {compress_ratio}; check that the config "
            "and the tensors come from the same worker"
        )
    return meanings[rows]


def _is_declared(spec: Any) -> bool:
    """Whether the spec has the number of rows per page itself (since vLLM 0.30)."""
    return getattr(spec, "tokens_per_state", None) is not None
