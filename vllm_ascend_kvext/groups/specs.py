# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vllm-ascend-kvext project
"""Reads the layers and groups of a KV cache config of vLLM or vLLM-Ascend.

A worker has a group of different layers as a bundle (``UniformTypeKVCacheSpecs``: one spec per
layer). The scheduler has the spec of the first layer (``generate_scheduler_kv_cache_config``). This
module reads both forms. It knows no tensors.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

from vllm_ascend_kvext.errors import GroupError
from vllm_ascend_kvext.groups.kinds import kind_of, spec_of_layer, window_tokens_of
from vllm_ascend_kvext.groups.model import CacheGroup, GroupKind
from vllm_ascend_kvext.groups.spec_attributes import (
    compress_ratio_of,
    config_rows_of,
    holds_states,
    min_page_bytes_of,
    tokens_per_page,
)


@dataclass(frozen=True, slots=True)
class LayerSpec:
    """What the config says of one layer's cache.

    Attributes:
        block_size: The configured value; it counts tokens or rows, see ``tokens_per_page``.
        window_tokens: The sliding window or attention chunk; 0 for layers that have neither.
        restart_tokens: Tokens at or behind a multiple of this number read nothing before the
            multiple (attention chunks; compressor states without overlap). 0 for layers without
            restarts.
        page_bytes: Bytes of a page, padding included.
        min_page_bytes: The least number of bytes of a page that are not padding.
        config_rows: Rows per page that ``page_bytes`` implies; None if it implies no number.
        num_kv_heads: The number of KV heads; 1 for layers without heads.
        is_byte_typed: Whether its elements are bytes whose meaning only kernels know.
    """

    layer_name: str
    kv_cache_group_id: int
    kind: GroupKind
    holds_states: bool
    block_size: int
    compress_ratio: int
    window_tokens: int
    restart_tokens: int
    page_bytes: int
    min_page_bytes: int
    config_rows: int | None
    num_kv_heads: int
    is_byte_typed: bool

    @property
    def where(self) -> str:
        return f"KV cache group {self.kv_cache_group_id}, layer {self.layer_name}"

    def tokens_per_page(self, tensor_rows: int | None = None) -> int:
        """Tokens per page, see the function ``tokens_per_page``.

        Args:
            tensor_rows: Rows per page of the registered tensor; None without a tensor.
        """
        return tokens_per_page(
            self.block_size,
            self.compress_ratio,
            config_rows=self.config_rows,
            tensor_rows=tensor_rows,
            where=self.where,
        )


def read_layer_specs(kv_cache_config: Any) -> tuple[tuple[LayerSpec, ...], ...]:
    """The layers of each KV cache group, in the order of the config.

    Raises:
        GroupError: If a spec has an unknown kind, or if a group has its own pool of blocks.
    """
    for index, group in enumerate(kv_cache_config.kv_cache_groups):
        _check_pool(group, index)
    groups = tuple(
        tuple(
            _read_spec(name, index, spec_of_layer(group.kv_cache_spec, name))
            for name in group.layer_names
        )
        for index, group in enumerate(kv_cache_config.kv_cache_groups)
    )
    ratios = {spec.compress_ratio for specs in groups for spec in specs}
    return tuple(tuple(_with_restart(spec, ratios) for spec in specs) for specs in groups)


def cache_group(specs: Sequence[LayerSpec]) -> CacheGroup:
    """The facts that the layers of one KV cache group share.

    Raises:
        GroupError: If the layers differ in one of these facts.
    """
    first, *others = (
        CacheGroup(spec.kind, spec.tokens_per_page(), spec.window_tokens, spec.holds_states)
        for spec in specs
    )
    for spec, other in zip(specs[1:], others, strict=True):
        if other != first:
            raise GroupError(
                f"{spec.where}: found {other}, but {specs[0].layer_name} of the same group has "
                f"{first}; layers that share block ids must agree: this config is not supported"
            )
    return first


def scheduler_spec(spec: Any) -> Any:
    """A group's spec as the scheduler has it. For a bundle this is the spec of its first layer."""
    bundle = getattr(spec, "kv_cache_specs", None)
    return next(iter(bundle.values())) if bundle else spec


def _check_pool(group: Any, index: int) -> None:
    """Refuse groups that vLLM 0.30 keeps in a second pool, or as a copy (HiSparse).

    A second pool has other block ids than the pool of the other groups. No connector sees the copy.
    """
    role = getattr(group, "role", "default")
    found = []
    if role != "default":
        found.append(f"the role {getattr(role, 'value', role)}")
    if getattr(group, "host_resident", False):
        found.append("host_resident")
    if not getattr(group, "enable_kv_transfer", True):
        found.append("no enable_kv_transfer")
    if found:
        raise GroupError(
            f"KV cache group {index}: expected blocks of the one pool of the device, found "
            f"{', '.join(found)}; start without HiSparse, or without offloading"
        )


def _read_spec(layer_name: str, group: int, spec: Any) -> LayerSpec:
    kind = kind_of(spec)
    if kind is GroupKind.OTHER:
        raise GroupError(
            f"KV cache group {group}, layer {layer_name}: found a {type(spec).__name__}, expected "
            "full attention, MLA, a sliding window, chunked-local attention or Mamba; such a layer "
            "cannot be offloaded"
        )
    window_tokens = window_tokens_of(spec)
    return LayerSpec(
        layer_name=layer_name,
        kv_cache_group_id=group,
        kind=kind,
        holds_states=holds_states(spec, layer_name),
        block_size=int(spec.block_size),
        compress_ratio=compress_ratio_of(spec),
        # Drafts keep further tokens (vLLM 0.30). After a load, these are cached like the window.
        window_tokens=window_tokens + int(getattr(spec, "extra_retained_tokens", 0)),
        restart_tokens=window_tokens if kind is GroupKind.CHUNKED else 0,
        page_bytes=int(spec.page_size_bytes),
        min_page_bytes=min_page_bytes_of(spec),
        config_rows=config_rows_of(spec),
        num_kv_heads=int(getattr(spec, "num_kv_heads", 1)),
        is_byte_typed=str(getattr(spec, "dtype", "")).endswith("uint8"),
    )


def _with_restart(spec: LayerSpec, ratios: set[int]) -> LayerSpec:
    """Set ``restart_tokens`` of a compressor whose window is as long as its ratio.

    The row that ends at position p reads the states from ``p - window + 1`` on
    (``vllm/models/deepseek_v4/common/ops/fused_compress_quant_cache.py``). If the window is as long
    as the ratio, rows do not overlap, and each row restarts. A compressor of ratio 4 reads twice
    its ratio, and does not restart. A later hit does not read the states that are left out, because
    vLLM hits at multiples of every group's page, also of the compressed layer's page.
    """
    is_compressor = spec.holds_states and spec.kind is GroupKind.WINDOW
    if is_compressor and spec.window_tokens > 1 and spec.window_tokens in ratios:
        return replace(spec, restart_tokens=spec.window_tokens)
    return spec
