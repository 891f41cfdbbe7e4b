# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vllm-ascend-kvext project
"""Reasons are judged by the uses and evictions of the checkpoints that were kept for them."""

from __future__ import annotations

import bisect
import math
import re
from pathlib import Path
from typing import Any

import pytest
from hypothesis import example, given
from hypothesis import strategies as st
from support.retention.inspection import new_rates

from vllm_ascend_kvext.retention.reasons import Origin

ReasonTuple = tuple[int, int, int]
LADDER: ReasonTuple = (Origin.LADDER, 1, 0)
PROMPT: ReasonTuple = (Origin.PROMPT, 0, 0)
USED: ReasonTuple = (Origin.USE, 0, 1)
HEADER = Path(__file__).parents[3] / "csrc" / "retention" / "use_rates.h"

NUM_AGES = 28
ESTIMATE_EVERY = 16
AGE_MEMORY = 512
OLDEST_AGE_POOLS = 0.01 * 1.25 ** (NUM_AGES - 1)
PRIOR_CHECKPOINTS = 2


@pytest.fixture
def rates() -> Any:
    return new_rates()


def test_origins_are_those_of_the_compiled_module() -> None:
    found = re.search(r"enum class Origin : std::int32_t \{(.*?)\};", HEADER.read_text(), re.S)
    assert found
    names = [name.strip().removeprefix("k") for name in found[1].split(",")]
    assert [name.upper() for name in names] == [origin.name for origin in Origin]
    assert [origin.value for origin in Origin] == list(range(len(Origin)))


def test_reasons_are_judged_apart(rates: Any) -> None:
    rates.count_use(LADDER, 0.1, 0)
    rates.count_eviction(PROMPT)
    rates.note_age(PROMPT, 0.1, 0)
    for other in ((Origin.LADDER, 2, 0), (Origin.LADDER, 1, 1), (Origin.LADDER, 257, 0)):
        assert rates.expected_uses(other) == 1
        assert rates.uses_per_pool(other, 0.1) == new_rates().uses_per_pool(other, 0.1)
    assert rates.expected_uses(PROMPT) < 1 < rates.expected_uses(LADDER)
    assert rates.uses_per_pool(PROMPT, 0) < rates.uses_per_pool(LADDER, 0)


def test_ages_of_ends_of_paths_are_judged_apart(rates: Any) -> None:
    """The odds of a use, which decide whether rungs are left, are not."""
    end, continued, fork = ((*USED, num_paths) for num_paths in range(3))
    unknown = new_rates().uses_per_pool(end, 0)
    for _ in range(20):
        rates.count_use(end, 0, 0)
        rates.note_age(continued, OLDEST_AGE_POOLS, 0)
    assert rates.uses_per_pool(continued, 0) < unknown < rates.uses_per_pool(end, 0)
    assert rates.uses_per_pool(fork, 0) == unknown
    assert rates.expected_uses(end) == rates.expected_uses(continued) == 21


def test_last_boundaries_lend_what_is_known_to_those_that_are_the_prompts_too(
    rates: Any,
) -> None:
    of_answer, of_prompt = (Origin.LATEST, 0, 0), (Origin.LATEST, 1, 0)
    unknown = new_rates().uses_per_pool(of_prompt, 0.01)
    for _ in range(100):
        rates.note_age(of_answer, OLDEST_AGE_POOLS, 0)
    lent = new_rates()
    for _ in range(100):
        lent.note_age(of_answer, OLDEST_AGE_POOLS, 0)
        lent.count_use(of_prompt, 0, 0)
    assert rates.uses_per_pool(of_prompt, 0.01) < unknown / 2, (
        "unused boundaries of answers must lower the estimate"
    )
    assert lent.uses_per_pool(of_prompt, 0) > 5 * lent.uses_per_pool(of_answer, 0)


def test_an_eviction_taken_back_counts_as_a_use(rates: Any) -> None:
    rates.count_eviction(PROMPT)
    rates.count_missed_use(PROMPT, 0, 0)
    assert rates.expected_uses(PROMPT) == 2
    rates.count_missed_use(LADDER, 0, 0)
    assert rates.expected_uses(LADDER) == 2, "without a known eviction, none can be taken back"


def test_what_happened_long_ago_is_forgotten(rates: Any) -> None:
    for _ in range(2000):
        rates.count_use(PROMPT, 0, 0)
    for _ in range(300):
        rates.count_eviction(PROMPT)
    assert rates.expected_uses(PROMPT) < 0.5


