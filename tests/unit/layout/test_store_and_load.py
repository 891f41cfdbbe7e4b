# SPDX-License-Identifier: Apache-2.0
"""What is stored comes back, in any parts: against a model of tokens and rows, byte for byte."""

from __future__ import annotations

import math
from collections.abc import Collection
from dataclasses import dataclass

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st
from support.layout.byte_memory import (
    UNTOUCHED,
    PageMemory,
    content,
    make_group,
    make_layout,
    move,
)
from support.layout.reach import Reach
from support.sample import sampled

from vllm_ascend_kvext.groups.model import GroupKind
from vllm_ascend_kvext.layout.model import KVLayout, LayoutGroup, StatePolicy
from vllm_ascend_kvext.layout.planner import TransferPlanner
from vllm_ascend_kvext.layout.row_map import RowMap, StoredChunk
from vllm_ascend_kvext.layout.rows import TokenRange
from vllm_ascend_kvext.layout.transfer_plan import LoadPlan, PlacedChunk
from vllm_ascend_kvext.transfer.schema import PlaneColumn

NUM_PAGES = 400
BlockIds = list[list[int]]
Rows = set[tuple[int, int]]
"""Group and row."""


def reach_of(group: LayoutGroup) -> Reach:
    return Reach(
        group.kind,
        group.tokens_per_page,
        group.tokens_per_row,
        group.window_tokens,
        group.restart_tokens,
        group.holds_states,
        group.compress_ratio,
    )


@st.composite
def layouts(draw: st.DrawFn) -> KVLayout:
    groups: list[LayoutGroup] = []
    num_storages = 0
    for scheduler_group in range(draw(st.integers(1, 3))):
        kind = draw(st.sampled_from(sorted(set(GroupKind) - {GroupKind.OTHER}, key=str)))
        page_units = draw(st.sampled_from([1, 2, 4]))
        tokens_per_page = 4 * page_units
        window_tokens = restart_tokens = 0
        if kind is GroupKind.WINDOW:
            window_tokens = draw(st.integers(1, 24))
            restart_tokens = draw(st.sampled_from([0, 0, 8]))
        elif kind is GroupKind.CHUNKED:
            window_tokens = restart_tokens = draw(st.sampled_from([8, 16]))
        # Several transfer groups may share the pages of one scheduler group.
        for tokens_per_row in sorted(draw(st.sets(st.sampled_from([1, 2, 4]), min_size=1))):
            tokens_per_row = tokens_per_page if kind is GroupKind.STATE else tokens_per_row
            row_bytes = draw(st.lists(st.sampled_from([1, 3, 16, 70]), min_size=1, max_size=2))
            ratio = draw(st.sampled_from([1, 2])) if kind is GroupKind.FULL else 1
            groups.append(
                make_group(
                    scheduler_group,
                    kind,
                    tokens_per_page,
                    tokens_per_row,
                    row_bytes,
                    window_tokens,
                    restart_tokens,
                    holds_states=kind is GroupKind.STATE,
                    compress_ratio=math.gcd(ratio, tokens_per_row),
                    first_storage=num_storages,
                )
            )
            num_storages += len(row_bytes)
    return make_layout(groups, NUM_PAGES)


def random_block_ids(layout: KVLayout, end: int, null_share: float, seed: int) -> BlockIds:
    """Distinct pages in random order, some null; lists as long as vLLM's, or longer."""
    random = np.random.default_rng(seed)
    fresh = iter(random.permutation(np.arange(1, layout.num_pages)).tolist())
    lists: BlockIds = [[] for _ in range(layout.num_scheduler_groups)]
    for group in layout.groups:
        if not lists[group.scheduler_group]:
            num_pages = math.ceil(end / group.tokens_per_page) + int(random.integers(2))
            lists[group.scheduler_group] = [
                0 if random.random() < null_share else next(fresh) for _ in range(num_pages)
            ]
    return lists


@dataclass(frozen=True)
class Prompt:
    """Stored in chunks: each at another time, with other pages null by then.

    Chunks have no places yet.
    """

    layout: KVLayout
    chunks: tuple[PlacedChunk, ...]
    seed: int
    null_share: float
    load: TokenRange
    load_null_share: float


