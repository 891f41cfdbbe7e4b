# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vllm-ascend-kvext project
"""A hit without its state is used only if the connector brings the state."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from vllm_ascend_kvext.patches.repairs.state_hits import StateHits

ALL_GROUPS_TOKENS = 128


class Scheduler:
    """The attributes of a scheduler that `StateHits` reads, and the methods that it wraps."""

    def __init__(self, hits: Any, matched: Any, is_0_23: bool = False) -> None:
        self.hits = hits
        self.matched = matched
        self.asked: list[int] = []
        self.counted: list[int] = []
        self.request = SimpleNamespace(
            request_id="a",
            block_hashes=[],
            num_tokens=900,
            num_preemptions=0,
            skip_reading_prefix_cache=False,
        )
        coordinator = SimpleNamespace(
            full_attention_group_id=0,
            find_longest_cache_hit_per_group=lambda hashes, tokens: ("of attention", self.hits),
        )
        self.kv_cache_manager = SimpleNamespace(
            coordinator=coordinator,
            enable_caching=True,
            log_stats=True,
            create_kv_cache_blocks=lambda computed: computed,
            prefix_cache_stats=SimpleNamespace(
                record=lambda num_hits, **_: self.counted.append(num_hits)
            ),
        )
        if not is_0_23:
            self.kv_cache_manager.record_prefix_cache_stats = None
        self.is_0_23 = is_0_23
        self.connector = SimpleNamespace(get_num_new_matched_tokens=self.ask)
        self.state_hits = StateHits(self)  # type: ignore[arg-type]
        self.connector.get_num_new_matched_tokens = self.ask_through_the_repair
        self.state_hits.brings_states = True

    def ask(self, request: Any, num_computed_tokens: int) -> Any:
        self.asked.append(num_computed_tokens)
        return self.matched

    def ask_through_the_repair(self, request: Any, num_computed_tokens: int) -> Any:
        hits = self.state_hits
        return hits.get_num_new_matched_tokens(self.ask, request, num_computed_tokens)

    def own_lookup(self, request: Any) -> Any:
        found = ("of all", ALL_GROUPS_TOKENS)
        if self.is_0_23:
            self.counted.append(ALL_GROUPS_TOKENS)
            return found
        return *found, 0

    def schedule(self) -> tuple[Any, Any]:
        """Run the lookup, and return what the scheduler learns afterwards."""
        blocks, num_tokens, *_ = self.state_hits.get_computed_blocks(self.own_lookup, self.request)
        matched = self.connector.get_num_new_matched_tokens(self.request, num_tokens)
        return (blocks, num_tokens), matched


LONGER = ("of attention", 640)
ALL = ("of all", ALL_GROUPS_TOKENS)


@pytest.mark.parametrize("is_0_23", [False, True])
def test_a_connector_that_brings_tokens_is_asked_once(is_0_23: bool) -> None:
    scheduler = Scheduler(640 if is_0_23 else (640, 128), (200, True), is_0_23)
    assert scheduler.schedule() == (LONGER, (200, True))
    assert scheduler.asked == scheduler.counted == [640]


@pytest.mark.parametrize("is_0_23", [False, True])
def test_one_that_brings_nothing_is_asked_again_behind_what_all_groups_hit(is_0_23: bool) -> None:
    scheduler = Scheduler(640 if is_0_23 else (640, 128), (0, False), is_0_23)
    assert scheduler.schedule() == (ALL, (0, False))
    assert scheduler.asked == [640, ALL_GROUPS_TOKENS]
    assert scheduler.counted == [ALL_GROUPS_TOKENS]


def test_one_that_does_not_know_yet_is_asked_again_in_the_next_step() -> None:
    scheduler = Scheduler((640, 128), (None, False))
    assert scheduler.schedule()[1] == (None, False)
    scheduler.matched = (0, False)
    assert scheduler.schedule() == (ALL, (0, False))


def test_an_answer_is_not_given_to_another_question() -> None:
    scheduler = Scheduler((640, 128), (200, True))
    scheduler.state_hits.get_computed_blocks(scheduler.own_lookup, scheduler.request)
    scheduler.matched = (7, False)
    other = SimpleNamespace(**{**vars(scheduler.request), "request_id": "b"})
    assert scheduler.connector.get_num_new_matched_tokens(other, 640) == (7, False)
    assert scheduler.connector.get_num_new_matched_tokens(scheduler.request, 640) == (7, False)


@pytest.mark.parametrize("hits", [(128, 640), (128, 128), 0])
def test_a_state_behind_attention_is_of_no_use(hits: Any) -> None:
    scheduler = Scheduler(hits, (200, True), is_0_23=hits == 0)
    assert scheduler.schedule()[0] == ALL
    assert scheduler.asked == [ALL_GROUPS_TOKENS]


@pytest.mark.parametrize("changed", ["skip_reading_prefix_cache", "enable_caching"])
def test_a_request_that_reads_no_cache_hits_nothing_more(changed: str) -> None:
    scheduler = Scheduler((640, 128), (200, True))
    if changed == "enable_caching":
        scheduler.kv_cache_manager.enable_caching = False
    else:
        scheduler.request.skip_reading_prefix_cache = True
    assert scheduler.schedule()[0] == ALL
    assert scheduler.counted == []


def test_a_connector_that_brings_no_states_is_not_asked_for_them() -> None:
    scheduler = Scheduler((640, 128), (200, True))
    scheduler.state_hits.brings_states = False
    assert scheduler.schedule() == (ALL, (200, True))
    assert scheduler.asked == [ALL_GROUPS_TOKENS]
