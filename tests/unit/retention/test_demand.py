# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vllm-ascend-kvext project
"""What requests ask for, what they leave, and which losses are counted for them."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from support.retention import inspection
from unit.retention.small_cache import FULL, WINDOW, ModelCache, ModelRequest, spelled

from vllm_ascend_kvext.retention.demand import find_demand
from vllm_ascend_kvext.retention.geometry import GroupGeometry, HitGeometry
from vllm_ascend_kvext.retention.reasons import Origin, Reason
from vllm_ascend_kvext.retention.stats import LossCause

SYSTEM = "aaaabbbbaaaabbbbaaaabbbb"
"""This text ends neither on the grid (16 tokens) nor on a rung of the prompts below."""


def make_cache(num_blocks: int = 200, use_eagle: bool = False) -> ModelCache:
    full = GroupGeometry(FULL, 4, 0, use_eagle, 4)
    return ModelCache((full, GroupGeometry(WINDOW, 4, 5, use_eagle, 4)), num_blocks)


@pytest.fixture
def cache() -> ModelCache:
    return make_cache()


def demand(cache: ModelCache, text: str, hints: object = None) -> dict[int, Origin]:
    request, hit_tokens = cache.request("asks", text, hints), cache.hit_tokens(text, len(text) - 1)
    wanted = cache.retention._find_demand(cache.state_of(text), request, hit_tokens).boundaries
    return {tokens: reason.origin for tokens, reason in wanted.items()}


def find_evicted(cache: ModelCache, text: str) -> int:
    return cache.find_evicted(text, 0, len(text))


def answer(letters: str) -> str:
    """A text that differs from other answers from its first token on."""
    return "".join(letter * 8 for letter in letters)


def test_a_hint_is_kept_by_the_first_request(cache: ModelCache) -> None:
    hint = [len(SYSTEM) + 2]
    assert demand(cache, SYSTEM + answer("cde") + "x", hint) == {len(SYSTEM): Origin.HINT}
    cache.serve(SYSTEM + answer("cde") + "x", hint)
    assert cache.stats.hints_pinned == 1
    assert cache.serve(SYSTEM + answer("fgh") + "x") == len(SYSTEM)


def test_what_was_wanted_is_evicted_no_longer(cache: ModelCache) -> None:
    cache.serve(SYSTEM + "x")
    cache.evict_everything()
    cache.lose_surplus()
    assert find_evicted(cache, SYSTEM) == len(SYSTEM)
    cache.serve(SYSTEM + "x")
    assert find_evicted(cache, SYSTEM) < len(SYSTEM)


def test_demand_changes_nothing(cache: ModelCache) -> None:
    cache.serve(SYSTEM + answer("cde") + "x")
    cache.serve(answer("cde") + "x")
    cache.lose_surplus()

    def state() -> object:
        return (
            cache.stats.totals(),
            cache.cache_state.counts(),
            inspection.describe(cache.cache_state),
            inspection.surplus(cache.cache_state),
            [block.block_id for block in cache.pool.queue],
            [(block._block_hash, block.ref_cnt) for block in cache.pool.blocks],
            str(cache.pool.cached_block_hash_to_block._cache),
            set(cache.retention._request_states),
            [find_evicted(cache, text) for text in (SYSTEM, answer("cde"))],
        )

    before = state()
    for _ in range(2):
        assert demand(cache, SYSTEM + answer("fgh") + "x", [8])
        assert demand(cache, answer("cgh") + "x", [12])
    assert state() == before


def test_a_junction_is_a_loss_of_what_was_never_kept(cache: ModelCache) -> None:
    cache.serve(SYSTEM + answer("cde") + "x")
    assert cache.stats.junctions_pinned == cache.stats.junctions_hit == 0
    cache.lose_surplus()
    lost = len(SYSTEM) - cache.serve(SYSTEM + answer("fgh") + "x")
    assert cache.stats.lost_tokens[LossCause.NEVER_KEPT] == lost
    assert cache.stats.junctions_pinned == 1
    cache.serve(SYSTEM + answer("ijk") + "x")
    assert cache.stats.junctions_hit == 1
    assert sum(cache.stats.lost_tokens.values()) == lost


def test_losses_by_eviction(cache: ModelCache) -> None:
    cache.serve(SYSTEM + "x")
    cache.evict_everything()
    cache.lose_surplus()
    cache.serve(SYSTEM + "xy")
    assert cache.stats.lost_tokens == {
        **dict.fromkeys(LossCause, 0),
        LossCause.EVICTED: len(SYSTEM),
    }


def test_losses_to_the_granularity_of_hits() -> None:
    """Full attention finds one more block of 2 tokens. Hits of 4 tokens cannot use this block."""
    cache = ModelCache((GroupGeometry(FULL, 2), GroupGeometry(WINDOW, 4, 5)), 100)
    cache.serve("aaaabbbbaaaacccc" + "x")
    cache.serve("aaaabbbbaabbcccc" + "x")
    assert cache.stats.lost_tokens[LossCause.GRANULARITY] == 2


def test_losses_to_look_ahead() -> None:
    cache = make_cache(use_eagle=True)
    cache.serve(SYSTEM + answer("cde") + "x")
    cache.serve(SYSTEM + answer("fgh") + "x")
    assert cache.stats.lost_tokens[LossCause.LOOK_AHEAD] == 4


@settings(max_examples=60)
@given(
    prompts=st.lists(
        st.lists(st.sampled_from("aab"), min_size=1, max_size=6), min_size=2, max_size=8
    ),
    num_blocks=st.sampled_from([20, 40, 400]),
    use_eagle=st.booleans(),
)
def test_losses_add_up(prompts: list[list[str]], num_blocks: int, use_eagle: bool) -> None:
    """Lost tokens were computed before. If a token is still cached, it is hit or lost."""
    cache = make_cache(num_blocks, use_eagle)
    seen: list[str] = []
    for prompt in prompts:
        text = spelled(prompt)
        probe = cache.request("", text)
        group = cache.retention.full_groups[0]
        cached_blocks = 0
        while cache.pool.find(probe, group, cached_blocks) is not None:
            cached_blocks += 1
        cached_tokens = 4 * cached_blocks
        before = sum(cache.stats.lost_tokens.values())
        hit_tokens = cache.serve(text)
        lost = sum(cache.stats.lost_tokens.values()) - before
        if num_blocks == 400:  # A smaller pool may evict cached blocks during the admission.
            assert lost >= cached_tokens - hit_tokens
        shared = max((common(text, other) for other in seen), default=0)
        assert hit_tokens + lost <= shared
        seen.append(text)


def boundaries(cache: ModelCache) -> set[int]:
    return {node["boundary_tokens"] for node in inspection.describe(cache.cache_state)}


def common(text: str, other: str) -> int:
    length = 0
    while length < min(len(text), len(other)) and text[length] == other[length]:
        length += 1
    return length


def test_what_a_preempted_request_did_not_compute_is_forgotten(cache: ModelCache) -> None:
    request = ModelRequest("r", SYSTEM + "x", [8, 12])
    cache.step(request, 9)
    assert boundaries(cache) >= {8}
    cache.step(request, 8)
    request.num_computed_tokens = 9
    cache.preempt(request)
    assert max(boundaries(cache)) == 8
    assert cache.hit_tokens(SYSTEM, len(SYSTEM)) == 8


def test_of_two_copies_of_the_same_content_checkpoints_need_one(cache: ModelCache) -> None:
    """Two requests compute the same tokens at once.

    The blocks of the second request are surplus.
    """
    first, second = (ModelRequest(name, SYSTEM + "x") for name in ("r1", "r2"))
    cache.step(first, 2)
    cache.step(second, 2)
    cache.step(first, 20)
    cache.step(second, 20)
    cache.finish(first)
    cache.finish(second)
    needed = [
        b._block_hash
        for b in cache.pool.blocks
        if inspection.num_needs(cache.cache_state, b.block_id)
    ]
    assert needed and len(needed) == len(set(needed))


def test_unusable_hints_are_reported_when_the_request_is_admitted(
    cache: ModelCache, caplog: pytest.LogCaptureFixture
) -> None:
    request = ModelRequest("r", SYSTEM + "x", [-1, 8])
    state = cache.state_of(request.text)
    for _ in range(3):
        cache.retention._find_demand(state, request, 0)
    assert not caplog.records, "hints were reported before the admission"
    cache.step(request, 4)
    cache.step(request, 30)
    cache.retention._find_demand(state, request, 0)
    assert len(caplog.records) == 1


@pytest.mark.parametrize(
    ("shared_lengths", "evicted_tokens", "expected"),
    [
        ([], 0, {}),
        ([], 24, {24: Origin.WANTED}),
        ([(22, 2)], 0, {20: Origin.JUNCTION}),
        ([(20, 4)], 20, {20: Origin.WANTED}),
        ([(8, 4)], 0, {}),
        ([(24, 4), (16, 16)], 0, {24: Origin.JUNCTION}),
        ([(40, 4), (16, 16)], 0, {16: Origin.JUNCTION}),
    ],
    ids=[
        "nothing",
        "evicted",
        "shared",
        "evicted and shared",
        "no more than hit",
        "large blocks tell less",
        "blocks were lost",
    ],
)
def test_demand_follows_from_lengths(
    shared_lengths: list[tuple[int, int]], evicted_tokens: int, expected: dict[int, Origin]
) -> None:
    geometry = HitGeometry((GroupGeometry(FULL, 4), GroupGeometry(WINDOW, 4, 5)), 4)
    request = ModelRequest("r", "a" * 60)
    found = find_demand(request, geometry, 8, shared_lengths, evicted_tokens)
    assert {tokens: reason.origin for tokens, reason in found.boundaries.items()} == expected
    assert all(reason == Reason(reason.origin) for reason in found.boundaries.values())
