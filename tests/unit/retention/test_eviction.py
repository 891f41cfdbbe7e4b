# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vllm-ascend-kvext project
"""The checkpoint of least worth is evicted first, but none that a request reads."""

from __future__ import annotations

from collections import Counter
from typing import Any

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from support.retention import inspection
from support.sample import sampled
from unit.retention.small_cache import LAYOUTS, ModelCache, spelled

from vllm_ascend_kvext.retention.reasons import Origin

LOOKED_AT = 16
"""The number of checkpoints that each eviction looks at.

If there are no more, it takes the worst.
"""
Node = dict[str, Any]


class World(ModelCache):
    """A cache, and the facts that the model knows about its checkpoints."""

    def __init__(self, layout: str, num_blocks: int) -> None:
        super().__init__(layout, num_blocks)
        self.parents: dict[bytes, bytes] = {}

    def by_key(self) -> dict[bytes, Node]:
        nodes = {node["key"]: node for node in inspection.describe(self.cache_state)}
        self.parents.update((key, node["parent_key"]) for key, node in nodes.items())
        return {key: node for key, node in nodes.items() if node["tail"]}

    def evict_one(self) -> set[bytes]:
        """Evict until there is one more block. Return the evicted checkpoints."""
        before = set(self.by_key())
        self.cache_state.make_room(self.num_surplus + 1)
        return before - set(self.by_key())

    def worths(self) -> dict[bytes, float]:
        """The tokens that a use saves per block, times the expected uses per unit of time."""
        return self.worths_of(self.savings())

    def worths_of(self, savings: dict[bytes, tuple[float, Any, float]]) -> dict[bytes, float]:
        return {
            key: saved * inspection.rates_of(self.cache_state).uses_per_pool(reason, age_pools)
            for key, (saved, reason, age_pools) in savings.items()
        }

    def savings(self) -> dict[bytes, tuple[float, Any, float]]:
        """The saved tokens per block, the reason and the age of every checkpoint."""
        nodes = self.by_key()
        needs: Counter[int] = Counter()
        for node in inspection.describe(self.cache_state):
            for ids in (*node["runs"], node["tail"]):
                needs.update(ids)
        savings = {}
        for key, node in nodes.items():
            num_blocks = sum(1 / needs[index] for index in node["tail"])
            if not node["num_children"] and not node["num_requests"]:
                num_blocks += sum(map(len, node["runs"]))
            above = self.parents[key]
            while above and above not in nodes:
                above = self.parents[above]
            saved_tokens = len(key) - len(above)
            age_pools = inspection.clock_pools(self.cache_state) - node["clock_pools"]
            judged = (*node["reason"], node["num_paths"])
            savings[key] = saved_tokens / max(1, num_blocks), judged, age_pools
        return savings


prompts_of_units = st.lists(
    st.lists(st.sampled_from("aaab"), min_size=1, max_size=12).map(spelled), max_size=10
)


@settings(max_examples=sampled(150))
@given(prompts=prompts_of_units, layout=st.sampled_from(sorted(LAYOUTS)))
@example(
    prompts=[*map(spelled, ("baa", "aa", "aba", "baa", "abbaaaaa"))], layout="blocks below the unit"
)
def test_the_least_worthy_goes_first(prompts: list[str], layout: str) -> None:
    world = World(layout, 500)
    for prompt in prompts:
        if len(world.by_key()) < LOOKED_AT - 8:
            world.serve(prompt)
    assert not world.stats.checkpoints_evicted
    assert len(world.by_key()) <= LOOKED_AT
    while savings := world.savings():
        before = world.worths_of(savings)
        gone = world.evict_one()
        assert gone, "no block was found, although there is a checkpoint"
        # The eviction sees ages, and they change what it expects. It judges some checkpoints by
        # their worth before this change, and others by their worth after it.
        after = world.worths_of(savings)
        least = min(max(before[key], after[key]) for key in savings)
        assert any(min(before[key], after[key]) <= least * (1 + 1e-9) for key in gone)


@settings(max_examples=sampled(50))
@given(prompts=prompts_of_units, layout=st.sampled_from(sorted(LAYOUTS)))
def test_no_more_is_evicted_than_has_to_be(prompts: list[str], layout: str) -> None:
    world = World(layout, 500)
    for prompt in prompts:
        world.serve(prompt)
    while nodes := world.by_key():
        world.cache_state.make_room(world.num_surplus)
        assert set(world.by_key()) == set(nodes), "a checkpoint was evicted although there was room"
        own = {
            key
            for key, node in nodes.items()
            if any(inspection.num_needs(world.cache_state, index) == 1 for index in node["tail"])
        }
        gone = world.evict_one()
        assert len(gone) == 1 or len(gone & own) <= 1, (
            "more was evicted than one checkpoint that yields a block"
        )


def test_of_many_the_least_worthy_go_first() -> None:
    """An eviction does not look at all checkpoints, but still takes one of little worth."""
    world = World("full and window", 10000)
    for number in range(50):
        world.serve(f"{number:04}" + "a" * 4 + "x")
        world.serve(f"L{number:03}" + "a" * 300 + "x")
    worths = world.worths()
    assert len(worths) > 8 * LOOKED_AT
    ordered = sorted(worths, key=lambda key: worths[key])
    gone: set[bytes] = set()
    while len(gone) < len(worths) // 4:
        gone |= world.evict_one()
    lower_half = set(ordered[: len(ordered) // 2])
    assert len(gone & lower_half) > 0.8 * len(gone)


@pytest.mark.parametrize(
    "layout", ["full and window", "blocks below the unit", "full looks ahead", "window only"]
)
def test_what_a_request_has_resumed_from_goes_last(layout: str) -> None:
    world = World(layout, 500)
    short, long = "b" * 8 + "x", "a" * 120 + "x"
    world.serve(short)
    request = world.start(short + "x")
    resumed = short[: request.before_step_tokens].encode()
    world.serve(long)
    worths = world.worths()
    assert resumed and worths[resumed] < max(worths.values())
    while len(world.by_key()) > 1:
        assert resumed not in world.evict_one()
    assert set(world.by_key()) == {resumed}
    world.cache_state.make_room(500)
    assert not world.by_key(), "the last checkpoint was not evicted"


def test_a_use_renews_a_checkpoint() -> None:
    world = World("full and window", 100)
    world.serve("a" * 8 + "x")
    before = world.by_key()[b"a" * 8]
    world.serve("b" * 80 + "x")
    world.serve("a" * 8 + "y")
    after = world.by_key()[b"a" * 8]
    assert after["clock_pools"] > before["clock_pools"]
    assert after["reason"] == (Origin.USE, 0, 1)
    assert after["origin"] == before["origin"]
    for uses in (2, 3, 3):
        world.serve("a" * 8 + "y")
        assert world.by_key()[b"a" * 8]["reason"] == (Origin.USE, 0, uses)


def test_the_clock_tells_what_has_been_cached_for_checkpoints() -> None:
    world = World("full and window", 200)
    for number in range(5):
        world.serve(f"{number:04}" + "a" * 40 + "x")
        needed = sum(
            inspection.num_needs(world.cache_state, block.block_id) > 0
            for block in world.pool.blocks
        )
        assert inspection.clock_pools(world.cache_state) == pytest.approx(needed / 200)
