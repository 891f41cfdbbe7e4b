# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vllm-ascend-kvext project
"""Boundaries inside blocks: which are planned, and which keys full-attention blocks get."""

from __future__ import annotations

import pytest

from vllm_ascend_kvext.groups.model import GroupKind
from vllm_ascend_kvext.retention.geometry import GroupGeometry, HitGeometry
from vllm_ascend_kvext.retention.inside_blocks import InnerProgress, InsideBlocks
from vllm_ascend_kvext.retention.reasons import Origin, Reason

UNIT = 4
BLOCK = 16
PROMPT = Reason(Origin.PROMPT)
HINT = Reason(Origin.HINT)


def inside_blocks(has_drafts: bool = False, has_events: bool = False) -> InsideBlocks:
    groups = (
        GroupGeometry(GroupKind.FULL, UNIT, use_eagle=has_drafts, margin_tokens=UNIT),
        GroupGeometry(GroupKind.STATE, UNIT),
    )
    return InsideBlocks(HitGeometry(groups, UNIT), BLOCK, has_events)


def admitted(inside: InsideBlocks, hit_tokens: int, num_prompt_tokens: int) -> InnerProgress:
    asked = {8: HINT, BLOCK: HINT}
    inside.admit("request", hit_tokens, num_prompt_tokens, asked)
    return inside.progress["request"]


@pytest.mark.parametrize(
    ("num_prompt_tokens", "has_drafts", "ends"),
    [
        (3, False, []),
        (4, False, [4]),
        (5, False, [4]),
        (30, False, [28]),
        (28, False, [24, 28]),
        (30, True, [24]),
        (28, True, [20, 24]),
        (7, True, []),
    ],
)
def test_ends_of_a_prompt(num_prompt_tokens: int, has_drafts: bool, ends: list[int]) -> None:
    assert inside_blocks(has_drafts).ends_of_prompt(num_prompt_tokens) == ends


def test_boundaries_behind_the_hit_and_inside_blocks_are_planned() -> None:
    inside = inside_blocks()
    assert admitted(inside, 0, 30).planned == {8: HINT, 28: PROMPT}
    assert admitted(inside, 8, 30).planned == {28: PROMPT}
    assert admitted(inside, 0, 33).planned == {8: HINT}


def test_each_unit_gets_a_key_once_and_the_ends_of_a_block_descend() -> None:
    inside = inside_blocks()
    progress = admitted(inside, 20, 60)
    assert inside.ends_to_key(progress, 21) == [20]
    assert inside.ends_to_key(progress, 23) == []
    assert inside.ends_to_key(progress, 24) == [24, 20]
    assert inside.ends_to_key(progress, 37) == [36, 28, 24, 20]
    assert inside.ends_to_key(progress, 37) == []


def test_a_block_that_is_full_gets_its_keys_again() -> None:
    inside = inside_blocks()
    progress = admitted(inside, 0, 60)
    inside.ends_to_key(progress, 12)
    inside.note_full(progress, 0, [7])
    assert inside.ends_to_key(progress, 12) == [12, 8, 4]
    assert inside.is_written(7)
    inside.begin_step()
    assert not inside.is_written(7)


@pytest.mark.parametrize(("has_drafts", "keys"), [(False, [28, 8]), (True, [28, 12])])
def test_with_events_only_planned_boundaries_get_keys(has_drafts: bool, keys: list[int]) -> None:
    inside = inside_blocks(has_drafts, has_events=True)
    assert inside.ends_to_key(admitted(inside, 0, 30), 30) == keys
