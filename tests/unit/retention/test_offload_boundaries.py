# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vllm-ascend-kvext project
"""Where tails are stored, and which suggestions are no longer made."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
from support.layout.byte_memory import make_group

from vllm_ascend_kvext.groups.model import GroupKind
from vllm_ascend_kvext.retention.offload_boundaries import OffloadBoundaries
from vllm_ascend_kvext.retention.reasons import Origin, Reason

UNIT_TOKENS = 8
GROUPS = (
    make_group(0, GroupKind.FULL, 32, 1, [64]),
    make_group(1, GroupKind.WINDOW, 16, 1, [64], 24, first_storage=1),
)

STATE_GROUPS = (
    make_group(0, GroupKind.FULL, 8, 1, [64]),
    make_group(1, GroupKind.STATE, 8, 8, [64], holds_states=True, first_storage=1),
)

WIDE_TOKENS = 16 * UNIT_TOKENS
WIDE_STATE_GROUPS = (
    STATE_GROUPS[0],
    replace(STATE_GROUPS[1], tokens_per_page=WIDE_TOKENS),
)


def a_request(prompt_tokens: int, **hints: object) -> Any:
    return SimpleNamespace(
        request_id="a",
        num_prompt_tokens=prompt_tokens,
        sampling_params=SimpleNamespace(extra_args=hints),
        mm_features=(),
    )


ENDS = ((100, 96), (97, 96), (96, 88))
HINTED = {"kvext_checkpoint_tokens": [250]}


@pytest.mark.parametrize(
    ("groups", "prompt_tokens", "hit_tokens", "shared_tokens", "hints", "boundary", "origin"),
    [
        *((GROUPS, prompt, 0, 0, {}, end, Origin.PROMPT) for prompt, end in ENDS),
        (GROUPS, 1000, 80, 333, {}, 328, Origin.JUNCTION),
        (STATE_GROUPS, 1000, 0, 1000, {}, 992, Origin.JUNCTION),
        (GROUPS, 1000, 0, 0, HINTED, 248, Origin.HINT),
        (GROUPS, 1000, 640, 300, HINTED, 992, Origin.PROMPT),
    ],
)
def test_ends_of_prompts_junctions_and_hints_are_planned(
    groups: Any,
    prompt_tokens: int,
    hit_tokens: int,
    shared_tokens: int,
    hints: dict[str, Any],
    boundary: int,
    origin: Origin,
) -> None:
    """They are at the last unit before the ends. The last token of a prompt is always computed."""
    request = a_request(prompt_tokens, **hints)
    plan = OffloadBoundaries(groups, UNIT_TOKENS).plan(request, hit_tokens, shared_tokens)
    assert plan[boundary].origin is origin
    assert min(plan) > hit_tokens
    assert max(plan) == (prompt_tokens - 1) // UNIT_TOKENS * UNIT_TOKENS


def test_next_event_is_the_next_boundary_that_can_be_crossed() -> None:
    planner = OffloadBoundaries(GROUPS, UNIT_TOKENS, interval_tokens=104)
    plan = planner.plan(a_request(1000), 0, 0)
    tokens = 0
    seen = []
    while (following := planner.next_after(plan, tokens)) <= 1200:
        seen += [boundary for boundary, _ in planner.crossed(plan, tokens, following)]
        tokens = following
    assert seen == [boundary for boundary, _ in planner.crossed(plan, 0, 1200)]


def test_steps_end_at_what_was_asked_for_and_where_the_prompt_is_hit_again() -> None:
    request = a_request(1000, kvext_checkpoint_tokens=[250])
    planner = OffloadBoundaries(STATE_GROUPS, UNIT_TOKENS)
    plan = planner.plan(request, 80, 333)
    assert [planner.next_stop_after(plan, tokens) for tokens in (80, 247, 248)] == [248, 248, 328]
    # The result is not 1,000, because the last token is always computed.
    assert planner.next_stop_after(plan, 984) == 992
    assert planner.next_stop_after(plan, 992) > 1 << 40


def test_steps_end_at_multiples_of_an_interval() -> None:
    planner = OffloadBoundaries(GROUPS, UNIT_TOKENS, interval_tokens=100)
    assert [planner.next_stop_after({}, tokens) for tokens in (0, 103, 104)] == [104, 104, 208]


def test_rung_ends_steps_while_requests_resume_there() -> None:
    """If only the end of a step leaves a state, each rung costs a prefill step."""
    planner = OffloadBoundaries(STATE_GROUPS, UNIT_TOKENS)
    rungs = rungs_of(planner, 0)
    assert len(rungs) > 2
    stops, tokens = [], 0
    plan = planner.plan(a_request(1000), 0, 0)
    while (tokens := planner.next_stop_after(plan, tokens)) <= 1000:
        stops.append(tokens)
    assert stops == sorted([*rungs.values(), 992])
    useful = next(iter(rungs))
    for number in range(32):
        for reason in rungs:
            planner.note_tried(reason)
        if number % 16 == 0:
            planner.note_hit(useful)
    # Only some requests have all rungs. They show whether other rungs are used again.
    plans = [set(rungs_of(planner, number)) for number in range(320)]
    assert all(useful in plan for plan in plans)
    assert 3 <= sum(plan == set(rungs) for plan in plans) <= 30
    assert {frozenset(plan) for plan in plans} == {frozenset(rungs), frozenset({useful})}


def test_no_step_ends_at_a_rung_that_is_on_trial_if_too_many_steps_did() -> None:
    planner = OffloadBoundaries(STATE_GROUPS, UNIT_TOKENS)
    plan = planner.plan(a_request(1000), 0, 333)
    rungs = rungs_of(planner, 0)
    assert planner.next_stop_after(plan, 328) == min(rungs.values())
    assert planner.next_stop_after(plan, 0, may_try=False) == 328  # Where prompts part.
    assert planner.next_stop_after(plan, 328, may_try=False) == 992
    assert planner.next_stop_after(plan, 0, may_stop=False) > 1 << 40
    useful = max(rungs, key=rungs.__getitem__)
    for _ in range(16):
        planner.note_tried(useful)
    planner.note_hit(useful)
    assert planner.next_stop_after(plan, 328, may_try=False) == rungs[useful]


def test_a_users_interval_ends_steps_however_many_did() -> None:
    planner = OffloadBoundaries(STATE_GROUPS, UNIT_TOKENS, interval_tokens=104)
    assert planner.next_stop_after({}, 0, may_stop=False, may_try=False) == 104


def test_a_step_that_goes_on_behind_a_rung_leaves_no_state_there() -> None:
    """It does not count as a trial."""
    planner = OffloadBoundaries(STATE_GROUPS, UNIT_TOKENS)
    plan = {80: Reason(Origin.LADDER), 160: Reason(Origin.PROMPT)}
    assert planner.crossed(plan, 0, 80) == [(80, Reason(Origin.LADDER))]
    assert planner.crossed(plan, 0, 160) == [(160, Reason(Origin.PROMPT))]
    windows = OffloadBoundaries(GROUPS, UNIT_TOKENS)
    assert (80, Reason(Origin.LADDER)) in windows.crossed(plan, 0, 160)


def rungs_of(
    planner: OffloadBoundaries, number: int, prompt_tokens: int = 1000
) -> dict[Reason, int]:
    request = a_request(prompt_tokens)
    request.request_id = f"request-{number}"
    plan = planner.plan(request, 0, 0)
    return {reason: tokens for tokens, reason in plan.items() if reason.origin is Origin.LADDER}


def test_a_state_costs_the_ladder_as_much_as_all_units_of_its_page() -> None:
    num_rungs = [
        len(rungs_of(OffloadBoundaries(groups, UNIT_TOKENS), 1, 20 * WIDE_TOKENS))
        for groups in (STATE_GROUPS, WIDE_STATE_GROUPS)
    ]
    assert num_rungs[0] > num_rungs[1] > 0


def test_rungs_of_states_are_whole_pages_before_the_last_one() -> None:
    """The last whole page needs none, as vLLM ends a step with it. It is judged by itself."""
    planner = OffloadBoundaries(WIDE_STATE_GROUPS, UNIT_TOKENS)
    prompt_tokens = 20 * WIDE_TOKENS + 5 * UNIT_TOKENS + 1
    rungs = rungs_of(planner, 1, prompt_tokens)
    assert list(rungs.values()) == [(20 - (1 << rung)) * WIDE_TOKENS for rung in range(5)]
    plan = planner.plan(a_request(prompt_tokens), 0, 0)
    last_tokens = 20 * WIDE_TOKENS
    assert planner.crossed(plan, last_tokens - 1, last_tokens) == [
        (last_tokens, Reason(Origin.CHUNK, 1))
    ]
    chunk_tokens = 17 * WIDE_TOKENS
    assert planner.crossed(plan, chunk_tokens - 1, chunk_tokens) == [
        (chunk_tokens, Reason(Origin.CHUNK))
    ]
    assert not rungs_of(planner, 1, WIDE_TOKENS + UNIT_TOKENS), "a prompt of one page has none"


def test_state_at_the_end_of_a_step_is_stored_wherever_that_is() -> None:
    planner = OffloadBoundaries(STATE_GROUPS, UNIT_TOKENS)
    plan = {496: Reason(Origin.PROMPT)}
    for tokens, expected in (
        (96, [(96, Reason(Origin.CHUNK))]),
        (97, []),  # This is no boundary.
        (496, [(496, Reason(Origin.PROMPT))]),
        (504, [(496, Reason(Origin.PROMPT))]),  # The answer ends here.
    ):
        assert planner.crossed(plan, 0, tokens) == expected
    assert OffloadBoundaries(GROUPS, UNIT_TOKENS).crossed(plan, 0, 88) == []


@pytest.mark.parametrize(
    ("reason", "is_used", "nums"),
    [
        (Reason(Origin.LADDER, 2), False, range(21, 400)),
        (Reason(Origin.LADDER, 2), True, [1000]),
        (Reason(Origin.PROMPT), False, [1000]),
    ],
)
def test_suggestion_that_nobody_uses_is_made_less_often(
    reason: Reason, is_used: bool, nums: Sequence[int]
) -> None:
    """Some suggestions are still made, to see whether they are used again."""
    planner = OffloadBoundaries(GROUPS, UNIT_TOKENS)
    num = 0
    for _ in range(1000):
        if planner.crossed({80: reason}, 79, 80):
            num += 1
            planner.note_tried(reason)
            if is_used:
                planner.note_hit(reason)
    assert num in nums


def test_grids_rungs_and_ends_of_steps_are_not_asked_for() -> None:
    """Their tails get a smaller part of the pool, and are stored last."""
    planner = OffloadBoundaries(GROUPS, UNIT_TOKENS)
    unasked = {origin for origin in Origin if planner.is_unasked(Reason(origin))}
    assert unasked == {Origin.GRID, Origin.LADDER, Origin.CHUNK}
    assert planner.end_of_turn == Reason(Origin.LATEST)