@st.composite
def prompts(draw: st.DrawFn) -> Prompt:
    layout = draw(layouts())
    lengths = draw(st.lists(st.integers(1, 40), min_size=1, max_size=4))
    ends = np.cumsum(lengths).tolist()
    num_groups = len(layout.groups)
    # Of full attention and of tails, say, chunks of their own.
    group_sets = st.sets(st.integers(0, num_groups - 1)).map(lambda some: tuple(sorted(some)))
    chunks = [
        PlacedChunk(TokenRange(first, end), groups=draw(st.none() | group_sets))
        for first, end in zip([0, *ends], ends, strict=False)
        if draw(st.integers(0, 5))  # now and then a chunk was not stored
    ]
    for _ in range(draw(st.integers(0, 2))):  # and parts were stored again
        first = draw(st.integers(0, ends[-1] - 1))
        tokens = TokenRange(first, draw(st.integers(first + 1, ends[-1])))
        chunks.append(PlacedChunk(tokens, groups=draw(st.none() | group_sets)))
    first = draw(st.integers(0, ends[-1] - 1))
    return Prompt(
        layout,
        tuple(draw(st.permutations(chunks))),
        draw(st.integers(0, 1 << 16)),
        draw(st.sampled_from([0.0, 0.0, 0.3])),
        TokenRange(first, draw(st.integers(first + 1, ends[-1]))),
        draw(st.sampled_from([0.0, 0.0, 0.3])),
    )


class HostMemory:
    """Stores the chunks of a prompt, each in a place of its own between bytes that stay."""

    def __init__(self, prompt: Prompt, states: StatePolicy = StatePolicy.EXACT) -> None:
        layout = prompt.layout
        self.planner = TransferPlanner(layout, states)
        sizes = [self.planner.chunk_bytes(chunk.tokens, chunk.groups) for chunk in prompt.chunks]
        self.bytes = np.full(sum(sizes) + 64 * (len(sizes) + 1), UNTOUCHED, np.uint8)
        self.stored: list[StoredChunk] = []
        self.rows: Rows = set()
        place_bytes = 64
        for number, (chunk, size) in enumerate(zip(prompt.chunks, sizes, strict=True)):
            tokens = chunk.tokens
            ids = random_block_ids(layout, tokens.end, prompt.null_share, prompt.seed + number)
            memory = PageMemory(layout)
            memory.fill_pages(ids)
            placed = chunk._replace(host_offset_bytes=place_bytes)
            plan = self.planner.plan_store([placed], ids)
            assert plan.host_bytes <= place_bytes + size
            before = self.bytes.copy()
            move(memory, self.bytes, plan.planes, plan.runs, to_host=True)
            outside = np.r_[0:place_bytes, place_bytes + size : len(self.bytes)]
            assert (self.bytes[outside] == before[outside]).all()
            (row_map,) = plan.row_maps
            self.planner.arrangement.check(RowMap.parse(row_map.packed), size)
            self.stored.append(StoredChunk(row_map, place_bytes))
            kept = in_groups(kept_with_page(layout, tokens, ids, states), chunk.groups)
            assert mapped_rows(row_map) == kept
            (missing,) = plan.missing
            wanted = in_groups(needed(layout, tokens, states), chunk.groups)
            assert missing_rows(layout, missing) == wanted - usable(layout, kept, tokens.end)
            assert plan.is_complete is not bool(missing)
            self.rows |= kept
            place_bytes += size + 64


def in_groups(rows: Rows, groups: Collection[int] | None) -> Rows:
    return {each for each in rows if groups is None or each[0] in groups}


def mapped_rows(row_map: RowMap) -> Rows:
    return {(each.group, row) for each in row_map for row in range(each.first_row, each.end_row)}


