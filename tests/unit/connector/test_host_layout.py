# SPDX-License-Identifier: Apache-2.0
"""Sizes, units and pages of stored KV."""

from __future__ import annotations

from dataclasses import replace

import pytest
from support.layout.byte_memory import make_group, make_layout

from vllm_ascend_kvext.connector.common.host_layout import HostLayout, common_layout
from vllm_ascend_kvext.connector.common.messages import WorkerLayout
from vllm_ascend_kvext.errors import ConnectorError
from vllm_ascend_kvext.groups.model import GroupKind
from vllm_ascend_kvext.layout.model import KVLayout, StatePolicy
from vllm_ascend_kvext.layout.planner import TransferPlanner
from vllm_ascend_kvext.store.arena import ALIGNMENT_BYTES
from vllm_ascend_kvext.store.entries import Piece
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


@pytest.mark.parametrize(
    "piece",
    [Piece.rows(64, 160), Piece.rows(0, 8), Piece.tails(8), Piece.tails(104), Piece.tails(4096)],
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
