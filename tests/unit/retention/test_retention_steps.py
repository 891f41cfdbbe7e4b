# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vllm-ascend-kvext project
"""The beginning, work and end of a step: the results, their order, and the effects of errors."""

from __future__ import annotations

from typing import Any

import pytest
from support.retention import inspection
from unit.retention.small_cache import (
    FULL,
    LAYOUTS,
    NULL,
    STATE,
    WINDOW,
    ModelBlock,
    ModelCache,
    ModelKeyTable,
    ModelManager,
    ModelRequest,
    spelled,
)

from vllm_ascend_kvext._native import RetainedRequest
from vllm_ascend_kvext.prefix_cache.keys import GroupKeys
from vllm_ascend_kvext.retention.checkpoint_retention import CheckpointRetention
from vllm_ascend_kvext.retention.geometry import GroupGeometry
from vllm_ascend_kvext.retention.reasons import Origin

TEXT = spelled("abcdef")


class RefusedError(Exception):
    """The error that the caching of a run raises in these tests."""


def make_cache(layout: str = "full and window", has_events: bool = True) -> ModelCache:
    """Make a cache.

    With events, upstream's functions cache every run, and all runs are reported.
    """
    return ModelCache(layout, 60, has_events=has_events, is_upstreams=True)


def give_blocks(cache: ModelCache, text: str = TEXT) -> ModelRequest:
    request = cache.request("r", text)
    for manager in cache.managers:
        manager.extend("r", len(text))
    return request


def admit(cache: ModelCache, text: str = TEXT) -> tuple[ModelRequest, RetainedRequest]:
    """A request with blocks for all of its text. None of the blocks is cached."""
    request = give_blocks(cache, text)
    return request, cache.retention._admit(request, None)


def begin(cache: ModelCache, request: ModelRequest, state: RetainedRequest) -> Any:
    key_table = cache.pool.cached_block_hash_to_block
    return state.begin_step(key_table, len(request.text), request.num_tokens)


def cached_blocks(cache: ModelCache) -> list[list[int]]:
    """The cached blocks of the request, per group."""
    return [
        [index for index, block in enumerate(manager.req_to_blocks["r"]) if block._block_hash]
        for manager in cache.managers
    ]


def planned_reasons(cache: ModelCache, text: str, hints: object = None) -> dict[int, Any]:
    """Origin and rung of each checkpoint that a prompt leaves, by its tokens."""
    cache.start(text, hints)
    nodes = inspection.describe(cache.cache_state)
    return {node["boundary_tokens"]: node["reason"][:2] for node in nodes if node["tail"]}


def test_a_prompt_leaves_rungs_and_what_it_names_goes_before_them() -> None:
    text = spelled("abcdefghij" * 2)
    rungs = {80 - (4 << rung): (Origin.LADDER, rung) for rung in range(5)}
    expected = {80: (Origin.PROMPT, 0), 32: (Origin.GRID, 0)} | rungs
    cache = ModelCache("full and window", 200)
    assert cache.retention.policy.grid_tokens == 32
    assert planned_reasons(cache, text) == expected
    hinted = planned_reasons(ModelCache("full and window", 200), text, [72, 30])
    assert hinted == expected | {72: (Origin.HINT, 0), 28: (Origin.HINT, 0)}


def test_rungs_that_are_not_worth_trying_are_left_out() -> None:
    text = spelled("abcdefghij" * 2)
    cache = ModelCache("full and window", 200)
    rates = inspection.rates_of(cache.cache_state)
    for _ in range(100):
        rates.count_eviction((Origin.LADDER, 1, 0))
        rates.count_eviction((Origin.GRID, 0, 0))
    found = planned_reasons(cache, text)
    assert 72 not in found and found[76] == (Origin.LADDER, 0)
    assert (Origin.GRID, 0) not in found.values()


@pytest.mark.parametrize("layout", ["full and window", "two full, two windows"])
def test_an_answer_changes_nothing_and_is_given_again(layout: str) -> None:
    cache = make_cache(layout)
    request, state = admit(cache)
    runs = begin(cache, request, state)
    assert runs == begin(cache, request, state) and len(runs) == len(LAYOUTS[layout])
    assert not any(cached_blocks(cache))
    assert not any(manager.num_cached_block for manager in cache.managers)
    assert not inspection.describe(cache.cache_state)


