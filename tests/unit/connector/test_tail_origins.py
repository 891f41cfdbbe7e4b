# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vllm-ascend-kvext project
"""Why tails are stored decides with which other tails they are counted."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
from support.layout.byte_memory import make_group

from vllm_ascend_kvext.connector.scheduler.request_state import StoreProgress
from vllm_ascend_kvext.connector.scheduler.stores import Stores
from vllm_ascend_kvext.groups.model import GroupKind
from vllm_ascend_kvext.retention.offload_boundaries import OffloadBoundaries
from vllm_ascend_kvext.retention.reasons import Origin, Reason
from vllm_ascend_kvext.store.resumes import TailOrigin
from vllm_ascend_kvext.store.reuse import NUM_ORIGINS

UNIT_TOKENS = 8
GROUPS = (
    make_group(0, GroupKind.FULL, 32, 1, [64]),
    make_group(1, GroupKind.WINDOW, 16, 1, [64], 24, first_storage=1),
)


def make_planner() -> OffloadBoundaries:
    return OffloadBoundaries(GROUPS, UNIT_TOKENS)


def origin_of(reason: Reason, num_earlier: int = 0) -> TailOrigin:
    """The origin of tails of a prompt that continues some earlier prompts."""
    stores: Any = SimpleNamespace(planner=make_planner())
    progress = StoreProgress(1, {}, 0, 0)
    for _ in range(num_earlier):
        progress.answers = progress.answers.with_answer(False)
    return Stores._tail_origin(stores, progress, reason)


@pytest.mark.parametrize(
    ("reason", "origin"),
    [
        (Reason(Origin.LADDER, 3), TailOrigin.UNASKED),
        (Reason(Origin.GRID), TailOrigin.UNASKED),
        (Reason(Origin.CHUNK), TailOrigin.UNASKED),
        (Reason(Origin.JUNCTION), TailOrigin.ASKED),
        (Reason(Origin.HINT), TailOrigin.ASKED),
        (Reason(Origin.LATEST), TailOrigin.END_OF_TURN),
        (Reason(Origin.PROMPT), TailOrigin.END_OF_PROMPT),
        (OffloadBoundaries.end_of_turn, TailOrigin.END_OF_TURN),
        (OffloadBoundaries.end_of_prompt, TailOrigin.END_OF_PROMPT),
    ],
)
def test_each_reason_has_an_origin(reason: Reason, origin: TailOrigin) -> None:
    assert origin_of(reason) is origin


@pytest.mark.parametrize("num_earlier", [1, 2])
def test_ends_of_prompts_that_continue_others_have_an_origin_of_their_own(num_earlier: int) -> None:
    end_of_turn, end_of_prompt = OffloadBoundaries.end_of_turn, OffloadBoundaries.end_of_prompt
    assert origin_of(end_of_turn, num_earlier) is TailOrigin.END_OF_LATER_TURN
    assert origin_of(end_of_prompt, num_earlier) is TailOrigin.END_OF_LATER_PROMPT
    assert origin_of(Reason(Origin.JUNCTION), num_earlier) is TailOrigin.ASKED
    assert origin_of(Reason(Origin.GRID), num_earlier) is TailOrigin.UNASKED


def plan(prompt_tokens: int, shared_tokens: int = 0) -> dict[int, Reason]:
    request: Any = SimpleNamespace(
        request_id="a",
        num_prompt_tokens=prompt_tokens,
        sampling_params=SimpleNamespace(extra_args={}),
        mm_features=(),
    )
    return make_planner().plan(request, 0, shared_tokens)


def test_what_is_planned_at_the_end_of_a_prompt_is_known_by_its_reason() -> None:
    planned = plan(1000)
    assert planned.pop(992) == OffloadBoundaries.end_of_prompt
    assert {origin_of(reason) for reason in planned.values()} == {TailOrigin.UNASKED}


def test_an_end_of_a_prompt_that_other_requests_have_had_was_asked_for() -> None:
    assert origin_of(plan(1000, 992)[992]) is TailOrigin.ASKED
    assert origin_of(plan(1000, 328)[328]) is TailOrigin.ASKED
    assert origin_of(plan(1000, 328)[992]) is TailOrigin.END_OF_PROMPT


def test_each_origin_has_its_own_class() -> None:
    assert len(TailOrigin) == NUM_ORIGINS
    assert sorted(TailOrigin) == list(range(NUM_ORIGINS))
