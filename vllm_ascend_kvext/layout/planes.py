# SPDX-License-Identifier: Apache-2.0
"""From the tensors of one layer to its planes.

Knows regions and specs; knows no scheduler, no tokens beyond rows per page.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from vllm_ascend_kvext.groups.specs import LayerSpec
from vllm_ascend_kvext.layout.errors import LayoutError
from vllm_ascend_kvext.layout.model import Plane, RowAddressing
from vllm_ascend_kvext.layout.regions import PageView, Region, find_axes, regions_of
from vllm_ascend_kvext.layout.views import TensorView


def assign_views(
    views: Sequence[TensorView], specs: Sequence[LayerSpec], num_pages: int
) -> list[list[PageView]]:
    """Which tensors of one layer belong to which of its specs, both in their order.

    In the first vLLM-Ascend with DeepSeek-V4 a layer stands in several KV cache groups and
    registers the tensors of all of them in one list. Each group takes tensors until its page is
    full.

    Raises:
        LayoutError: If tensors are left over.
    """
    remaining = list(views)
    assigned: list[list[PageView]] = []
    for spec in specs:
        taken: list[PageView] = []
        num_bytes = 0
        while remaining and (len(specs) == 1 or num_bytes < spec.min_page_bytes):
            taken.append(find_axes(remaining.pop(0), spec, num_pages))
            num_bytes += taken[-1].page_bytes
        assigned.append(taken)
    if remaining:
        raise LayoutError(
            f"layer {specs[0].layer_name}: {len(views)} tensors are registered, the pages of its "
            f"{len(specs)} KV cache groups are full after {len(views) - len(remaining)}; "
            "this layout is not supported"
        )
    return assigned


def regions_of_layer(
    pages: Sequence[PageView], spec: LayerSpec, addressing: RowAddressing
) -> list[Region]:
    """The regions of one layer in one group, disjoint.

    Raises:
        LayoutError: If they are not as many bytes as the config gives a page.
    """
    regions = [region for page in pages for region in regions_of(page, spec, addressing)]
    if _share_bytes(regions):
        # Two shapes of the same bytes (indexer keys on A5): only kernels know which one is meant.
        regions = _joined(regions, spec)
    num_bytes = sum(region.num_bytes for region in regions)
    if not spec.min_page_bytes <= num_bytes <= spec.page_bytes:
        raise LayoutError(
            f"{spec.where}: the registered tensors have {num_bytes} bytes per page, the config has "
            f"{spec.min_page_bytes} and with padding {spec.page_bytes}; register all tensors of "
            "the layer, and those of this config only"
        )
    return regions


def planes_of(regions: Iterable[Region], spec: LayerSpec) -> list[Plane]:
    """The planes of regions of one layer; regions of one page get a common base."""
    base_bytes: dict[tuple[int, int], int] = {}
    planes: dict[Region, Plane] = {}
    ordered = sorted(regions, key=lambda region: region.offset_bytes)
    for region in ordered:
        page = region.storage, region.page_stride_bytes
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
            is_replicated=spec.is_replicated,
            axes=region.axes,
        )
    return [planes[region] for region in regions]


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
    """One packed region from the first byte to the last."""
    first = min(regions, key=lambda region: region.offset_bytes)
    end_bytes = max(region.end_bytes for region in regions)
    num_bytes = end_bytes - first.offset_bytes
    if num_bytes > first.page_stride_bytes or len({region.storage for region in regions}) > 1:
        raise LayoutError(
            f"{spec.where}: its tensors overlap, and span {num_bytes} bytes of pages of "
            f"{first.page_stride_bytes}; this layout is not supported"
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