def test_runs_of_sparse_groups_come_first_and_those_of_others_end_at_the_boundary() -> None:
    cache = make_cache("two full, two windows")
    request, state = admit(cache, spelled("abcdef") + "yyyy")
    # The windows have blocks of 2 and 4 tokens, and full attention has blocks of 4. A request that
    # resumes computes the last of 29 tokens again, so its boundary is at 28.
    assert begin(cache, request, state) == [(0, 0, 14), (1, 0, 7), (2, 0, 7), (3, 0, 7)]


def test_a_boundary_at_the_very_end_waits_for_the_next_token() -> None:
    cache = make_cache()
    request, state = admit(cache, TEXT[:24])
    # A preempted request computes its last token again, so it cannot hit at 24 tokens.
    assert begin(cache, request, state) == [(0, 0, 6), (1, 0, 5)]
    request.text += "g"
    assert begin(cache, request, state) == [(0, 0, 6), (1, 0, 6)]


def test_a_boundary_whose_state_was_not_left_is_not_passed() -> None:
    cache = make_cache("full and state")
    request = cache.request("r", TEXT)
    key_table = cache.pool.cached_block_hash_to_block
    for num_tokens, runs in ((25, []), (24, [(0, 5, 6), (1, 0, 6)])):
        # A step leaves a state in the block of its last token.
        for manager in cache.managers:
            manager.req_to_blocks.pop("r", None)
            manager.extend("r", num_tokens)
        state = cache.retention._admit(request, None)
        assert state.begin_step(key_table, num_tokens, request.num_tokens) == runs


@pytest.mark.parametrize("has_events", [False, True], ids=["quiet", "events"])
def test_upstreams_books_say_how_far_groups_are_cached(has_events: bool) -> None:
    cache = make_cache("two full, two windows", has_events)
    request = give_blocks(cache)
    cache.retention.cache(request, 11)
    # Full attention is cached up to the boundary at 8 tokens. A window is cached up to its last
    # full block.
    assert [manager.num_cached_block for manager in cache.managers] == [
        {"r": 2},
        {"r": 2},
        {"r": 5},
        {"r": 2},
    ]
    cache.retention.cache(request, len(TEXT))
    found = [manager.num_cached_block["r"] for manager in cache.managers]
    assert found == [6, 6, 12, 6] == list(map(len, cached_blocks(cache)))


def test_runs_end_at_nulls_and_at_cached_blocks() -> None:
    cache = make_cache()
    request, state = admit(cache)
    full, window = cache.managers
    cache.pool.cache(request, window.group, range(1, 2))
    window.req_to_blocks["r"][3] = NULL
    cache.pool.cache(request, full.group, range(2, 3))
    runs = begin(cache, request, state)
    assert runs == [(0, 0, 1), (0, 2, 3), (0, 4, 6), (1, 0, 2), (1, 3, 6)]


def test_runs_of_quiet_groups_are_cached_without_upstreams_functions() -> None:
    """Steps with states are not quiet, because upstream keeps more records of states."""
    cache = ModelCache(
        (GroupGeometry(FULL, 4), GroupGeometry(WINDOW, 4, 9), GroupGeometry(STATE, 4)),
        60,
        is_upstreams=True,
    )
    request = cache.request("r", TEXT)
    for manager in cache.managers:
        manager.extend("r", 24)
    state = cache.retention._admit(request, None)
    key_table = cache.pool.cached_block_hash_to_block
    assert state.begin_step(key_table, 24, request.num_tokens) == [(1, 5, 6)]
    for _ in range(2):
        state.cache_quiet_runs(key_table)
        assert cached_blocks(cache) == [[0, 1, 2, 3, 4, 5], [0, 1, 2, 3, 4, 5], []]
    assert not cache.pool.reported


def test_a_step_whose_quiet_runs_are_not_cached_is_not_settled() -> None:
    cache = make_cache(has_events=False)
    request, state = admit(cache)
    key_table = cache.pool.cached_block_hash_to_block
    assert begin(cache, request, state) == []
    for end in (state.end_step, state.end_last_step):
        with pytest.raises(RuntimeError, match="cached"):
            end(key_table)
    assert not any(manager.num_cached_block for manager in cache.managers)
    cache.retention.cache(request, len(TEXT))
    assert cached_blocks(cache) == [[0, 1, 2, 3, 4, 5]] * 2


