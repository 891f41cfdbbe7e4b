# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vllm-ascend-kvext project
"""Ranks that share host memory: every byte lies there once per content, and all ranks load theirs.

Each rank has pages of its own. Ranks that have equal contents store parts of them.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from support.layout.byte_memory import UNTOUCHED, PageMemory, make_group, make_layout
from support.sample import sampled
from support.transfer.oracle import oracle_transfer

from vllm_ascend_kvext.errors import LayoutError
from vllm_ascend_kvext.groups.model import GroupKind
from vllm_ascend_kvext.layout.host_arrangement import HostArrangement
from vllm_ascend_kvext.layout.model import KVLayout, Plane
from vllm_ascend_kvext.layout.planner import TransferPlanner
from vllm_ascend_kvext.layout.row_map import StoredChunk
from vllm_ascend_kvext.layout.sharing import HostSharing, share_planes
from vllm_ascend_kvext.layout.transfer_plan import PlacedChunk
from vllm_ascend_kvext.token_range import TokenRange
from vllm_ascend_kvext.transfer.schema import Direction

NUM_PAGES = 40
NUM_TOKENS = 32
PLACE_BYTES = 128


@dataclass(frozen=True)
class Ranks:
    """The ranks of one host of an engine.

    Attributes:
        contents: The number of different contents of each layer on all ranks, by its name.
    """

    layout: KVLayout
    num_ranks: int
    of_host: tuple[int, ...]
    contents: dict[str, int]
    cut_tokens: int
    order: tuple[int, ...]

    def sharing(self, rank: int) -> HostSharing | None:
        return share_planes(
            self.layout, self.contents.__getitem__, rank, self.num_ranks, self.of_host
        )

    def content(self, plane: Plane, rank: int) -> int:
        return rank * self.contents[plane.layer_name] // self.num_ranks


@st.composite
def ranks(draw: st.DrawFn) -> Ranks:
    groups, contents = [], {}
    num_ranks = draw(st.sampled_from([2, 4, 6, 8]))
    divisors = [number for number in range(1, num_ranks + 1) if num_ranks % number == 0]
    storage = 0
    for number in range(draw(st.integers(1, 3))):
        kind = (
            GroupKind.FULL
            if number == 0
            else draw(st.sampled_from([GroupKind.FULL, GroupKind.WINDOW, GroupKind.STATE]))
        )
        row_bytes = draw(st.lists(st.sampled_from([1, 3, 16, 70]), min_size=1, max_size=4))
        per_row = 8 if kind is GroupKind.STATE else draw(st.sampled_from([1, 2, 4]))
        window = 9 if kind is GroupKind.WINDOW else 0
        states = kind is GroupKind.STATE
        group = make_group(
            number, kind, 8, per_row, row_bytes, window, holds_states=states, first_storage=storage
        )
        groups.append(group)
        storage += len(row_bytes)
        contents |= {plane.layer_name: draw(st.sampled_from(divisors)) for plane in group.planes}
    num_hosts = draw(st.sampled_from([n for n in (1, 2) if num_ranks % n == 0]))
    host = draw(st.integers(0, num_hosts - 1))
    each = num_ranks // num_hosts
    of_host = tuple(range(host * each, (host + 1) * each))
    cut_tokens = draw(st.sampled_from([0, 8, 16]))
    order = draw(st.permutations(of_host))
    return Ranks(
        make_layout(groups, NUM_PAGES), num_ranks, of_host, contents, cut_tokens, tuple(order)
    )


def filled(ranks: Ranks, rank: int, ids: Sequence[Sequence[int]]) -> PageMemory:
    """The pages of a rank. Bytes differ by plane, row and content."""
    memory = PageMemory(ranks.layout)
    for index, group in enumerate(ranks.layout.groups):
        for number, page in enumerate(ids[group.kv_cache_group_id]):
            for row in range(group.rows_per_page):
                for plane in group.planes:
                    seed = (index, plane.storage, number * group.rows_per_page + row)
                    random = np.random.default_rng((*seed, ranks.content(plane, rank)))
                    memory.row(plane, page, row)[:] = random.integers(0, UNTOUCHED, plane.row_bytes)
    return memory


def block_ids(layout: KVLayout, first_page: int) -> list[list[int]]:
    pages = iter(range(first_page, NUM_PAGES))
    return [
        [next(pages) for _ in range(NUM_TOKENS // 8)] for _ in range(layout.num_scheduler_groups)
    ]


def planner_of(ranks: Ranks, rank: int) -> TransferPlanner:
    return TransferPlanner(ranks.layout, sharing=ranks.sharing(rank))


def store(
    ranks: Ranks, host: np.ndarray, ids: Sequence[Sequence[int]], without: int | None = None
) -> StoredChunk:
    """Let all ranks store their parts. Returns the chunk, which is the same for all of them."""
    chunk, _ = place_of(ranks)
    writes = np.zeros(len(host), np.int64)
    row_maps = []
    for rank in ranks.order:
        plan = planner_of(ranks, rank).plan_store([chunk], ids)
        row_maps.append(plan.row_maps[0])
        if rank == without:
            continue
        written = np.full(len(host), UNTOUCHED, np.uint8)
        storages = filled(ranks, rank, ids).storages
        oracle_transfer(storages, written, plan.planes, plan.runs, Direction.PAGES_TO_HOST)
        host[written != UNTOUCHED] = written[written != UNTOUCHED]
        writes += written != UNTOUCHED
    assert all(row_map == row_maps[0] for row_map in row_maps)
    assert writes.max(initial=0) <= 1, "two ranks store the same byte"
    return StoredChunk(row_maps[0], PLACE_BYTES)


def is_loaded(ranks: Ranks, rank: int, host: np.ndarray, stored: StoredChunk) -> bool:
    """Whether a load brings what the rank has computed."""
    ids = block_ids(ranks.layout, 20)
    plan = planner_of(ranks, rank).plan_load([stored], TokenRange(0, NUM_TOKENS), ids)
    found = PageMemory(ranks.layout)
    oracle_transfer(found.storages, host, plan.planes, plan.runs, Direction.HOST_TO_PAGES)
    right = filled(ranks, rank, ids)
    are_equal = []
    for number, group in enumerate(ranks.layout.groups):
        rows = [run for run in plan.runs.tolist()]
        assert rows or number
        for plane in group.planes:
            one = found.storages[plane.storage]
            moved = one != UNTOUCHED
            are_equal.append(bool((one[moved] == right.storages[plane.storage][moved]).all()))
            are_equal.append(bool(moved.any()))
    return all(are_equal)


def place_of(ranks: Ranks) -> tuple[PlacedChunk, int]:
    """The chunk that all ranks store, and where it ends in host memory."""
    is_cut = all(group.kind is GroupKind.FULL for group in ranks.layout.groups)
    cut_tokens = ranks.cut_tokens if is_cut else 0
    chunk = PlacedChunk(TokenRange(0, NUM_TOKENS), PLACE_BYTES, None, cut_tokens)
    ids = block_ids(ranks.layout, 1)
    ends = {planner_of(ranks, rank).plan_store([chunk], ids).host_bytes for rank in ranks.of_host}
    assert len(ends) == 1, "ranks do not agree on the size of a place"
    return chunk, ends.pop()


@given(ranks=ranks())
@settings(max_examples=sampled(120))
def test_every_rank_loads_its_own_bytes_and_no_byte_is_stored_twice(ranks: Ranks) -> None:
    if ranks.sharing(ranks.of_host[0]) is None:
        assert all(ranks.sharing(rank) is None for rank in ranks.of_host)
        return
    sharings = [ranks.sharing(rank) for rank in ranks.of_host]
    assert all(each is not None and each.num_copies == sharings[0].num_copies for each in sharings)
    _, end_bytes = place_of(ranks)
    host = np.full(end_bytes + 64, UNTOUCHED, np.uint8)
    stored = store(ranks, host, block_ids(ranks.layout, 1))
    assert (host[:PLACE_BYTES] == UNTOUCHED).all() and (host[end_bytes:] == UNTOUCHED).all()
    assert all(is_loaded(ranks, rank, host, stored) for rank in ranks.of_host)


@given(ranks=ranks(), data=st.data())
@settings(max_examples=sampled(60))
def test_a_rank_that_does_not_store_is_missed(ranks: Ranks, data: st.DataObject) -> None:
    """The control of the test above."""
    rank = data.draw(st.sampled_from(ranks.of_host))
    sharing = ranks.sharing(rank)
    if sharing is None or not any(share.is_stored for group in sharing.planes for share in group):
        return
    host = np.full(place_of(ranks)[1], UNTOUCHED, np.uint8)
    stored = store(ranks, host, block_ids(ranks.layout, 1), without=rank)
    assert not all(is_loaded(ranks, each, host, stored) for each in ranks.of_host)


def layout_of(num_planes: int) -> KVLayout:
    return make_layout([make_group(0, GroupKind.FULL, 8, 1, [64] * num_planes)], NUM_PAGES)


@pytest.mark.parametrize(
    ("num_ranks", "num_contents", "copies"),
    [(8, 1, 1), (8, 2, 2), (8, 8, 8), (2, 1, 1), (16, 2, 2)],
)
def test_host_memory_has_each_content_once(num_ranks: int, num_contents: int, copies: int) -> None:
    layout = layout_of(16)
    of_host = tuple(range(num_ranks))
    alone = HostArrangement(layout).section(0, 8).num_bytes
    sharings = [
        share_planes(layout, lambda _: num_contents, r, num_ranks, of_host) for r in of_host
    ]
    if copies == num_ranks:
        assert sharings == [None] * num_ranks
        return
    sizes = {HostArrangement(layout, each).section(0, 8).num_bytes for each in sharings}
    assert sizes == {copies * alone}
    # Each rank stores an equal part of its content.
    parts = [sum(share.is_stored for share in each.planes[0]) for each in sharings if each]
    assert parts == [16 * copies // num_ranks] * num_ranks


def test_ranks_of_other_hosts_store_for_their_own_host() -> None:
    layout = layout_of(4)
    for of_host in ((0, 1), (2, 3)):
        sharings = [share_planes(layout, lambda _: 1, rank, 4, of_host) for rank in of_host]
        stored = [[share.is_stored for share in each.planes[0]] for each in sharings if each]
        assert np.sum(stored, axis=0).tolist() == [1, 1, 1, 1]


def test_what_cannot_be_is_refused() -> None:
    with pytest.raises(LayoutError, match="expected a number of contents that divides 4 ranks"):
        share_planes(layout_of(1), lambda _: 3, 0, 4, (0, 1, 2, 3))
    with pytest.raises(LayoutError, match="expected rank 5 among them"):
        share_planes(layout_of(1), lambda _: 1, 5, 8, (0, 1))