def test_what_is_never_used_is_tried_less_often(rates: Any) -> None:
    assert rates.is_worth_trying(LADDER)
    for _ in range(100):
        rates.count_eviction(LADDER)
    assert [rates.is_worth_trying(LADDER) for _ in range(32)].count(True) == 2
    assert rates.is_worth_trying(PROMPT)
    for _ in range(5):
        rates.count_use(LADDER, 0, 0)
    assert rates.is_worth_trying(LADDER)


def test_ages_of_long_ago_weigh_less(rates: Any) -> None:
    for _ in range(AGE_MEMORY):
        rates.count_use(PROMPT, 1.0, 0)
    before = rates.uses_per_pool(PROMPT, 0.9)
    for _ in range(2 * AGE_MEMORY):
        rates.note_age(PROMPT, 1.2, 0)
    ratio = rates.uses_per_pool(PROMPT, 0.9) / before
    assert ratio < 0.1, "a fifth would be left if all ages were remembered"


# The estimates by age, computed from all events at once.


def edges() -> list[float]:
    found, edge = [0.0], 0.01
    for _ in range(NUM_AGES):
        found.append(edge)
        edge *= 1.25
    return found


def age_class(age_pools: float) -> int:
    return min(bisect.bisect_right(edges(), age_pools) - 1, NUM_AGES - 1)


def prior_alive(age_pools: float) -> float:
    return PRIOR_CHECKPOINTS * (0.5 + 0.5 * 2 ** (-age_pools / 0.3))


def estimated(events: list[tuple[str, float]], age_pools: float) -> float:
    """Uses per pool: the maximum over all times for which a checkpoint may be kept.

    Each time is summed from the start: the share that is alive, the share that is used, and the
    time.
    """
    uses = [age_class(age) for kind, age in events if kind != "unused"]
    ages = [age_class(age) + (kind != "unused") for kind, age in events]
    border = edges()
    likely = []
    for index in range(NUM_AGES):
        used_in_prior = prior_alive(border[index]) - prior_alive(border[index + 1])
        exposed = sum(age > index for age in ages) + prior_alive(border[index])
        likely.append(min(0.99, (uses.count(index) + used_in_prior) / exposed))
    first = age_class(age_pools)
    worths = []
    for stop in range(first + 1, NUM_AGES + 1):
        alive = [math.prod(1 - p for p in likely[first:index]) for index in range(first, stop)]
        num_uses = 1 - alive[-1] * (1 - likely[stop - 1])
        pools = sum(
            alive[index - first] * (border[index + 1] - border[index]) * (1 - likely[index] / 2)
            for index in range(first, stop)
        )
        worths.append(num_uses / pools)
    return max(worths)


def tell(rates: Any, kind: str, age_pools: float) -> None:
    if kind == "use":
        rates.count_use(PROMPT, age_pools, 0)
    elif kind == "miss":
        rates.count_missed_use(PROMPT, age_pools, 0)
    else:
        assert rates.note_age(PROMPT, age_pools, 0) == age_class(age_pools)


ages = st.one_of(st.floats(0, 0.2), st.floats(0, 8), st.sampled_from(edges()))
events_of_ages = st.lists(
    st.tuples(st.sampled_from(["use", "use", "miss", "unused"]), ages), max_size=60
)


@given(events=events_of_ages, probes=st.lists(ages, min_size=1, max_size=4))
@example(events=[("use", 0.0)] * 23, probes=[0.125, 0.0])
def test_uses_per_pool_are_those_of_kaplan_meier_and_gittins(
    events: list[tuple[str, float]], probes: list[float]
) -> None:
    rates = new_rates()
    for number, (kind, age_pools) in enumerate(events):
        tell(rates, kind, age_pools)
        if number % 7 == 0:  # Earlier estimates must not stay.
            rates.uses_per_pool(PROMPT, age_pools)
    # The first few uses, and then every n-th use, change the estimate at once.
    for _ in range(ESTIMATE_EVERY):
        events = [*events, ("use", 0.0)]
        tell(rates, *events[-1])
        found = [rates.uses_per_pool(PROMPT, age_pools) for age_pools in probes]
        expected = pytest.approx([estimated(events, age) for age in probes], rel=1e-9)
        if found == expected:
            break
    assert found == expected