def test_quiet_runs_of_blocks_that_have_gone_are_refused() -> None:
    cache = make_cache(has_events=False)
    request, state = admit(cache)
    begin(cache, request, state)
    blocks = cache.managers[0].req_to_blocks["r"]
    del blocks[3:]
    with pytest.raises(IndexError, match="the step began with"):
        state.cache_quiet_runs(cache.pool.cached_block_hash_to_block)


def test_a_foreign_manager_is_asked_for_its_whole_range_at_once() -> None:
    cache = ModelCache("full and window", 60, is_upstreams=False)
    request, state = admit(cache)
    cache.pool.cache(request, cache.managers[0].group, range(2, 3))
    assert begin(cache, request, state) == [(1, 0, 6)]


@pytest.mark.parametrize(("is_settled", "computed_tokens"), [(False, 17), (True, 20)])
def test_a_foreign_manager_is_asked_about_tokens_that_are_settled(
    monkeypatch: pytest.MonkeyPatch, is_settled: bool, computed_tokens: int
) -> None:
    cache = ModelCache("full and window", 60, is_upstreams=False)
    request, _ = admit(cache)
    request.num_output_placeholders = 3
    asked: list[int] = []

    def note(manager: ModelManager, num_tokens: int) -> int:
        asked.append(num_tokens)
        return 0

    monkeypatch.setattr(ModelManager, "get_num_skipped_tokens", note)
    assert cache.retention.before_skip("r", 20, is_settled) == computed_tokens
    assert asked == [computed_tokens]


@pytest.mark.parametrize("has_events", [False, True], ids=["quiet", "events"])
def test_a_foreign_manager_caches_its_full_attention_blocks_itself(
    monkeypatch: pytest.MonkeyPatch, has_events: bool
) -> None:
    cache = ModelCache("full and window", 60, has_events=has_events, is_upstreams=False)
    cached: list[tuple[int, int]] = []
    cache_blocks = ModelManager.cache_blocks

    def note(manager: ModelManager, request: ModelRequest, num_tokens: int) -> None:
        cached.append((manager.kv_cache_group_id, num_tokens))
        cache_blocks(manager, request, num_tokens)

    monkeypatch.setattr(ModelManager, "cache_blocks", note)
    cache.retention.cache(give_blocks(cache), len(TEXT))
    assert cached == [(0, 24)]
    assert cached_blocks(cache) == [[0, 1, 2, 3, 4, 5]] * 2


class StoppingTable(ModelKeyTable):
    """A table that raises an error when more than ``num_blocks`` blocks are cached.

    Its dict is of another type, so the compiled module has to ask the table.
    """

    num_blocks = 0

    def __init__(self) -> None:
        self._cache = type("SomeDict", (dict,), {})()

    def insert(self, key: bytes, block: ModelBlock) -> None:
        if not self.num_blocks:
            raise RefusedError
        self.num_blocks -= 1
        super().insert(key, block)


@pytest.mark.parametrize("has_events", [False, True], ids=["quiet", "events"])
@pytest.mark.parametrize("num_cached", [0, 1, 5, 13, 29])
def test_a_step_that_raises_leaves_nothing_settled_and_is_done_again(
    has_events: bool, num_cached: int
) -> None:
    """Blocks that were cached before the error are not cached a second time."""
    layout = "two full, two windows"
    cache, expected = make_cache(layout, has_events), make_cache(layout, has_events)
    expected.retention.cache(give_blocks(expected), len(TEXT))
    request = give_blocks(cache)
    table = cache.pool.cached_block_hash_to_block = StoppingTable()
    table.num_blocks = num_cached
    with pytest.raises(RefusedError):
        cache.retention.cache(request, len(TEXT))
    assert len(table._cache) == num_cached
    assert not inspection.describe(cache.cache_state), "something is kept of a step that has failed"
    assert not any(manager.num_cached_block for manager in cache.managers)
    table.num_blocks = 100
    # Upstream gives a block its hash before it asks the table.
    for block in cache.pool.blocks:
        if has_events and block._block_hash not in table._cache:
            block._block_hash = None
    cache.retention.cache(request, len(TEXT))
    assert cached_blocks(cache) == cached_blocks(expected)
    assert sorted(table._cache) == sorted(expected.pool.cached_block_hash_to_block._cache)
    assert sorted(cache.pool.reported) == sorted(expected.pool.reported)
    assert inspection.describe(cache.cache_state) == inspection.describe(expected.cache_state)
    assert [manager.num_cached_block for manager in cache.managers] == [
        manager.num_cached_block for manager in expected.managers
    ]


