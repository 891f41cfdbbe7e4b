# SPDX-License-Identifier: Apache-2.0
"""Reads KV cache specs of vLLM and vLLM-Ascend by their attributes; imports neither.

A worker sees a group of unequal layers as a bundle (``UniformTypeKVCacheSpecs``: one spec per
layer), the scheduler sees the first of them (``generate_scheduler_kv_cache_config``): both are
read here. Knows no tensors.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

from vllm_ascend_kvext.layout.errors import LayoutError
from vllm_ascend_kvext.layout.model import GroupKind, SchedulerGroup
from vllm_ascend_kvext.layout.tokens_per_page import tokens_per_page

_STATE_CACHE_SUFFIX = ".state_cache"
"""Layers that hold a compressor's state; to the scheduler they are sliding windows."""

_STATE_SPEC_SUFFIX = "StateSpec"
"""Specs of such a state in the first vLLM-Ascend with DeepSeek-V4, where one layer had them all."""

_PACKED_ROW_BYTES = {"fp8_ds_mla": {"deepseek_v4": 584}}
"""By cache dtype and model version: bytes per row where ``head_size`` does not say
(``real_page_size_bytes`` in ``vllm/v1/kv_cache_interface.py``)."""


@dataclass(frozen=True, slots=True)
class LayerSpec:
    """What the config says of one layer's cache.

    Attributes:
        layer_name: Name, unique in its group.
        scheduler_group: Index of its KV cache group.
        kind: Which tokens it needs.
        block_size: As configured: tokens or rows, see ``tokens_per_page``.
        compress_ratio: Tokens per row.
        window_tokens: Sliding window; 0 where there is none.
        restart_tokens: See ``LayoutGroup``.
        page_bytes: Size of a page, padding included.
        min_page_bytes: What of it is not padding, at least.
        config_rows: Rows per page that ``page_bytes`` makes; None if it does not say.
        num_kv_heads: 1 where heads do not matter.
        is_byte_typed: Whether its elements are bytes whose meaning only kernels know.
        num_states: Tensors that it registers, if it is a recurrent state; else 0.
    """

    layer_name: str
    scheduler_group: int
    kind: GroupKind
    block_size: int
    compress_ratio: int
    window_tokens: int
    restart_tokens: int
    page_bytes: int
    min_page_bytes: int
    config_rows: int | None
    num_kv_heads: int
    is_byte_typed: bool
    num_states: int

    @property
    def where(self) -> str:
        return f"KV cache group {self.scheduler_group}, layer {self.layer_name}"

    def tokens_per_page(self, tensor_rows: int | None = None) -> int:
        """See ``tokens_per_page``; ``tensor_rows`` where a tensor is at hand."""
        return tokens_per_page(
            self.block_size,
            self.compress_ratio,
            config_rows=self.config_rows,
            tensor_rows=tensor_rows,
            where=self.where,
        )


def read_layer_specs(kv_cache_config: Any) -> tuple[tuple[LayerSpec, ...], ...]:
    """The layers of each KV cache group, in the config's order.

    Raises:
        LayoutError: If a spec is of a kind that is not known.
    """
    groups = tuple(
        tuple(
            _read_spec(name, index, _spec_of_layer(group.kv_cache_spec, name))
            for name in group.layer_names
        )
        for index, group in enumerate(kv_cache_config.kv_cache_groups)
    )
    ratios = {spec.compress_ratio for specs in groups for spec in specs}
    return tuple(tuple(_with_restart(spec, ratios) for spec in specs) for specs in groups)


def read_scheduler_groups(kv_cache_config: Any) -> tuple[SchedulerGroup, ...]:
    """The groups of a config from either side; equal for the scheduler's and a worker's.

    Raises:
        LayoutError: If the layers of a group do not fit one list of block ids.
    """
    return tuple(scheduler_group(specs) for specs in read_layer_specs(kv_cache_config) if specs)


def scheduler_group(specs: Sequence[LayerSpec]) -> SchedulerGroup:
    """What the layers of one KV cache group have in common.

    Raises:
        LayoutError: If they differ in it.
    """
    first, *others = (
        SchedulerGroup(spec.kind, spec.tokens_per_page(), spec.window_tokens) for spec in specs
    )
    for spec, other in zip(specs[1:], others, strict=True):
        if other != first:
            raise LayoutError(
                f"{spec.where}: found {other}, but {specs[0].layer_name} of the same group has "
                f"{first}; layers that share block ids must agree: this config is not supported"
            )
    return first


