# SPDX-License-Identifier: Apache-2.0
"""The least worthy checkpoint gives way first, and none that a request reads."""

from __future__ import annotations

from collections import Counter
from typing import Any

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from support.sample import sampled
from unit.retention.manager_model import ModelCache
from unit.retention.pool_model import ModelRequest

from vllm_ascend_kvext.groups.model import GroupKind
from vllm_ascend_kvext.retention.geometry import GroupGeometry, HitGeometry
from vllm_ascend_kvext.retention.reasons import Origin

UNIT_TOKENS = 4
LOOKED_AT = 16
"""Checkpoints that every eviction looks at: of so few it takes the least worthy of all."""
FULL, WINDOW = GroupKind.FULL, GroupKind.WINDOW
LAYOUTS = {
    "full and window": (GroupGeometry(FULL, 4), GroupGeometry(WINDOW, 4, 9)),
    "small blocks": (
        GroupGeometry(FULL, 4),
        GroupGeometry(FULL, 2),
        GroupGeometry(WINDOW, 2, 5),
        GroupGeometry(WINDOW, 4, 13),
    ),
    "looks ahead": (GroupGeometry(FULL, 4, 0, True, 4), GroupGeometry(WINDOW, 4, 9, True, 4)),
    "window only": (GroupGeometry(WINDOW, 4, 9),),
}
Node = dict[str, Any]


class World:
    """A cache, and what is to be known of its checkpoints."""

    def __init__(self, layout: str, num_blocks: int) -> None:
        self.cache = ModelCache(HitGeometry(LAYOUTS[layout], UNIT_TOKENS), num_blocks)
        self.parents: dict[bytes, bytes] = {}
        self.num_served = 0

    def serve(self, text: str) -> None:
        self.cache.finish(self.start(text))

    def start(self, text: str) -> ModelRequest:
        request = ModelRequest.of(f"r{self.num_served}", text)
        self.num_served += 1
        assert self.cache.step(request, len(text))
        return request

    def checkpoints(self) -> dict[bytes, Node]:
        nodes = {node["key"]: node for node in self.cache.cache_state.describe()}
        self.parents.update((key, node["parent_key"]) for key, node in nodes.items())
        return {key: node for key, node in nodes.items() if node["tail"]}

    def num_surplus(self) -> int:
        return len(self.cache.cache_state.surplus())

    def evict_one(self) -> set[bytes]:
        """Evict until there is one more block; returns what went."""
        before = set(self.checkpoints())
        self.cache.cache_state.make_room(self.num_surplus() + 1)
        return before - set(self.checkpoints())

    def worths(self) -> dict[bytes, float]:
        """What a use saves per block, times the uses to expect per time."""
        return self.worths_of(self.savings())

    def worths_of(self, savings: dict[bytes, tuple[float, Any, float]]) -> dict[bytes, float]:
        cache_state = self.cache.cache_state
        return {
            key: saved * cache_state.rates.uses_per_pool(reason, age_pools)
            for key, (saved, reason, age_pools) in savings.items()
        }

    def savings(self) -> dict[bytes, tuple[float, Any, float]]:
        """Tokens saved per block, reason and age of every checkpoint."""
        cache_state = self.cache.cache_state
        nodes = self.checkpoints()
        needs: Counter[int] = Counter()
        for node in cache_state.describe():
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
            age_pools = cache_state.clock_pools - node["clock_pools"]
            savings[key] = saved_tokens / max(1, num_blocks), node["reason"], age_pools
        return savings


def spelled(units: list[str]) -> str:
    return "".join(letter * UNIT_TOKENS for letter in units) + "x"


prompts_of_units = st.lists(
    st.lists(st.sampled_from("aaab"), min_size=1, max_size=12).map(spelled), max_size=10
)


