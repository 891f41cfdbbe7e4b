# SPDX-License-Identifier: Apache-2.0
"""From the tensors of one layer to its planes, and whether planes get in each other's way.

Knows regions and specs; knows no scheduler, no tokens beyond rows per page.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Sequence

from vllm_ascend_kvext.groups.specs import LayerSpec
from vllm_ascend_kvext.layout.errors import LayoutError
from vllm_ascend_kvext.layout.model import Plane, RowAddressing
from vllm_ascend_kvext.layout.regions import PageView, Region, find_axes, regions_of
from vllm_ascend_kvext.layout.views import TensorView


def deal_views(
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
    dealt: list[list[PageView]] = []
    for spec in specs:
        taken: list[PageView] = []
        num_bytes = 0
        while remaining and (len(specs) == 1 or num_bytes < spec.min_page_bytes):
            taken.append(find_axes(remaining.pop(0), spec, num_pages))
            num_bytes += taken[-1].page_bytes
        dealt.append(taken)
    if remaining:
        raise LayoutError(
            f"layer {specs[0].layer_name}: {len(views)} tensors are registered, the pages of its "
            f"{len(specs)} KV cache groups are full after {len(views) - len(remaining)}; "
            "this layout is not supported"
        )
    return dealt


def regions_of_layer(
    pages: Sequence[PageView], spec: LayerSpec, addressing: RowAddressing
) -> list[Region]:
    """The regions of one layer in one group, disjoint.

    Raises:
        LayoutError: If they are not as many bytes as the config gives a page.
    """
    regions = [region for page in pages for region in regions_of(page, spec, addressing)]
    if any(_share_bytes(one, other) for one, other in itertools.combinations(regions, 2)):
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


def planes_of(regions: Iterable[Region], layer_name: str) -> list[Plane]:
    """The planes of regions of one layer; regions of one page get a common base."""
    base_bytes: dict[tuple[int, int], int] = {}
    planes: dict[Region, Plane] = {}
    ordered = sorted(regions, key=lambda region: region.offset_bytes)
    for region in ordered:
        page = region.pool, region.page_stride_bytes
        base = base_bytes.setdefault(page, region.offset_bytes)
        if region.end_bytes - base > region.page_stride_bytes:
            base = base_bytes[page] = region.offset_bytes
        planes[region] = Plane(
            layer_name=layer_name,
            pool=region.pool,
            base_bytes=base,
            page_stride_bytes=region.page_stride_bytes,
            region_offset_bytes=region.offset_bytes - base,
            row_bytes=region.row_bytes,
            dtype=region.dtype,
            is_packed=region.is_packed,
        )
    return [planes[region] for region in regions]


def check_disjoint(regions: Sequence[tuple[int, str, Region]], num_pages: int) -> None:
    """Refuse planes that would write each other's bytes.

    Planes of different groups may share bytes of equal page number: block ids come from one pool,
    so that a page belongs to one group at a time.

    Args:
        regions: Scheduler group, layer and region of every plane.
        num_pages: Pages per plane.

    Raises:
        LayoutError: Naming both layers.
    """
    by_pool = sorted(regions, key=lambda item: (item[2].pool, item[2].offset_bytes))
    for _, in_pool in itertools.groupby(by_pool, key=lambda item: item[2].pool):
        for (group, layer, one), (other_group, other_layer, other) in itertools.combinations(
            in_pool, 2
        ):
            if _collide(one, other, num_pages, is_same_group=group == other_group):
                raise LayoutError(
                    f"layers {layer} and {other_layer} (KV cache groups {group}, {other_group}) "
                    f"share bytes of one storage: at {one.offset_bytes} and {other.offset_bytes}, "
                    f"{one.page_stride_bytes} and {other.page_stride_bytes} bytes per page; "
                    "this layout is not supported"
                )


def _share_bytes(one: Region, other: Region) -> bool:
    """Within a page; both of one layer."""
    return (
        one.pool == other.pool
        and one.page_stride_bytes == other.page_stride_bytes
        and one.offset_bytes < other.end_bytes
        and other.offset_bytes < one.end_bytes
    )


def _joined(regions: Sequence[Region], spec: LayerSpec) -> list[Region]:
    """One packed region from the first byte to the last."""
    first = min(regions, key=lambda region: region.offset_bytes)
    end_bytes = max(region.end_bytes for region in regions)
    num_bytes = end_bytes - first.offset_bytes
    if num_bytes > first.page_stride_bytes or len({region.pool for region in regions}) > 1:
        raise LayoutError(
            f"{spec.where}: its tensors overlap, and span {num_bytes} bytes of pages of "
            f"{first.page_stride_bytes}; this layout is not supported"
        )
    dtypes = "+".join(dict.fromkeys(region.dtype for region in regions))
    return [
        Region(
            pool=first.pool,
            offset_bytes=first.offset_bytes,
            page_stride_bytes=first.page_stride_bytes,
            row_bytes=num_bytes,
            num_rows=1,
            dtype=dtypes,
            is_packed=True,
        )
    ]


def _collide(one: Region, other: Region, num_pages: int, *, is_same_group: bool) -> bool:
    """Whether some page of one has bytes of a page of the other, where it may not."""
    end_bytes = one.end_bytes + (num_pages - 1) * one.page_stride_bytes
    if end_bytes <= other.offset_bytes:
        return False
    if one.page_stride_bytes != other.page_stride_bytes:
        return True
    # Page q of one against page q - ahead of the other: how far the other begins behind it.
    stride_bytes = one.page_stride_bytes
    ahead, gap_bytes = divmod(other.offset_bytes - one.offset_bytes, stride_bytes)
    shared = []
    if gap_bytes < one.num_bytes:
        shared.append(ahead)
    if stride_bytes - gap_bytes < other.num_bytes:
        shared.append(ahead + 1)
    return any(is_same_group or pages != 0 for pages in shared)
