# SPDX-License-Identifier: Apache-2.0
"""Builds the layout of one worker, and refuses contradictions.

The one place where config and tensors meet. Knows no requests and no tokens of any.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Mapping, Sequence
from typing import Any

from vllm_ascend_kvext.groups.model import CacheGroup
from vllm_ascend_kvext.groups.specs import LayerSpec, cache_group, read_layer_specs
from vllm_ascend_kvext.layout.disjoint import OwnedRegion, check_disjoint
from vllm_ascend_kvext.layout.errors import LayoutError
from vllm_ascend_kvext.layout.model import (
    KVLayout,
    LayoutGroup,
    Plane,
    RowAddressing,
)
from vllm_ascend_kvext.layout.planes import (
    assign_views,
    planes_of,
    regions_of_layer,
)
from vllm_ascend_kvext.layout.regions import PageView, Region
from vllm_ascend_kvext.layout.views import StorageTable, device_type_of, tensors_of
from vllm_ascend_kvext.layout.worker_config import WorkerConfig

_ADDRESSING = {"npu": RowAddressing.TOKENS}
"""Device types whose kernels write the rows that the shapes of the tensors promise."""


def build_layout(
    kv_cache_config: Any,
    kv_caches: Mapping[str, Any],
    worker: WorkerConfig,
    *,
    addressing: RowAddressing | None = None,
) -> KVLayout:
    """The layout of everything that one worker has registered.

    Args:
        kv_cache_config: vLLM's ``KVCacheConfig`` as the worker has it.
        kv_caches: By layer name: a tensor, or a list or tuple of tensors.
        worker: What neither of them says.
        addressing: Whether rows of pages are addressed; by default where the device is known to
            write them by token (NPUs). Tiled pages are taken whole in any case.

    Raises:
        GroupError: If the config contradicts itself or is not understood.
        LayoutError: If config and tensors contradict each other or are not understood.
    """
    worker.require_supported()
    specs_by_group = read_layer_specs(kv_cache_config)
    num_pages = int(kv_cache_config.num_blocks)
    _check_names(specs_by_group, kv_caches)
    if addressing is None:
        addressing = _ADDRESSING.get(device_type_of(kv_caches), RowAddressing.PAGES)
    storages = StorageTable()
    pages = _pages_by_spec(specs_by_group, kv_caches, storages, num_pages)
    groups: list[LayoutGroup] = []
    all_regions: list[OwnedRegion] = []
    for index, specs in enumerate(specs_by_group):
        if not specs:
            continue  # a pipeline stage without a layer of this group
        found = _regions_of_group(specs, pages, worker, addressing)
        all_regions += [OwnedRegion(index, spec.layer_name, region) for spec, region in found]
        groups += _transfer_groups(cache_group(specs), found)
    check_disjoint(all_regions, num_pages)
    return KVLayout(storages.storages, tuple(groups), num_pages, len(specs_by_group))


def _check_names(
    specs_by_group: Sequence[Sequence[LayerSpec]], kv_caches: Mapping[str, Any]
) -> None:
    configured = {spec.layer_name for specs in specs_by_group for spec in specs}
    if missing := sorted(configured - set(kv_caches)):
        raise LayoutError(
            f"kv_caches: {len(missing)} of {len(configured)} configured layers have no tensor, the "
            f"first is {missing[0]}; register the tensors of all layers"
        )
    known = {tensor.data_ptr() for name in configured for tensor in tensors_of(kv_caches[name])}
    for name in sorted(set(kv_caches) - configured):
        # A layer that shares the cache of another (KV sharing) brings no bytes of its own.
        if any(tensor.data_ptr() not in known for tensor in tensors_of(kv_caches[name])):
            raise LayoutError(
                f"kv_caches: layer {name} has a tensor of its own, but is in no KV cache group of "
                f"{len(specs_by_group)}; pass the config that the tensors were made from"
            )


_Pages = dict[tuple[int, str], list[PageView]]


def _pages_by_spec(
    specs_by_group: Sequence[Sequence[LayerSpec]],
    kv_caches: Mapping[str, Any],
    storages: StorageTable,
    num_pages: int,
) -> _Pages:
    """The tensors of each layer in each of its groups."""
    specs_by_layer: dict[str, list[LayerSpec]] = defaultdict(list)
    for specs in specs_by_group:
        for spec in specs:
            specs_by_layer[spec.layer_name].append(spec)
    pages: _Pages = {}
    for name, specs_of_layer in specs_by_layer.items():
        views = [storages.read(tensor, f"layer {name}") for tensor in tensors_of(kv_caches[name])]
        for spec, assigned in zip(
            specs_of_layer, assign_views(views, specs_of_layer, num_pages), strict=True
        ):
            pages[spec.scheduler_group, name] = assigned
    return pages


def _regions_of_group(
    specs: Sequence[LayerSpec], pages: _Pages, worker: WorkerConfig, addressing: RowAddressing
) -> list[tuple[LayerSpec, Region]]:
    """Every region once, by layer: layers that share a cache name the same bytes."""
    found: dict[Region, LayerSpec] = {}
    for spec in specs:
        of_layer = pages[spec.scheduler_group, spec.layer_name]
        _check_rows(spec, of_layer)
        is_nz = worker.has_nz_pages(spec.layer_name)
        of_spec = RowAddressing.PAGES if is_nz else addressing
        for region in regions_of_layer(of_layer, spec, of_spec):
            found.setdefault(region, spec)
    return [(spec, region) for region, spec in found.items()]


def _check_rows(spec: LayerSpec, pages: Sequence[PageView]) -> None:
    """Raise ``LayoutError`` if a tensor has other rows than the config makes of a page."""
    expected = spec.tokens_per_page()
    for page in pages:
        found = spec.tokens_per_page(page.num_rows) if page.token_axis is not None else expected
        if found != expected:
            raise LayoutError(
                f"{spec.where}: the tensor of shape {list(page.view.shape)} makes {found} tokens "
                f"per page, the config {expected}; this layout is not supported"
            )


def _transfer_groups(
    group: CacheGroup, found: Sequence[tuple[LayerSpec, Region]]
) -> list[LayoutGroup]:
    """One group for each number of tokens per row."""
    by_row: dict[tuple[int, int], list[tuple[LayerSpec, Region]]] = defaultdict(list)
    for spec, region in found:
        tokens_per_row, rest = divmod(group.tokens_per_page, region.num_rows)
        if rest:
            raise LayoutError(
                f"{spec.where}: {group.tokens_per_page} tokens per page do not divide into "
                f"{region.num_rows} rows; this layout is not supported"
            )
        by_row[tokens_per_row, spec.restart_tokens].append((spec, region))
    return [
        LayoutGroup(
            scheduler_group=found[0][0].scheduler_group,
            kind=group.kind,
            tokens_per_page=group.tokens_per_page,
            tokens_per_row=tokens_per_row,
            window_tokens=group.window_tokens,
            restart_tokens=restart_tokens,
            planes=_planes(of_row),
            holds_states=group.holds_states,
            # Of several ratios the tokens that complete an entry of each.
            compress_ratio=math.gcd(*(spec.compress_ratio for spec, _ in of_row)),
        )
        for (tokens_per_row, restart_tokens), of_row in sorted(by_row.items())
    ]


def _planes(found: Sequence[tuple[LayerSpec, Region]]) -> tuple[Plane, ...]:
    by_layer: dict[LayerSpec, list[Region]] = defaultdict(list)
    for spec, region in found:
        by_layer[spec].append(region)
    return tuple(plane for spec, regions in by_layer.items() for plane in planes_of(regions, spec))
