# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vllm-ascend-kvext project
"""What is stored of answers, on vLLM's real scheduler, with real pages."""

from __future__ import annotations

import random
from typing import NamedTuple

import pytest
from support.connector.engines import engine_of, plan_of
from support.connector.offload_run import serve
from support.connector.offload_workloads import offloading, tokens
from support.connector.paged_layouts import GPT_OSS
from support.connector.simulated_engine import SimulatedEngine
from vllm.v1.request import Request

from vllm_ascend_kvext.store.answers import Seen
from vllm_ascend_kvext.store.prefix import Prefix
from vllm_ascend_kvext.store.recency import Recency
from vllm_ascend_kvext.store.tier import HostTier

pytestmark = pytest.mark.usefixtures("offloading_in_effect")

NUM_TURNS = 4


class Turn(NamedTuple):
    """A request that has ended.

    Attributes:
        stored_tokens: The end of its rows that are stored.
    """

    request: Request
    stored_tokens: int


def converse(
    engine: SimulatedEngine, is_stripped: bool, answer_tokens: int, is_preempted: bool = False
) -> list[Turn]:
    """Serve a conversation.

    Args:
        is_stripped: Whether its prompts leave out what was answered before.
        is_preempted: Whether each request is preempted while it answers.
    """
    rng = random.Random(1)
    prompt = tokens(rng, 90)
    turns = []
    for number in range(NUM_TURNS):
        plan = plan_of(f"turn {number}", prompt, max_tokens=answer_tokens)
        request = engine.add_request(plan)
        if is_preempted:
            while request.num_output_tokens < 2:
                engine.step()
            engine.scheduler.reset_prefix_cache(reset_running_requests=True)
        serve(engine)
        prefix = engine.side._view.prefix(request)
        stored_tokens = engine.side._stores._tier.present_tokens(prefix, prefix.num_tokens)
        turns.append(Turn(request, stored_tokens))
        answer = [] if is_stripped else plan.expected_output()
        prompt = [*prompt, *answer, *tokens(rng, 20)]
    return turns


@pytest.mark.parametrize("is_stripped", [False, True])
def test_boundaries_within_an_answer_are_stored_if_answers_come_back(is_stripped: bool) -> None:
    """A long answer passes boundaries of the grid while it is computed."""
    connector = offloading(GPT_OSS, store_policy="second_touch", host_memory_gib=0.1)
    with engine_of(GPT_OSS, num_blocks=2000, offloading=connector) as engine:
        grid_tokens = engine.side._stores.planner._policy.grid_tokens
        *_, (request, stored_tokens) = converse(engine, is_stripped, grid_tokens + 40)
        unit_tokens = GPT_OSS.unit_tokens
        if is_stripped:
            assert stored_tokens == request.num_prompt_tokens // unit_tokens * unit_tokens
        else:
            assert stored_tokens >= request.num_prompt_tokens + grid_tokens


def test_a_preempted_request_knows_what_its_conversation_showed() -> None:
    connector = offloading(GPT_OSS, store_policy="second_touch", host_memory_gib=0.1)
    with engine_of(GPT_OSS, num_blocks=2000, offloading=connector) as engine:
        *_, (request, _) = converse(engine, True, 40, is_preempted=True)
        assert request.num_preemptions == 1
        latest = next(reversed(engine.side._stores._answers._ended.values()))
        assert latest.conversation == Seen(0, NUM_TURNS - 1)


@pytest.mark.parametrize("is_preempted", [False, True])
@pytest.mark.parametrize("is_stripped", [False, True])
def test_what_a_plain_lru_would_find_of_a_chat_is_noted_once(
    is_stripped: bool, is_preempted: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """All of it fits, so that a plain LRU, an endless tier and this one find the same."""
    compared: list[tuple[int, int, int]] = []
    monkeypatch.setattr(Recency, "note_prompt", lambda _, *found: compared.append(found))
    connector = offloading(GPT_OSS, store_policy="second_touch", host_memory_gib=0.01)
    with engine_of(GPT_OSS, num_blocks=2000, offloading=connector) as engine:
        converse(engine, is_stripped, 40, is_preempted)
    assert len(compared) == NUM_TURNS
    assert compared[0] == (0, 0, 0)
    assert all(0 < known == found == of_tier for known, found, of_tier in compared[1:])


@pytest.mark.parametrize("is_preempted", [False, True])
def test_a_plain_lru_has_what_an_aborted_request_has_computed(
    is_preempted: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    stopped: list[int] = []
    note_stopped = HostTier.note_stopped

    def note(tier: HostTier, prefix: Prefix, end_tokens: int) -> None:
        stopped.append(end_tokens)
        note_stopped(tier, prefix, end_tokens)

    monkeypatch.setattr(HostTier, "note_stopped", note)
    connector = offloading(GPT_OSS, store_policy="second_touch", host_memory_gib=0.01)
    with engine_of(GPT_OSS, num_blocks=2000, offloading=connector) as engine:
        plan = plan_of("aborted", tokens(random.Random(1), 90), max_tokens=40)
        request = engine.add_request(plan)
        while request.num_output_tokens < 2:
            engine.step()
        if is_preempted:
            engine.scheduler.reset_prefix_cache(reset_running_requests=True)
        engine.abort("aborted")
        serve(engine)
        recency = engine.side.tier._order.recency
        assert recency is not None
        prefix = engine.side._view.prefix(request)
        assert recency.num_found(engine.side.tier._cut_keys(prefix, 90)) > 0
    assert len(stopped) == 1
    unit_tokens = GPT_OSS.unit_tokens
    assert 90 // unit_tokens * unit_tokens <= stopped[0] <= 90
