# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vllm-ascend-kvext project
"""Sizes, units and pages of stored KV."""

from __future__ import annotations

from dataclasses import replace
from functools import partial

import pytest
from support.layout.byte_memory import make_group, make_layout

from vllm_ascend_kvext.connector.common.host_layout import HostLayout, common_layout
from vllm_ascend_kvext.connector.common.messages import WorkerLayout
from vllm_ascend_kvext.errors import ConnectorError
from vllm_ascend_kvext.groups.model import GroupKind
from vllm_ascend_kvext.layout.model import KVLayout, LayoutGroup, StatePolicy
from vllm_ascend_kvext.layout.planner import TransferPlanner
from vllm_ascend_kvext.layout.row_map import StoredChunk
from vllm_ascend_kvext.layout.sharing import share_planes
from vllm_ascend_kvext.store.arena import ALIGNMENT_BYTES
from vllm_ascend_kvext.store.entries import Piece
from vllm_ascend_kvext.store.tier import HostTier
from vllm_ascend_kvext.token_range import TokenRange
from vllm_ascend_kvext.transfer.schema import HOST_ALIGNMENT_BYTES

FULL = make_group(0, GroupKind.FULL, 64, 4, [32], compress_ratio=4)
WINDOW = make_group(1, GroupKind.WINDOW, 16, 1, [8], 24, first_storage=1)
STATES = make_group(2, GroupKind.WINDOW, 16, 1, [128], 8, holds_states=True, first_storage=2)
MAMBA = make_group(3, GroupKind.STATE, 32, 32, [4096], holds_states=True, first_storage=3)


def of(
    *groups: object, hash_block_size: int = 8, states: StatePolicy = StatePolicy.EXACT
) -> HostLayout:
    return HostLayout(make_layout(groups, 100), hash_block_size, lambda unit: 8 * unit, states)  # type: ignore[arg-type]


def test_unit_is_that_of_rows_and_hashes_not_of_pages() -> None:
    assert of(FULL, WINDOW).unit_tokens == 8
    assert of(FULL, WINDOW, hash_block_size=3).unit_tokens == 12
    assert of(FULL, WINDOW, MAMBA).unit_tokens == 32


def fine(*groups: object, hash_block_size: int, has_finer_keys: bool = True) -> HostLayout:
    layout = make_layout(groups, 100)  # type: ignore[arg-type]
    exact = StatePolicy.EXACT
    return HostLayout(layout, hash_block_size, lambda unit: unit, exact, True, has_finer_keys)


@pytest.mark.parametrize(
    ("block_tokens", "unit_tokens"), [(528, 48), (1536, 64), (1072, 16), (2096, 16), (128, 128)]
)
def test_unit_of_states_is_a_divisor_of_their_block(block_tokens: int, unit_tokens: int) -> None:
    rows = make_group(0, GroupKind.FULL, block_tokens, 1, [32])
    states = make_group(
        1, GroupKind.STATE, block_tokens, block_tokens, [64], holds_states=True, first_storage=1
    )
    layout = fine(rows, states, hash_block_size=block_tokens)
    assert layout.unit_tokens == layout.tokens_per_key == unit_tokens
    assert layout.lasting_unit_tokens == block_tokens
    coarse = fine(rows, states, hash_block_size=block_tokens, has_finer_keys=False)
    assert coarse.unit_tokens == block_tokens
    assert fine(rows, states, hash_block_size=16).unit_tokens == 16


def test_unit_of_states_is_that_of_pages_where_rows_cannot_be_addressed() -> None:
    packed = make_group(0, GroupKind.FULL, 512, 512, [32])
    states = make_group(1, GroupKind.STATE, 512, 512, [64], holds_states=True, first_storage=1)
    layout = fine(packed, states, hash_block_size=512)
    assert (layout.unit_tokens, layout.tokens_per_key) == (512, 512)


