# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vllm-ascend-kvext project
"""Loads of any parts bring the stored bytes. They are compared with a model of tokens and rows.

Chunks are stored in one call or one by one. Between these calls, other pages become null. A load
takes all groups or some of them. States are kept or left out.

Some chunks are arranged cut by cut, and have lost their last cuts before the load. Other bytes lie
in the place of these cuts then.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Collection, Iterable
from dataclasses import dataclass

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st
from support.layout.byte_memory import (
    UNTOUCHED,
    PageMemory,
    chunk_bytes,
    content,
    make_group,
    make_layout,
)
from support.layout.reach import Reach
from support.sample import sampled
from support.transfer.oracle import oracle_transfer

from vllm_ascend_kvext.groups.model import GroupKind
from vllm_ascend_kvext.layout.model import KVLayout, LayoutGroup, StatePolicy
from vllm_ascend_kvext.layout.planner import TransferPlanner
from vllm_ascend_kvext.layout.row_map import MissingRows, RowMap, StoredChunk
from vllm_ascend_kvext.layout.transfer_plan import PlacedChunk, TransferPlan
from vllm_ascend_kvext.token_range import TokenRange
from vllm_ascend_kvext.transfer.schema import DTYPE, Direction, PlaneColumn, RunColumn

NUM_PAGES = 400
BlockIds = list[list[int]]
Rows = set[tuple[int, int]]
"""Pairs of group and row."""


@st.composite
def layouts(draw: st.DrawFn) -> KVLayout:
    groups: list[LayoutGroup] = []
    num_storages = 0
    for kv_cache_group_id in range(draw(st.integers(1, 3))):
        kind = draw(st.sampled_from(sorted(set(GroupKind) - {GroupKind.OTHER}, key=str)))
        page_units = draw(st.sampled_from([1, 2, 4]))
        tokens_per_page = 4 * page_units
        window_tokens = 0
        restart_tokens = 0
        if kind is GroupKind.WINDOW:
            window_tokens = draw(st.integers(1, 24))
            restart_tokens = draw(st.sampled_from([0, 0, 8]))
        elif kind is GroupKind.CHUNKED:
            window_tokens = draw(st.sampled_from([8, 16]))
            restart_tokens = window_tokens
        # Several transfer groups may share the pages of one scheduler group.
        for tokens_per_row in sorted(draw(st.sets(st.sampled_from([1, 2, 4]), min_size=1))):
            tokens_per_row = tokens_per_page if kind is GroupKind.STATE else tokens_per_row
            row_bytes = draw(st.lists(st.sampled_from([1, 3, 16, 70]), min_size=1, max_size=2))
            rows = tokens_per_page // tokens_per_row
            ratio = draw(st.sampled_from([1, 2])) if kind is GroupKind.FULL else 1
            groups.append(
                make_group(
                    kv_cache_group_id,
                    kind,
                    tokens_per_page,
                    tokens_per_row,
                    row_bytes,
                    window_tokens,
                    restart_tokens,
                    holds_states=kind is GroupKind.STATE,
                    compress_ratio=math.gcd(ratio, tokens_per_row),
                    first_storage=num_storages,
                    blocks_per_page=math.gcd(rows, draw(st.sampled_from([1, 1, 2, 4]))),
                )
            )
            num_storages += len(row_bytes)
    return make_layout(groups, NUM_PAGES)


def random_block_ids(layout: KVLayout, end: int, null_share: float, seed: int) -> BlockIds:
    """Distinct pages in random order. Some are null. Lists are as long as vLLM's, or longer."""
    random = np.random.default_rng(seed)
    fresh = iter(random.permutation(np.arange(1, layout.num_pages)).tolist())
    lists: BlockIds = [[] for _ in range(layout.num_scheduler_groups)]
    for group in layout.groups:
        if not lists[group.kv_cache_group_id]:
            num_pages = math.ceil(end / group.tokens_per_page) + int(random.integers(2))
            lists[group.kv_cache_group_id] = [
                0 if random.random() < null_share else next(fresh) for _ in range(num_pages)
            ]
    return lists


