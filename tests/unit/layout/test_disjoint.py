# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vllm-ascend-kvext project
"""The check for regions that may overlap, compared with sets of bytes."""

from __future__ import annotations

import itertools

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from vllm_ascend_kvext.errors import LayoutError
from vllm_ascend_kvext.layout.build import OwnedRegion, check_disjoint
from vllm_ascend_kvext.layout.regions import Region


def owned(
    group: int, offset: int, stride: int, num_bytes: int, storage: int = 0, layer: str = ""
) -> OwnedRegion:
    region = Region(storage, offset, stride, num_bytes, 1, "int8", False)
    return OwnedRegion(group, layer or f"{group}.{offset}", region)


def bytes_by_page(one: OwnedRegion, num_pages: int) -> list[set[tuple[int, int]]]:
    region = one.region
    starts = (region.offset_bytes + page * region.page_stride_bytes for page in range(num_pages))
    return [
        {(region.storage, start + step) for step in range(region.num_bytes)} for start in starts
    ]


def may_coexist(one: OwnedRegion, other: OwnedRegion, num_pages: int) -> bool:
    """Whether different groups share bytes only between pages of the same number."""
    pages = bytes_by_page(one, num_pages)
    other_pages = bytes_by_page(other, num_pages)
    for page, other_page in itertools.product(range(num_pages), repeat=2):
        if not pages[page].isdisjoint(other_pages[other_page]):
            is_allowed = page == other_page and one.group != other.group
            has_equal_strides = one.region.page_stride_bytes == other.region.page_stride_bytes
            if not (is_allowed and has_equal_strides):
                return False
    return True


regions = st.builds(
    owned,
    group=st.integers(0, 2),
    offset=st.integers(0, 24),
    stride=st.sampled_from([4, 4, 4, 6]),
    num_bytes=st.integers(1, 4),
    storage=st.integers(0, 1),
)


@settings(max_examples=500)
@given(found=st.lists(regions, min_size=1, max_size=5, unique=True), num_pages=st.integers(1, 4))
def test_shared_bytes_are_refused_unless_block_ids_keep_them_apart(
    found: list[OwnedRegion], num_pages: int
) -> None:
    strides = {one.region.page_stride_bytes for one in found}
    fits = all(may_coexist(*pair, num_pages) for pair in itertools.combinations(found, 2))
    if fits and len(strides) == 1:
        check_disjoint(found, num_pages)
    elif not fits:
        with pytest.raises(LayoutError, match="share bytes of one storage"):
            check_disjoint(found, num_pages)


def test_pages_of_other_strides_behind_each_other_are_accepted() -> None:
    check_disjoint([owned(0, 0, 4, 4), owned(1, 16, 6, 6), owned(0, 40, 4, 4)], 4)


def test_a_region_larger_than_its_page_is_refused() -> None:
    with pytest.raises(LayoutError, match=r"layers a and a .*share bytes"):
        check_disjoint([owned(0, 0, 4, 5, layer="a")], 2)