@settings(max_examples=sampled(150))
@given(prompts=prompts_of_units, layout=st.sampled_from(sorted(LAYOUTS)))
@example(prompts=[*map(spelled, ("baa", "aa", "aba", "baa", "abbaaaaa"))], layout="small blocks")
def test_the_least_worthy_goes_first(prompts: list[str], layout: str) -> None:
    world = World(layout, 500)
    for prompt in prompts:
        if len(world.checkpoints()) < LOOKED_AT - 8:
            world.serve(prompt)
    assert not world.cache.stats.checkpoints_evicted
    assert len(world.checkpoints()) <= LOOKED_AT
    while savings := world.savings():
        before = world.worths_of(savings)
        gone = world.evict_one()
        assert gone, "there is a checkpoint, and no block was found"
        # The ages that it sees on the way change what it expects: of some it knows the worth from
        # before, of others from after.
        after = world.worths_of(savings)
        least = min(max(before[key], after[key]) for key in savings)
        assert any(min(before[key], after[key]) <= least * (1 + 1e-9) for key in gone)


@settings(max_examples=sampled(50))
@given(prompts=prompts_of_units, layout=st.sampled_from(sorted(LAYOUTS)))
def test_no_more_is_evicted_than_has_to_be(prompts: list[str], layout: str) -> None:
    world = World(layout, 500)
    for prompt in prompts:
        world.serve(prompt)
    while nodes := world.checkpoints():
        world.cache.cache_state.make_room(world.num_surplus())
        assert set(world.checkpoints()) == set(nodes), "there was room"
        own = {
            key
            for key, node in nodes.items()
            if any(world.cache.cache_state.num_needs(index) == 1 for index in node["tail"])
        }
        gone = world.evict_one()
        assert len(gone) == 1 or len(gone & own) <= 1, "one that yields a block is enough"


def test_of_many_the_least_worthy_go_first() -> None:
    """An eviction does not look at all of them, and still takes one of those worth little."""
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


@pytest.mark.parametrize("layout", LAYOUTS)
def test_what_a_request_has_resumed_from_goes_last(layout: str) -> None:
    world = World(layout, 500)
    short, long = "b" * 8 + "x", "a" * 120 + "x"
    world.serve(short)
    request = world.start(short + "x")
    resumed = short[: request.before_step_tokens].encode()
    world.serve(long)
    worths = world.worths()
    assert resumed and worths[resumed] < max(worths.values())
    while len(world.checkpoints()) > 1:
        assert resumed not in world.evict_one()
    assert set(world.checkpoints()) == {resumed}
    world.cache.cache_state.make_room(500)
    assert not world.checkpoints(), "nothing else is left"


def test_what_a_request_had_resumed_from_goes_like_others() -> None:
    world = World("full and window", 500)
    short, long = "b" * 8 + "x", "a" * 120 + "x"
    world.serve(short)
    request = world.start(short + "x")
    world.serve(long)
    world.evict_one()
    world.cache.finish(request)
    assert all(not node["num_requests"] for node in world.checkpoints().values())
    worths = world.worths()
    assert min(worths, key=lambda key: worths[key]) in world.evict_one()


def test_a_use_renews_a_checkpoint() -> None:
    world = World("full and window", 100)
    world.serve("a" * 8 + "x")
    before = world.checkpoints()[b"a" * 8]
    world.serve("b" * 80 + "x")
    world.serve("a" * 8 + "y")
    after = world.checkpoints()[b"a" * 8]
    assert after["clock_pools"] > before["clock_pools"]
    assert after["reason"] == (Origin.USE, 0, 1)
    assert after["origin"] == before["origin"]
    for uses in (2, 3, 3):
        world.serve("a" * 8 + "y")
        assert world.checkpoints()[b"a" * 8]["reason"] == (Origin.USE, 0, uses)


def test_the_clock_tells_what_has_been_cached_for_checkpoints() -> None:
    world = World("full and window", 200)
    for number in range(5):
        world.serve(f"{number:04}" + "a" * 40 + "x")
        needed = sum(
            world.cache.cache_state.num_needs(block.block_id) > 0
            for block in world.cache.pool.blocks
        )
        assert world.cache.cache_state.clock_pools == pytest.approx(needed / 200)