@dataclass(frozen=True)
class Prompt:
    """The chunks of a prompt that are stored, and the parts that are loaded.

    Chunks are stored in one call or at different times. Between these times, other pages become
    null.

    Attributes:
        ends: The token at which each chunk ends after it has lost its last cuts.
    """

    layout: KVLayout
    chunks: tuple[PlacedChunk, ...]
    ends: tuple[int, ...]
    is_one_call: bool
    states: StatePolicy
    seed: int
    null_share: float
    load: TokenRange
    groups: frozenset[int] | None
    load_null_share: float

    def needed(self, tokens: TokenRange, groups: Collection[int] | None) -> Rows:
        """The rows of a range that a resume at its end needs."""
        return {
            (index, row)
            for index, group in self._kept_groups(groups)
            for row in Reach.of(group).rows_needed(tokens.first_tokens, tokens.end_tokens)
        }

    def kept(self, chunk: PlacedChunk, ids: BlockIds) -> Rows:
        """The rows that a store keeps: all rows that have a page."""
        return {
            (index, row)
            for index, group in self._kept_groups(chunk.groups)
            for row in Reach.of(group).rows_read(chunk.tokens.first_tokens, chunk.tokens.end_tokens)
            if ids[group.kv_cache_group_id][row // group.rows_per_page]
        }

    def _kept_groups(self, groups: Collection[int] | None) -> list[tuple[int, LayoutGroup]]:
        return [
            (index, group)
            for index, group in enumerate(self.layout.groups)
            if not (group.holds_states and self.states is StatePolicy.SKIP)
            and (groups is None or index in groups)
        ]


@st.composite
def prompts(draw: st.DrawFn) -> Prompt:
    layout = draw(layouts())
    lengths = draw(st.lists(st.integers(1, 40), min_size=1, max_size=4))
    ends = np.cumsum(lengths).tolist()
    num_groups = len(layout.groups)
    # Groups can have separate chunks, for example full attention and tails.
    group_sets = st.sets(st.integers(0, num_groups - 1)).map(lambda some: tuple(sorted(some)))
    chunks = [
        PlacedChunk(TokenRange(first, end), groups=draw(st.none() | group_sets))
        for first, end in zip([0, *ends], ends, strict=False)
        if draw(st.integers(0, 5))  # some chunks were not stored
    ]
    for _ in range(draw(st.integers(0, 2))):  # some parts were stored again
        first = draw(st.integers(0, ends[-1] - 1))
        tokens = TokenRange(first, draw(st.integers(first + 1, ends[-1])))
        chunks.append(PlacedChunk(tokens, groups=draw(st.none() | group_sets)))
    chunks = [_with_cuts(draw, layout, chunk) for chunk in draw(st.permutations(chunks))]
    first = draw(st.integers(0, ends[-1] - 1))
    return Prompt(
        layout,
        tuple(chunks),
        tuple(_end_of(draw, chunk) for chunk in chunks),
        draw(st.booleans()),
        draw(st.sampled_from([StatePolicy.EXACT, StatePolicy.EXACT, StatePolicy.SKIP])),
        draw(st.integers(0, 1 << 16)),
        draw(st.sampled_from([0.0, 0.0, 0.3])),
        TokenRange(first, draw(st.integers(first + 1, ends[-1]))),
        draw(st.none() | group_sets.map(frozenset)),
        draw(st.sampled_from([0.0, 0.0, 0.3])),
    )


def _with_cuts(draw: st.DrawFn, layout: KVLayout, chunk: PlacedChunk) -> PlacedChunk:
    """The chunk, in some cases arranged cut by cut."""
    groups = layout.groups if chunk.groups is None else [layout.groups[i] for i in chunk.groups]
    cut_tokens = draw(st.integers(0, 2)) * math.lcm(*(each.tokens_per_row for each in groups))
    return chunk._replace(cut_tokens=cut_tokens)


def _end_of(draw: st.DrawFn, chunk: PlacedChunk) -> int:
    """The end of a chunk that has lost some cuts, or none."""
    first, end = chunk.tokens.first_tokens, chunk.tokens.end_tokens
    ends = [end]
    if chunk.cut_tokens:
        ends += range(-(-(first + 1) // chunk.cut_tokens) * chunk.cut_tokens, end, chunk.cut_tokens)
    return draw(st.sampled_from(ends))


class HostMemory:
    """Stores the chunks of a prompt. Each chunk has its own place.

    Bytes between places must stay.
    """

    def __init__(self, prompt: Prompt) -> None:
        self._prompt = prompt
        self.planner = TransferPlanner(prompt.layout, prompt.states)
        sizes = [chunk_bytes(prompt.layout, chunk, prompt.states) for chunk in prompt.chunks]
        self.bytes = np.full(sum(sizes) + 64 * (len(sizes) + 1), UNTOUCHED, np.uint8)
        self.stored: list[StoredChunk] = []
        self.rows: Rows = set()
        places = (np.cumsum([0, *sizes])[:-1] + 64 * np.arange(1, len(sizes) + 1)).tolist()
        placed = [
            (chunk._replace(host_offset_bytes=place), size)
            for chunk, place, size in zip(prompt.chunks, places, sizes, strict=True)
        ]
        for number, batch in enumerate(
            [placed] if prompt.is_one_call else [[one] for one in placed]
        ):
            self._store(batch, prompt.seed + number)
        self.rows = set()
        for number, (_, size) in enumerate(placed):
            self._trim(number, size)

    def _trim(self, number: int, size: int) -> None:
        """Let a stored chunk lose its last cuts, and overwrite their bytes."""
        chunk, end_tokens = self._prompt.chunks[number], self._prompt.ends[number]
        row_map, place = self.stored[number]
        if end_tokens < chunk.tokens.end_tokens:
            per_row = [group.tokens_per_row for group in self._prompt.layout.groups]
            row_map = RowMap.of(
                rows._replace(end_row=min(rows.end_row, end_tokens // per_row[rows.group]))
                for rows in row_map
                if rows.first_row < end_tokens // per_row[rows.group]
            )
            self.stored[number] = StoredChunk(row_map, place)
            shorter = chunk._replace(tokens=TokenRange(chunk.tokens.first_tokens, end_tokens))
            layout = self._prompt.layout
            groups = range(len(layout.groups)) if chunk.groups is None else chunk.groups
            left = size
            if all(layout.groups[index].kind is GroupKind.FULL for index in groups):
                left = chunk_bytes(layout, shorter, self._prompt.states)
            self.bytes[place + left : place + size] = UNTOUCHED
        self.rows |= mapped_rows(row_map)

    def _store(self, batch: list[tuple[PlacedChunk, int]], seed: int) -> None:
        layout = self._prompt.layout
        end = max((chunk.tokens.end_tokens for chunk, _ in batch), default=0)
        ids = random_block_ids(layout, end, self._prompt.null_share, seed)
        memory = PageMemory(layout)
        memory.fill_pages(ids)
        plan = self.planner.plan_store([chunk for chunk, _ in batch], ids)
        before = self.bytes.copy()
        oracle_transfer(
            memory.storages, self.bytes, plan.planes, plan.runs, Direction.PAGES_TO_HOST
        )
        outside = np.ones(len(self.bytes), bool)
        end_bytes = 0
        wanted: Counter[tuple[int, int]] = Counter()
        for (chunk, size), row_map in zip(batch, plan.row_maps, strict=True):
            place = chunk.host_offset_bytes
            outside[place : place + size] = False
            end_bytes = max(end_bytes, place + size)
            self.stored.append(StoredChunk(row_map, place))
            kept = self._prompt.kept(chunk, ids)
            assert mapped_rows(row_map) == kept
            needed = self._prompt.needed(chunk.tokens, chunk.groups)
            wanted += Counter(needed - kept)
            self.rows |= kept
        assert plan.host_bytes == end_bytes
        assert missing_rows(layout, plan.missing) == wanted
        assert (self.bytes[outside] == before[outside]).all()


def mapped_rows(row_map: RowMap) -> Rows:
    return {(each.group, row) for each in row_map for row in range(each.first_row, each.end_row)}


def missing_rows(layout: KVLayout, missing: Iterable[MissingRows]) -> Counter[tuple[int, int]]:
    rows: Counter[tuple[int, int]] = Counter()
    for index, kv_cache_group_id, tokens in missing:
        group = layout.groups[index]
        assert group.kv_cache_group_id == kv_cache_group_id
        assert tokens.first_tokens < tokens.end_tokens
        end_row = math.ceil(tokens.end_tokens / group.tokens_per_row)
        rows.update(
            (index, row) for row in range(tokens.first_tokens // group.tokens_per_row, end_row)
        )
    return rows


def assert_loaded(
    prompt: Prompt, host: HostMemory, plan: TransferPlan, ids: BlockIds, there: Rows
) -> Rows:
    """Check that stored rows with a page are loaded, and that all other bytes of the pages stay.

    Returns:
        The rows that were loaded.
    """
    layout = prompt.layout
    loaded = {
        (index, row)
        for index, row in there
        if ids[layout.groups[index].kv_cache_group_id][row // layout.groups[index].rows_per_page]
    }
    assert plan.planes.dtype == plan.runs.dtype == DTYPE
    # The op refuses rows that are loaded twice, and host bytes that belong to two planes.
    assert plan.runs[:, RunColumn.NUM_ROWS].sum() == len(loaded)
    offsets = plan.planes[:, PlaneColumn.HOST_OFFSET_BYTES].tolist()
    assert len(set(offsets)) == len(offsets)
    found, expected = PageMemory(layout), PageMemory(layout)
    oracle_transfer(found.storages, host.bytes, plan.planes, plan.runs, Direction.HOST_TO_PAGES)
    for index, row in loaded:
        group = layout.groups[index]
        page = ids[group.kv_cache_group_id][row // group.rows_per_page]
        for plane in group.planes:
            expected.row(plane, page, row % group.rows_per_page)[:] = content(index, plane, row)
    for one, right in zip(found.storages, expected.storages, strict=True):
        assert (one == right).all()
    return loaded


@settings(max_examples=sampled(400))
@given(prompt=prompts())
def test_a_load_brings_the_stored_rows_and_says_which_are_missing(prompt: Prompt) -> None:
    host = HostMemory(prompt)
    end = prompt.load.end_tokens
    ids = random_block_ids(prompt.layout, end, prompt.load_null_share, prompt.seed + 1000)
    plan = host.planner.plan_load(host.stored, prompt.load, ids, prompt.groups)
    asked = prompt.needed(prompt.load, prompt.groups)
    loaded = assert_loaded(prompt, host, plan, ids, host.rows & asked)
    assert missing_rows(prompt.layout, plan.missing) == Counter(asked - loaded)
    assert all(rows.tokens.end_tokens <= end for rows in plan.missing)
