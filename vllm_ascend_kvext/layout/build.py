# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vllm-ascend-kvext project
"""Builds the layout of one worker from its KV cache config and its registered tensors.

Specs become groups. The tensors of a layer become regions, and the regions become planes. A
contradiction between config and tensors is an error.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

from vllm_ascend_kvext.errors import LayoutError
from vllm_ascend_kvext.groups.model import CacheGroup, GroupKind
from vllm_ascend_kvext.groups.specs import LayerSpec, cache_group, read_layer_specs
from vllm_ascend_kvext.layout.model import KVLayout, LayoutGroup, Plane, RowAddressing
from vllm_ascend_kvext.layout.regions import PageView, Region, find_axes, regions_of
from vllm_ascend_kvext.layout.views import StorageTable, device_type_of, tensors_of


class OwnedRegion(NamedTuple):
    """A region, the index of its KV cache group, and the name of its layer."""

    group: int
    layer_name: str
    region: Region


def build_layout(
    kv_cache_config: Any,
    kv_caches: Mapping[str, Any],
    nz_layers: Collection[str],
    *,
    addressing: RowAddressing | None = None,
    needs_token_rows: bool = False,
) -> KVLayout:
    """The layout of everything that one worker has registered.

    Args:
        kv_caches: One entry per layer name: a tensor, or a list or tuple of tensors.
        nz_layers: The result of ``read_nz_layers``. A page of such a layer is always one row.
        addressing: The default is TOKENS on an NPU, and on a GPU if ``needs_token_rows``, because
            kernels write rows there as the shapes of the tensors say. Otherwise the default is
            PAGES, because whole pages need fewer copies.
        needs_token_rows: Whether single tokens will be moved.

    Raises:
        GroupError: If the config contradicts itself or is not understood.
        LayoutError: If config and tensors contradict each other or are not understood.
    """
    specs_by_group = read_layer_specs(kv_cache_config)
    num_pages = int(kv_cache_config.num_blocks)
    _check_names(specs_by_group, kv_caches)
    if addressing is None:
        device_type = device_type_of(kv_caches)
        is_by_token = device_type == "npu" or (device_type == "cuda" and needs_token_rows)
        addressing = RowAddressing.TOKENS if is_by_token else RowAddressing.PAGES
    storages = StorageTable()
    groups: list[LayoutGroup] = []
    all_regions: list[OwnedRegion] = []
    # Requests resume within the blocks of states, which are long. All other layers then need rows.
    may_divide = any(spec.kind is GroupKind.STATE for specs in specs_by_group for spec in specs)
    for index, specs in enumerate(specs_by_group):
        if not specs:
            continue  # This pipeline stage has no layer of the group.
        # Layers that share a cache have equal regions, so each region is listed once.
        found: dict[Region, LayerSpec] = {}
        for spec in specs:
            views = [
                storages.read(one, spec.where) for one in tensors_of(kv_caches[spec.layer_name])
            ]
            pages = [find_axes(view, spec, num_pages) for view in views]
            _check_rows(spec, pages)
            layer_addressing = RowAddressing.PAGES if spec.layer_name in nz_layers else addressing
            for region in _regions_of_layer(pages, spec, layer_addressing, may_divide):
                found.setdefault(region, spec)
        for region, spec in found.items():
            all_regions += [OwnedRegion(index, spec.layer_name, each) for each in region.in_pages()]
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
        # A layer that shares the cache of another layer (KV sharing) has no bytes of its own.
        if any(tensor.data_ptr() not in known for tensor in tensors_of(kv_caches[name])):
            raise LayoutError(
                f"kv_caches: layer {name} has a tensor of its own, but none of the "
                f"{len(specs_by_group)} KV cache groups has the layer; pass the config that the "
                "tensors were made from"
            )


def _check_rows(spec: LayerSpec, pages: Sequence[PageView]) -> None:
    """Raise ``LayoutError`` if a tensor has another number of rows per page than the config."""
    expected = spec.tokens_per_page()
    for page in pages:
        found = spec.tokens_per_page(page.num_rows) if page.token_axis is not None else expected
        if found != expected:
            raise LayoutError(
                f"{spec.where}: the tensor of shape {list(page.view.shape)} makes {found} tokens "
                f"per page, the config {expected}; this layout is not supported"
            )


def _regions_of_layer(
    pages: Sequence[PageView], spec: LayerSpec, addressing: RowAddressing, may_divide: bool
) -> list[Region]:
    """The disjoint regions of one layer.

    Raises:
        LayoutError: If the regions together do not have as many bytes as a page.
    """
    regions = [
        region for page in pages for region in regions_of(page, spec, addressing, may_divide)
    ]
    if _share_bytes(regions):
        # The layer registers two shapes of the same bytes (indexer keys on A5). Only its kernels
        # know which shape a page has.
        regions = _joined(regions, spec)
    num_bytes = sum(region.num_bytes * region.blocks_per_page for region in regions)
    if not spec.min_page_bytes <= num_bytes <= spec.page_bytes:
        raise LayoutError(
            f"{spec.where}: the registered tensors have {num_bytes} bytes per page. The config has "
            f"{spec.min_page_bytes} bytes without padding, and {spec.page_bytes} with it; register "
            "all tensors of the layer, and those of this config only"
        )
    return regions


def _share_bytes(regions: Iterable[Region]) -> bool:
    """Whether any two regions of one layer overlap within a page."""
    end_bytes: dict[tuple[int, int], int] = {}
    for region in sorted(regions, key=lambda region: region.offset_bytes):
        page = region.storage, region.page_stride_bytes
        if region.offset_bytes < end_bytes.get(page, 0):
            return True
        end_bytes[page] = region.end_bytes
    return False


def _joined(regions: Sequence[Region], spec: LayerSpec) -> list[Region]:
    """One packed region from the first byte of all regions to the last."""
    first = min(regions, key=lambda region: region.offset_bytes)
    end_bytes = max(region.end_bytes for region in regions)
    num_bytes = end_bytes - first.offset_bytes
    if num_bytes > first.page_stride_bytes or len({region.storage for region in regions}) > 1:
        raise LayoutError(
            f"{spec.where}: its tensors overlap. Together they span {num_bytes} bytes, and a page "
            f"has {first.page_stride_bytes} bytes; this layout is not supported"
        )
    dtypes = "+".join(dict.fromkeys(region.dtype for region in regions))
    return [
        Region(
            storage=first.storage,
            offset_bytes=first.offset_bytes,
            page_stride_bytes=first.page_stride_bytes,
            row_bytes=num_bytes,
            num_rows=1,
            dtype=dtypes,
            is_packed=True,
        )
    ]


def _transfer_groups(group: CacheGroup, found: Mapping[Region, LayerSpec]) -> list[LayoutGroup]:
    """The transfer groups of one KV cache group: one for each number of tokens per row."""
    by_row: dict[tuple[int, int, int], list[tuple[LayerSpec, Region]]] = defaultdict(list)
    for region, spec in found.items():
        num_rows = region.num_rows * region.blocks_per_page
        tokens_per_row, rest = divmod(group.tokens_per_page, num_rows)
        if rest:
            raise LayoutError(
                f"{spec.where}: {group.tokens_per_page} tokens per page do not divide into "
                f"{num_rows} rows; this layout is not supported"
            )
        by_row[tokens_per_row, spec.restart_tokens, region.blocks_per_page].append((spec, region))
    return [
        LayoutGroup(
            kv_cache_group_id=of_row[0][0].kv_cache_group_id,
            kind=group.kind,
            tokens_per_page=group.tokens_per_page,
            tokens_per_row=tokens_per_row,
            window_tokens=group.window_tokens,
            restart_tokens=restart_tokens,
            planes=_planes(of_row),
            holds_states=group.holds_states,
            # A row that is a whole page may hold entries of several ratios. The row is needed as
            # soon as one entry is complete, so the ratio used here is the greatest common divisor.
            compress_ratio=math.gcd(*(spec.compress_ratio for spec, _ in of_row)),
            blocks_per_page=blocks_per_page,
        )
        for (tokens_per_row, restart_tokens, blocks_per_page), of_row in sorted(by_row.items())
    ]


def _planes(found: Sequence[tuple[LayerSpec, Region]]) -> tuple[Plane, ...]:
    """The planes of the given regions, in order. Regions in one page of a layer share a base."""
    base_bytes: dict[tuple[LayerSpec, int, int], int] = {}
    planes: dict[Region, Plane] = {}
    for spec, region in sorted(found, key=lambda each: each[1].offset_bytes):
        page = spec, region.storage, region.page_stride_bytes
        base = base_bytes.setdefault(page, region.offset_bytes)
        if region.end_bytes - base > region.page_stride_bytes:
            base = base_bytes[page] = region.offset_bytes
        planes[region] = Plane(
            layer_name=spec.layer_name,
            storage=region.storage,
            base_bytes=base,
            page_stride_bytes=region.page_stride_bytes,
            region_offset_bytes=region.offset_bytes - base,
            row_bytes=region.row_bytes,
            dtype=region.dtype,
            is_packed=region.is_packed,
            axes=region.axes,
        )
    return tuple(planes[region] for _, region in found)


def check_disjoint(regions: Iterable[OwnedRegion], num_pages: int) -> None:
    """Refuse planes that would write each other's bytes.

    Planes of different groups may share bytes of the same page number, as in vllm-ascend's blobs.
    Block ids come from one pool there, so a page belongs to one group at a time. Any other shared
    byte is refused. Regions of different page strides that overlap are refused, too.

    The function compares every region with all later ones of its storage, with array operations.
    That takes half a second for the 10,000 regions of a hundred layers with separate heads.

    Raises:
        LayoutError: If two layers share bytes; the message names both.
    """
    by_storage: dict[int, list[OwnedRegion]] = defaultdict(list)
    for owned in regions:
        if owned.region.num_bytes > owned.region.page_stride_bytes:
            _refuse(owned, owned)
        by_storage[owned.region.storage].append(owned)
    for in_storage in by_storage.values():
        in_storage.sort(key=lambda owned: owned.region.offset_bytes)
        groups = np.array([owned.group for owned in in_storage])
        offsets = np.array([owned.region.offset_bytes for owned in in_storage])
        sizes = np.array([owned.region.num_bytes for owned in in_storage])
        strides = np.array([owned.region.page_stride_bytes for owned in in_storage])
        for index, owned in enumerate(in_storage):
            stride = owned.region.page_stride_bytes
            # Page `pages` of this region is its last page that begins at or before page 0 of the
            # other region. `distance` is the number of bytes between the two beginnings.
            pages, distance = np.divmod(offsets[index + 1 :] - offsets[index], stride)
            overlaps = (distance < sizes[index]) & (pages < num_pages)
            overlaps &= (pages > 0) | (groups[index + 1 :] == owned.group)
            overlaps |= (distance + sizes[index + 1 :] > stride) & (pages + 1 < num_pages)
            end_bytes = owned.region.end_bytes + (num_pages - 1) * stride
            is_other_stride = strides[index + 1 :] != stride
            overlaps[is_other_stride] = offsets[index + 1 :][is_other_stride] < end_bytes
            if overlaps.any():
                _refuse(owned, in_storage[index + 1 + int(overlaps.argmax())])


def _refuse(one: OwnedRegion, other: OwnedRegion) -> None:
    raise LayoutError(
        f"layers {one.layer_name} and {other.layer_name} (KV cache groups {one.group}, "
        f"{other.group}) share bytes of one storage: the first begins at byte "
        f"{one.region.offset_bytes} and has pages of {one.region.page_stride_bytes} bytes, the "
        f"second begins at byte {other.region.offset_bytes} and has pages of "
        f"{other.region.page_stride_bytes} bytes; this layout is not supported"
    )