def test_a_state_within_its_page_lies_in_that_page() -> None:
    layout = fine(FULL, MAMBA, hash_block_size=16)
    assert layout.unit_tokens == 16 < layout.lasting_unit_tokens == 32
    assert layout.pages(Piece.tails(48)) == layout.pages(Piece.tails(64)) == ((3, 1, 2),)
    assert layout.num_bytes(Piece.tails(48)) == layout.num_bytes(Piece.tails(64))


def test_states_that_are_skipped_take_no_room() -> None:
    exact, skip = of(FULL, WINDOW, STATES), of(FULL, WINDOW, STATES, states=StatePolicy.SKIP)
    assert skip.num_bytes(Piece.tails(96)) < exact.num_bytes(Piece.tails(96))
    assert skip.pages(Piece.tails(96)) == ((1, 4, 6),)


def test_model_of_states_only_cannot_skip_them() -> None:
    with pytest.raises(ConnectorError, match="state_policy=skip"):
        of(MAMBA, states=StatePolicy.SKIP)


def test_pages_that_leave_are_those_of_one_tail_and_not_of_the_next() -> None:
    layout = of(FULL, WINDOW, MAMBA, hash_block_size=16)
    # The window at 96 begins in page 4, and the window at 128 in page 6. The state at 96 is page 2.
    assert layout.pages_that_leave(96, 128) == ((1, 4, 6), (3, 2, 3))
    assert layout.pages_that_leave(96, 112) == ((1, 4, 5), (3, 2, 3))


COARSE = make_group(1, GroupKind.FULL, 64, 16, [24, 8], compress_ratio=16, first_storage=1)


