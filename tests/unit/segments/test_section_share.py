# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vllm-ascend-kvext project
"""Which worker writes a section of a segment that workers share."""

from __future__ import annotations

from collections import Counter
from types import SimpleNamespace
from typing import Any

from hypothesis import given
from hypothesis import strategies as st

from vllm_ascend_kvext.layout.sharing import HostSharing, share_planes
from vllm_ascend_kvext.segments.worker.section_share import SectionShare, apart, section_share

OFFSETS = [64 * number for number in range(64)]


def shares_of(contents: list[int], num_ranks: int, hosts: list[int]) -> list[SectionShare]:
    """The share of each rank. The planes have these numbers of contents."""
    planes = tuple(SimpleNamespace(layer_name=str(each)) for each in contents)
    layout: Any = SimpleNamespace(groups=(SimpleNamespace(planes=planes),))
    found = []
    for rank in range(num_ranks):
        of_host = [each for each in range(num_ranks) if hosts[each] == hosts[rank]]
        sharing = share_planes(layout, int, rank, num_ranks, of_host)
        assert sharing is not None
        found.append(section_share(sharing, sharing.planes[0]))
    return found


@given(
    st.sampled_from([(2, 1), (4, 1), (4, 2), (8, 2), (8, 4)]),
    st.integers(1, 5),
    st.sampled_from(OFFSETS),
)
def test_a_section_has_one_writer(sizes: tuple[int, int], num_planes: int, offset: int) -> None:
    num_ranks, num_contents = sizes
    shares = shares_of([num_contents] * num_planes, num_ranks, [0] * num_ranks)
    assert {each.num_sections for each in shares} == {num_contents}
    writers = Counter(each.section for each in shares if each.writes(offset))
    assert writers == Counter(range(num_contents))


def test_each_host_writes_its_own_sections() -> None:
    shares = shares_of([2, 2], 4, [0, 0, 1, 1])
    assert [(each.num_sections, each.section, each.content) for each in shares] == [
        *((1, 0, 0), (1, 0, 0), (1, 0, 1), (1, 0, 1))
    ]
    for offset in OFFSETS:
        writers = [each.writes(offset) for each in shares]
        assert sum(writers[:2]) == sum(writers[2:]) == 1


def test_workers_write_about_equally_many() -> None:
    shares = shares_of([1] * 8, 4, [0] * 4)
    numbers = [sum(each.writes(offset) for offset in OFFSETS) for each in shares]
    assert numbers == [16] * 4


def test_planes_of_different_heads_are_kept_apart() -> None:
    shares = shares_of([1, 2], 4, [0] * 4)
    assert shares == [SectionShare(4, rank, rank) for rank in range(4)]
    assert all(each.writes(offset) for each in shares for offset in OFFSETS)


def test_a_worker_alone_has_one_section() -> None:
    assert section_share(None, ()) == SectionShare(1, 0)
    assert apart(HostSharing(5, (4, 5), ())) == SectionShare(2, 1, 5)