def missing_rows(layout: KVLayout, missing: object) -> Rows:
    rows: Rows = set()
    for index, scheduler_group, tokens in missing:
        group = layout.groups[index]
        assert group.scheduler_group == scheduler_group
        end_row = math.ceil(tokens.end / group.tokens_per_row)
        rows |= {(index, row) for row in range(tokens.first // group.tokens_per_row, end_row)}
    return rows


def kept_with_page(layout: KVLayout, chunk: TokenRange, ids: BlockIds, states: StatePolicy) -> Rows:
    return {
        (index, row)
        for index, group in enumerate(layout.groups)
        if not (group.holds_states and states is StatePolicy.SKIP)
        for row in reach_of(group).rows_read(chunk.first, chunk.end)
        if ids[group.scheduler_group][row // group.rows_per_page]
    }


def needed(layout: KVLayout, tokens: TokenRange, states: StatePolicy = StatePolicy.EXACT) -> Rows:
    return {
        (index, row)
        for index, group in enumerate(layout.groups)
        if not (group.holds_states and states is StatePolicy.SKIP)
        for row in reach_of(group).rows_needed(tokens.first, tokens.end)
    }


def usable(layout: KVLayout, rows: Rows, end: int) -> Rows:
    """A state of some other token is of no use."""
    return {
        (index, row)
        for index, row in rows
        if layout.groups[index].kind is not GroupKind.STATE
        or end % layout.groups[index].tokens_per_page == 0
    }


def assert_loaded(
    prompt: Prompt, host: HostMemory, plan: LoadPlan, ids: BlockIds, asked: Rows
) -> None:
    """The needed rows that were stored arrive; every other byte of the pages stays."""
    layout = prompt.layout
    there = usable(layout, host.rows, prompt.load.end) & asked
    loaded = {
        (index, row)
        for index, row in there
        if ids[layout.groups[index].scheduler_group][row // layout.groups[index].rows_per_page]
    }
    # The op refuses host bytes that two planes have.
    offsets = plan.planes[:, PlaneColumn.HOST_OFFSET_BYTES].tolist()
    assert len(set(offsets)) == len(offsets)
    found, expected = PageMemory(layout), PageMemory(layout)
    move(found, host.bytes, plan.planes, plan.runs, to_host=False)
    for index, row in loaded:
        group = layout.groups[index]
        page = ids[group.scheduler_group][row // group.rows_per_page]
        for plane in group.planes:
            expected.row(plane, page, row % group.rows_per_page)[:] = content(index, plane, row)
    for one, right in zip(found.storages, expected.storages, strict=True):
        assert (one == right).all()
    assert missing_rows(layout, plan.missing) == asked - loaded
    assert plan.is_complete is (asked == loaded)


@settings(max_examples=sampled(250), deadline=None)
@given(prompt=prompts())
def test_a_load_brings_the_stored_rows_and_says_which_are_missing(prompt: Prompt) -> None:
    host = HostMemory(prompt)
    ids = random_block_ids(
        prompt.layout, prompt.load.end, prompt.load_null_share, prompt.seed + 1000
    )
    plan = host.planner.plan_load(host.stored, prompt.load, ids)
    assert_loaded(prompt, host, plan, ids, needed(prompt.layout, prompt.load))


@settings(max_examples=60, deadline=None)
@given(prompt=prompts(), data=st.data())
def test_a_load_of_some_groups_leaves_the_others_alone(prompt: Prompt, data: st.DataObject) -> None:
    host = HostMemory(prompt)
    groups = data.draw(st.sets(st.integers(0, len(prompt.layout.groups) - 1)))
    ids = random_block_ids(
        prompt.layout, prompt.load.end, prompt.load_null_share, prompt.seed + 1000
    )
    plan = host.planner.plan_load(host.stored, prompt.load, ids, groups)
    asked = in_groups(needed(prompt.layout, prompt.load), groups)
    assert_loaded(prompt, host, plan, ids, asked)


@settings(max_examples=60, deadline=None)
@given(prompt=prompts())
def test_skipped_states_are_neither_stored_nor_missing(prompt: Prompt) -> None:
    host = HostMemory(prompt, StatePolicy.SKIP)
    ids = random_block_ids(
        prompt.layout, prompt.load.end, prompt.load_null_share, prompt.seed + 1000
    )
    plan = host.planner.plan_load(host.stored, prompt.load, ids)
    assert_loaded(prompt, host, plan, ids, needed(prompt.layout, prompt.load, StatePolicy.SKIP))


@settings(max_examples=60, deadline=None)
@given(prompt=prompts())
def test_a_scheduler_finds_the_same_rows_missing_without_pages(prompt: Prompt) -> None:
    host = HostMemory(prompt)
    missing = host.planner.find_missing(host.stored, prompt.load)
    asked = needed(prompt.layout, prompt.load)
    there = usable(prompt.layout, host.rows, prompt.load.end)
    assert missing_rows(prompt.layout, missing) == asked - there
