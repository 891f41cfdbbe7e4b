# SPDX-License-Identifier: Apache-2.0
"""Where tails are stored, and which suggestions are given up."""

from __future__ import annotations

from support.connector.small_engine import Request
from support.layout.byte_memory import make_group

from vllm_ascend_kvext.connector.boundaries import BoundaryPlanner
from vllm_ascend_kvext.groups.model import GroupKind
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


def a_request(prompt_tokens: int, **hints: object) -> Request:
    request = Request("a", "x" * prompt_tokens, prompt_tokens)
    request.sampling_params = type("Params", (), {"extra_args": hints})
    return request


def test_prompt_end_is_planned_below_the_last_token() -> None:
    planner = BoundaryPlanner(GROUPS, UNIT_TOKENS)
    for prompt_tokens, expected in ((100, 96), (97, 96), (96, 88)):
        plan = planner.plan(a_request(prompt_tokens), 0, 0)
        assert max(plan) == expected
        assert plan[expected].origin is Origin.PROMPT


def test_boundaries_are_multiples_of_the_unit_and_not_of_pages() -> None:
    plan = BoundaryPlanner(GROUPS, UNIT_TOKENS).plan(a_request(1000), 0, 0)
    assert all(tokens % UNIT_TOKENS == 0 for tokens in plan)
    assert any(tokens % 16 for tokens in plan)


def test_shared_part_of_a_prompt_is_a_junction() -> None:
    plan = BoundaryPlanner(GROUPS, UNIT_TOKENS).plan(a_request(1000), 80, 333)
    assert plan[328] == Reason(Origin.JUNCTION)


def test_nothing_is_planned_at_or_before_the_hit() -> None:
    plan = BoundaryPlanner(GROUPS, UNIT_TOKENS).plan(a_request(1000), 640, 300)
    assert min(plan) > 640


def test_hint_of_a_request_is_planned() -> None:
    request = a_request(1000, kvext_checkpoint_tokens=[250])
    plan = BoundaryPlanner(GROUPS, UNIT_TOKENS).plan(request, 0, 0)
    assert plan[248] == Reason(Origin.HINT)


def test_interval_adds_a_grid_rounded_up_to_units() -> None:
    planner = BoundaryPlanner(GROUPS, UNIT_TOKENS, interval_tokens=100)
    crossed = dict(planner.crossed({}, 0, 1000))
    assert set(crossed) == set(range(104, 1001, 104))


def test_next_event_is_the_next_boundary_that_can_be_crossed() -> None:
    planner = BoundaryPlanner(GROUPS, UNIT_TOKENS, interval_tokens=104)
    plan = planner.plan(a_request(1000), 0, 0)
    tokens = 0
    seen = []
    while (following := planner.next_after(plan, tokens)) <= 1200:
        seen += [boundary for boundary, _ in planner.crossed(plan, tokens, following)]
        tokens = following
    assert seen == [boundary for boundary, _ in planner.crossed(plan, 0, 1200)]


def test_steps_end_at_what_was_asked_for_and_where_the_prompt_is_hit_again() -> None:
    request = a_request(1000, kvext_checkpoint_tokens=[250])
    planner = BoundaryPlanner(STATE_GROUPS, UNIT_TOKENS)
    plan = planner.plan(request, 80, 333)
    assert [planner.next_stop_after(plan, tokens) for tokens in (80, 247, 248)] == [248, 248, 328]
    # Not 1,000: the last token is always computed.
    assert planner.next_stop_after(plan, 984) == 992
    assert planner.next_stop_after(plan, 992) > 1 << 40


def test_prompt_that_is_all_shared_is_a_junction_where_it_is_hit_again() -> None:
    plan = BoundaryPlanner(STATE_GROUPS, UNIT_TOKENS).plan(a_request(1000), 0, 1000)
    assert plan[992] == Reason(Origin.JUNCTION)
    assert max(plan) == 992


def test_steps_end_at_multiples_of_an_interval() -> None:
    planner = BoundaryPlanner(GROUPS, UNIT_TOKENS, interval_tokens=100)
    assert [planner.next_stop_after({}, tokens) for tokens in (0, 103, 104)] == [104, 104, 208]


def test_rung_ends_steps_while_requests_resume_there() -> None:
    """Each rung costs a prefill step where only the end of a step leaves a state."""
    planner = BoundaryPlanner(STATE_GROUPS, UNIT_TOKENS)
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
    # But for one request in so many, which finds out whether that has changed.
    plans = [set(rungs_of(planner, number)) for number in range(320)]
    assert all(useful in plan for plan in plans)
    assert 3 <= sum(plan == set(rungs) for plan in plans) <= 30
    assert {frozenset(plan) for plan in plans} == {frozenset(rungs), frozenset({useful})}


def rungs_of(planner: BoundaryPlanner, number: int) -> dict[Reason, int]:
    request = a_request(1000)
    request.request_id = f"request-{number}"
    plan = planner.plan(request, 0, 0)
    return {reason: tokens for tokens, reason in plan.items() if reason.origin is Origin.LADDER}


def test_state_at_the_end_of_a_step_is_stored_wherever_that_is() -> None:
    planner = BoundaryPlanner(STATE_GROUPS, UNIT_TOKENS)
    plan = {496: Reason(Origin.PROMPT)}
    for tokens, expected in (
        (96, [(96, Reason(Origin.CHUNK))]),
        (97, []),  # no boundary
        (496, [(496, Reason(Origin.PROMPT))]),
        (504, [(496, Reason(Origin.PROMPT))]),  # of the answer
    ):
        assert planner.crossed(plan, 0, tokens) == expected
    assert BoundaryPlanner(GROUPS, UNIT_TOKENS).crossed(plan, 0, 88) == []


def test_models_without_tails_have_no_grid() -> None:
    planner = BoundaryPlanner(GROUPS[:1], UNIT_TOKENS)
    assert planner.next_after({}, 0) > 1 << 40
    assert planner.crossed({}, 0, 10_000) == []


def test_suggestion_that_nobody_uses_is_made_less_often() -> None:
    planner = BoundaryPlanner(GROUPS, UNIT_TOKENS)
    ladder = Reason(Origin.LADDER, 2)

    def num_of(reason: Reason) -> int:
        num = 0
        for _ in range(1000):
            if planner.crossed({80: reason}, 79, 80):
                planner.note_tried(reason)
                num += 1
        return num

    assert num_of(ladder) < 400
    assert num_of(Reason(Origin.PROMPT)) == 1000


def test_suggestion_that_is_used_goes_on() -> None:
    planner = BoundaryPlanner(GROUPS, UNIT_TOKENS)
    ladder = Reason(Origin.LADDER, 2)
    for _ in range(1000):
        assert planner.crossed({80: ladder}, 79, 80)
        planner.note_tried(ladder)
        planner.note_hit(ladder)