def test_a_release_that_raises_leaves_the_request_as_it_was(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    cache = make_cache()
    request = cache.start(TEXT)
    request.finished = True
    state = cache.retention._request_states[request.request_id]

    def refuse(*_arguments: object) -> None:
        raise RefusedError

    with monkeypatch.context() as patched:
        patched.setattr(CheckpointRetention, "_cache_runs", refuse)
        with pytest.raises(RefusedError):
            cache.retention.release(request)
    assert state.holds_blocks
    cache.check()
    cache.finish(request)
    assert not state.holds_blocks and not cache.retention._request_states
    cache.check()
    assert cache.serve(TEXT) == 24


def test_a_step_that_was_not_begun_is_not_ended() -> None:
    cache = make_cache()
    request, state = admit(cache)
    key_table = cache.pool.cached_block_hash_to_block
    state.end_step(key_table)
    assert state.end_last_step(key_table) == []
    assert state.holds_blocks and state.next_event_tokens == 0
    runs = begin(cache, request, state)
    cache.retention._cache_runs(request, state, key_table, runs)
    state.end_step(key_table)
    described = inspection.describe(cache.cache_state)
    state.end_step(key_table)
    assert described and inspection.describe(cache.cache_state) == described
    runs = state.begin_last_step(key_table, len(TEXT), len(TEXT))
    cache.retention._cache_runs(request, state, key_table, runs)
    state.end_last_step(key_table)
    counts = cache.cache_state.counts()
    assert state.end_last_step(key_table) == []
    assert cache.cache_state.counts() == counts


@pytest.mark.parametrize("group_id", [3, 0x0102, 0x01020304])
def test_keys_end_with_the_group_id(group_id: int) -> None:
    cache = make_cache()
    window = cache.managers[1]
    window.kv_cache_group_id = group_id
    retention = CheckpointRetention(
        cache.retention.policy, (window.group,), cache.retention.full_groups, cache.pool
    )
    cache.retention = retention
    request = give_blocks(cache)
    retention.cache(request, len(TEXT))
    keys = GroupKeys.of_group(group_id, 1)
    found = [block._block_hash for block in window.req_to_blocks["r"][:6]]
    assert found == keys.of(request.block_hashes, range(6))
    assert all(key in cache.pool.cached_block_hash_to_block._cache for key in found)


def test_each_foreign_manager_says_how_far_its_own_window_has_moved(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    cache = ModelCache("two full, two windows", 100, is_upstreams=False)
    request = give_blocks(cache)
    cache.retention.cache(request, len(TEXT))

    def skip(manager: ModelManager, _num_tokens: int) -> int:
        return 24 if manager is cache.managers[3] else 0

    monkeypatch.setattr(ModelManager, "get_num_skipped_tokens", skip)
    cache.retention.before_skip("r", len(TEXT))
    leaves = cache.managers[3].req_to_blocks["r"][5]
    state = cache.retention._request_states["r"]
    assert inspection.held_blocks(state) == [leaves.block_id]


@pytest.mark.parametrize(("extra_tokens", "num_held"), [(0, 1), (4, 0)])
def test_a_window_keeps_tokens_that_drafts_may_have_computed_again(
    monkeypatch: pytest.MonkeyPatch, extra_tokens: int, num_held: int
) -> None:
    monkeypatch.setattr(ModelManager, "extra_retained_tokens", extra_tokens, raising=False)
    cache = make_cache()
    cache.retention.cache(give_blocks(cache), len(TEXT))
    cache.retention.before_skip("r", 29)
    state = cache.retention._request_states["r"]
    assert len(inspection.held_blocks(state)) == num_held