@pytest.mark.parametrize("groups", [(FULL,), (FULL, COARSE)], ids=["one group", "two groups"])
def test_rows_without_their_last_cuts_lie_as_a_shorter_piece_does(
    groups: tuple[object, ...],
) -> None:
    layout = HostLayout(make_layout(groups, 100), 16, lambda unit: 64 * unit, StatePolicy.EXACT)  # type: ignore[arg-type]
    geometry = layout.geometry
    assert geometry.cut_tokens == 128 < geometry.chunk_tokens
    for first, end in ((0, 1024), (0, 1008), (48, 1024), (112, 416), (128, 144)):
        row_map = layout.row_map(Piece.rows(first, end))
        for group, rows_per in ((0, 4), (1, 16))[: len(groups)]:
            stored = [rows for rows in row_map if rows.group == group]
            ends = [rows.end_row for rows in stored]
            assert [rows.first_row for rows in stored] == [first // rows_per, *ends[:-1]]
            assert ends[-1] == end // rows_per
            assert all(each * rows_per % 128 == 0 for each in ends[:-1])
        for cut_end in geometry.cut_ends(first, end)[:-1]:
            shorter = Piece.rows(first, cut_end)
            assert layout.rows_within(row_map, first, cut_end) == layout.row_map(shorter)
            assert layout.num_bytes(shorter) < layout.num_bytes(Piece.rows(first, end))


def worker(layout: KVLayout, host_bytes: int = 1024) -> WorkerLayout:
    return WorkerLayout(layout, host_bytes)


def test_workers_may_differ_in_addresses_only() -> None:
    layout = make_layout([FULL], 100)
    elsewhere = replace(
        layout, storages=tuple(replace(each, address=64) for each in layout.storages)
    )
    assert common_layout([worker(layout), worker(elsewhere)]).layout is layout


@pytest.mark.parametrize(
    "other",
    [
        worker(make_layout([FULL], 100), 512),
        worker(make_layout([make_group(0, GroupKind.FULL, 64, 4, [64], compress_ratio=4)], 100)),
        worker(make_layout([make_group(0, GroupKind.FULL, 64, 8, [32], compress_ratio=8)], 100)),
    ],
    ids=["host bytes", "row bytes", "tokens per row"],
)
def test_workers_with_other_pages_are_refused(other: WorkerLayout) -> None:
    with pytest.raises(ConnectorError, match="worker 1"):
        common_layout([worker(make_layout([FULL], 100)), other])


SMALL_WINDOW = make_group(2, GroupKind.WINDOW, 8, 8, [8], 16, first_storage=2)
CHUNKED = make_group(2, GroupKind.WINDOW, 16, 8, [8], 64, restart_tokens=64, first_storage=2)


@pytest.mark.parametrize(
    "groups",
    [(FULL, WINDOW), (FULL, WINDOW, SMALL_WINDOW), (FULL, WINDOW, CHUNKED)],
    ids=["one window", "two windows", "attention chunks"],
)
def test_tails_and_those_that_they_continue_are_all_that_a_resume_needs(
    groups: tuple[LayoutGroup, ...],
) -> None:
    layout = of(*groups)
    planner = TransferPlanner(make_layout(groups, 400))
    tables = [list(range(1, 400)) for _ in groups]
    num_saving = 0
    for boundary in range(16, 200, 8):
        for base in range(8, boundary, 8):
            whole, piece = Piece.tails(boundary), Piece.continued_tails(base, boundary)
            assert layout.num_bytes(piece) <= layout.num_bytes(whole)
            num_saving += layout.num_bytes(piece) < layout.num_bytes(whole)
            assert set(_single_pages(layout, piece)) <= set(_single_pages(layout, whole))
            stored = [
                StoredChunk(layout.row_map(each), 1 << 16 * number)
                for number, each in enumerate((Piece.tails(base), piece))
            ]
            tokens = TokenRange(0, boundary)
            plan = planner.plan_load(stored, tokens, tables, layout.tail_groups)
            assert not plan.missing
            if layout.num_bytes(piece) < layout.num_bytes(whole):
                assert planner.plan_load(stored[1:], tokens, tables, layout.tail_groups).missing
    assert num_saving > 50


def _single_pages(layout: HostLayout, piece: Piece) -> list[tuple[int, int]]:
    return [(group, page) for group, *ends in layout.pages(piece) for page in range(*ends)]


def test_tails_with_states_are_whole() -> None:
    """A page has a state for the latest boundary in it only."""
    assert of(FULL, WINDOW, SMALL_WINDOW).max_continued_tokens == 24
    assert of(FULL, WINDOW, MAMBA).max_continued_tokens == 0
    assert of(FULL, WINDOW, STATES).max_continued_tokens == 0
    assert of(FULL, WINDOW, STATES, states=StatePolicy.SKIP).max_continued_tokens == 24
    assert of(FULL).max_continued_tokens == 0


def test_tails_are_whole_where_attention_chunks_begin_within_pages() -> None:
    assert of(FULL, CHUNKED).max_continued_tokens == 64
    within = make_group(2, GroupKind.WINDOW, 16, 8, [8], 72, restart_tokens=72, first_storage=2)
    assert of(FULL, within).max_continued_tokens == 0


@pytest.mark.parametrize(
    "piece",
    [
        Piece.continued_tails(88, 104),
        Piece.rows(64, 160),
        Piece.rows(0, 8),
        Piece.tails(8),
        Piece.tails(104),
        Piece.tails(4096),
    ],
    ids=str,
)
def test_sizes_and_rows_are_those_of_the_workers_planner(piece: Piece) -> None:
    groups = (FULL, WINDOW, STATES)
    layout = of(*groups)
    planner = TransferPlanner(make_layout(groups, 400))
    chunk = layout.chunk(piece, 64)
    tables = [[1] * 400 for _ in groups]
    plan = planner.plan_store([chunk], tables)
    assert plan.row_maps == (layout.row_map(piece),)
    assert plan.host_bytes == 64 + layout.num_bytes(piece)


def test_places_are_aligned_as_the_transfer_op_asks() -> None:
    """`store` does not know transfers. So only the connector can compare the two constants."""
    assert ALIGNMENT_BYTES % HOST_ALIGNMENT_BYTES == 0


def test_tails_are_the_windows_before_a_boundary() -> None:
    layout = of(FULL, WINDOW, STATES)
    # The window has 23 tokens before 104, counted from its page's start. The states have 7 tokens.
    assert layout.pages(Piece.tails(104)) == ((1, 5, 7), (2, 6, 7))


def test_full_attention_alone_needs_no_tails() -> None:
    geometry = of(FULL).geometry
    assert geometry.needs_rows
    assert not geometry.needs_tails


# Memory that workers share.


def _contents(contents_of: dict[str, int], num_ranks: int, layer_name: str) -> int:
    return contents_of.get(layer_name, num_ranks)


def held_tokens(contents_of: dict[str, int], num_ranks: int, *groups: LayoutGroup) -> int:
    """The tokens that 1 GiB of all workers of an engine together holds.

    Args:
        contents_of: The different contents of each layer's rows; as many as ranks by default.
    """
    layout = make_layout(groups, 100)
    contents = partial(_contents, contents_of, num_ranks)
    sharing = share_planes(layout, contents, 0, num_ranks, range(num_ranks))
    exact = StatePolicy.EXACT
    made = HostLayout(layout, 16, lambda _: 1024, exact, sharing=sharing)
    host_bytes = (1 << 30) if sharing is not None else (1 << 30) // num_ranks
    tier = HostTier(host_bytes, made.geometry, layout=made)
    return tier.num_tokens


@pytest.mark.parametrize("num_ranks", [2, 4, 8, 16])
def test_memory_holds_as_many_times_more_latents_as_there_are_ranks(num_ranks: int) -> None:
    latents = make_group(0, GroupKind.FULL, 128, 1, [1024, 128] * 8)
    once = {plane.layer_name: 1 for plane in latents.planes}
    alone = held_tokens({}, 1, latents)
    assert held_tokens(once, num_ranks, latents) == alone
    assert held_tokens({}, num_ranks, latents) == pytest.approx(alone / num_ranks, rel=0.02)


@pytest.mark.parametrize(
    ("num_heads", "num_ranks", "times"), [(2, 2, 1), (2, 4, 2), (2, 8, 4), (2, 16, 8), (8, 4, 1)]
)
def test_memory_holds_more_tokens_by_the_ranks_per_head(
    num_heads: int, num_ranks: int, times: int
) -> None:
    """Each rank has one head, or more."""
    heads = make_group(0, GroupKind.FULL, 128, 1, [256 * max(1, num_heads // num_ranks)] * 8)
    contents = {plane.layer_name: min(num_heads, num_ranks) for plane in heads.planes}
    before = held_tokens({}, num_ranks, heads)
    assert held_tokens(contents, num_ranks, heads) == pytest.approx(before * times, rel=0.01)


def test_sizes_are_larger_when_workers_keep_their_bytes_apart() -> None:
    latents = make_group(0, GroupKind.FULL, 128, 1, [1024, 128] * 4)
    layout = make_layout([latents], 100)
    sharing = share_planes(layout, lambda _: 1, 1, 4, range(4))
    made = HostLayout(layout, 16, lambda _: 1024, StatePolicy.EXACT, sharing=sharing)
    assert (made.share_of_worker(is_store=True), made.share_of_worker(is_store=False)) == (0.25, 1)
    before = made.num_bytes(Piece.rows(0, 1024))
    made.keep_apart()
    assert made.num_bytes(Piece.rows(0, 1024)) == 4 * before
    shares = made.share_of_worker(is_store=True), made.share_of_worker(is_store=False)
    assert shares == (0.25, 0.25)


def test_workers_that_share_other_planes_are_refused() -> None:
    layout = make_layout([make_group(0, GroupKind.FULL, 16, 1, [64] * 4)], 100)
    sharings = [share_planes(layout, lambda _, n=each: n, 0, 4, range(4)) for each in (1, 2)]
    workers = [WorkerLayout(layout, 1 << 20, sharing=each) for each in sharings]
    with pytest.raises(ConnectorError, match="worker 1 shares other planes than worker 0"):
        common_layout(workers)