def _spec_of_layer(spec: Any, layer_name: str) -> Any:
    bundle = getattr(spec, "kv_cache_specs", None)
    return spec if bundle is None else bundle[layer_name]


def _read_spec(layer_name: str, group: int, spec: Any) -> LayerSpec:
    bases = {base.__name__ for base in type(spec).__mro__}
    state_shapes = tuple(getattr(spec, "shapes", ())) if "MambaSpec" in bases else ()
    kind, window_tokens, restart_tokens = _kind_of(spec, bases, layer_name, group)
    page_bytes = int(spec.page_size_bytes)
    compress_ratio = int(getattr(spec, "compress_ratio", 1))
    return LayerSpec(
        layer_name=layer_name,
        scheduler_group=group,
        kind=kind,
        block_size=int(spec.block_size),
        compress_ratio=compress_ratio,
        window_tokens=window_tokens,
        restart_tokens=restart_tokens,
        page_bytes=page_bytes,
        min_page_bytes=_min_page_bytes(spec, state_shapes, page_bytes),
        config_rows=_config_rows(spec, page_bytes, compress_ratio),
        num_kv_heads=int(getattr(spec, "num_kv_heads", 1)),
        is_byte_typed=str(getattr(spec, "dtype", "")).endswith("uint8"),
        num_states=len(state_shapes),
    )


def _kind_of(spec: Any, bases: set[str], layer_name: str, group: int) -> tuple[GroupKind, int, int]:
    """Kind, window and restart, in tokens.

    ``FullAttentionSpec`` has a ``sliding_window`` too, which only says that the hybrid manager is
    off: all its blocks are kept.
    """
    if "MambaSpec" in bases:
        return GroupKind.STATE, 0, 0
    if "SlidingWindowSpec" in bases:
        is_state = layer_name.endswith(_STATE_CACHE_SUFFIX) or any(
            base.endswith(_STATE_SPEC_SUFFIX) for base in bases
        )
        kind = GroupKind.STATE if is_state else GroupKind.WINDOW
        return kind, int(spec.sliding_window), 0
    if "ChunkedLocalAttentionSpec" in bases:
        chunk_tokens = int(spec.attention_chunk_size)
        return GroupKind.WINDOW, chunk_tokens, chunk_tokens
    if "FullAttentionSpec" in bases:
        return GroupKind.FULL, 0, 0
    raise LayoutError(
        f"KV cache group {group}, layer {layer_name}: found a {type(spec).__name__}, expected full "
        "attention, MLA, a sliding window, chunked-local attention or Mamba; such a layer cannot "
        "be offloaded"
    )


def _with_restart(spec: LayerSpec, ratios: set[int]) -> LayerSpec:
    """A compressor whose window is its ratio does not overlap: its rows end where it restarts.

    The row that ends at position p reads the states from ``p - window + 1`` on
    (``vllm/models/deepseek_v4/common/ops/fused_compress_quant_cache.py``); ratio 4 reads twice its
    ratio and does not restart. Nor does a later hit read what is left out: vLLM hits at multiples
    of every group's page, those of the compressed layer included.
    """
    if spec.kind is GroupKind.STATE and spec.window_tokens > 1 and spec.window_tokens in ratios:
        return replace(spec, restart_tokens=spec.window_tokens)
    return spec


def _min_page_bytes(spec: Any, state_shapes: Sequence[Any], page_bytes: int) -> int:
    if state_shapes:
        return sum(
            math.prod(shape) * int(dtype.itemsize)
            for shape, dtype in zip(state_shapes, spec.dtypes, strict=True)
        )
    if getattr(spec, "page_size_padded", None) is None:
        return page_bytes
    return min(page_bytes, int(getattr(spec, "real_page_size_bytes", page_bytes)))


def _config_rows(spec: Any, page_bytes: int, compress_ratio: int) -> int | None:
    """Rows per page of a compressed layer: the larger meaning of ``block_size``, if it fits."""
    if compress_ratio == 1:
        return None
    by_model = _PACKED_ROW_BYTES.get(getattr(spec, "cache_dtype_str", None) or "", {})
    row_bytes = by_model.get(getattr(spec, "model_version", None) or "")
    if row_bytes is None:
        row_bytes = spec.num_kv_heads * (
            spec.head_size * spec.dtype.itemsize
            + getattr(spec, "scale_dim", 0) * getattr(spec, "scale_dtype", spec.dtype).itemsize
        )
    block_size = int(spec.block_size)
    return block_size if block_size * row_bytes <= page_bytes else block_size // compress_ratio
