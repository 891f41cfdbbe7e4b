# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vllm-ascend-kvext project
"""Host tiers that are compared get equal bytes, and run on vLLM's real scheduler."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
from support.connector.offload_run import offloading_installed
from support.upstream_version import IS_SINCE_0_30

if not IS_SINCE_0_30:
    pytest.skip("vLLM's connector that is compared exists since 0.30", allow_module_level=True)

sys.path.append(str(Path(__file__).parents[2] / "benchmarks"))

from host_tier.contenders import PEERS, Contender, Match
from host_tier.engine import Engine
from host_tier.pools import page_bytes
from host_tier.vllm_offloading import OffloadingMemory, without_padding
from host_tier.workloads import write_workload
from retention.layouts import get_layout

from vllm_ascend_kvext.replay.engine import HostMemory

LAYOUTS = ("full", "gemma128", "gptoss128", "mamba")


@pytest.fixture(scope="module", params=LAYOUTS)
def match(request: pytest.FixtureRequest) -> Match:
    return Match(get_layout(request.param), write_workload("chat", 0.25))


def test_vllm_gets_as_many_blocks_as_fit_into_the_bytes(match: Match) -> None:
    block_bytes = max(page_bytes(match.pages))
    host_bytes = 100 * block_bytes + block_bytes // 2
    with without_padding():
        engine = Engine(match.layout, match.num_blocks, OffloadingMemory(host_bytes, False))
    side = engine.scheduler.connector.connector_scheduler
    assert side.manager._num_chunks == 100
    assert side.config.offload_prompt_only
    assert side.config.retention_interval == 0
    assert side.config.tokens_per_hash == match.layout.hash_block_tokens


def test_a_trace_has_no_keys_between_its_hashes(match: Match) -> None:
    """Its requests have no tokens, from which keys within a state's block could be made."""
    host = HostMemory(match.pages, 1 << 30, {}, None, plans=False)
    with offloading_installed():
        side = Engine(match.layout, match.num_blocks, host).side
    assert side is not None
    assert side.tier.geometry.unit_tokens % match.layout.hash_block_tokens == 0


def test_a_tier_holds_no_more_than_its_bytes_and_hits_no_more_than_the_bound(match: Match) -> None:
    endless = match.serve(Contender.ENDLESS)
    host_bytes = match.footprint_bytes // 4
    bound = match.serve(Contender.CLAIRVOYANT, host_bytes, endless.order)
    device = match.serve(Contender.DEVICE)
    assert sorted(endless.order) == list(range(len(match.trace.requests)))
    assert device.hit_rate < bound.hit_rate <= endless.hit_rate + 0.005
    for contender in (*PEERS, Contender.KVEXT):
        served = match.serve(contender, host_bytes)
        assert not served.refused and not served.num_leaks
        assert served.held_bytes <= host_bytes
        assert served.prompt_tokens == match.trace.num_prompt_tokens
        # The order of admissions differs a little, so that requests may find other blocks.
        assert device.hit_rate - 0.02 <= served.hit_rate <= bound.hit_rate + 0.005, contender


def test_enough_memory_is_endless_for_all(match: Match) -> None:
    """What is not hit then is a part of the last unit of a request."""
    endless = match.serve(Contender.ENDLESS)
    contenders = [Contender.LRU, Contender.KVEXT]
    if not match.layout.groups[1:]:
        # By default, vLLM 0.30 stores no windows and no states at the ends of answers.
        contenders.append(Contender.VLLM_ANSWERS)
    for contender in contenders:
        served = match.serve(contender, 1 << 50)
        lost_tokens = endless.hit_tokens - served.hit_tokens
        assert abs(lost_tokens) <= 2 * match.layout.unit_tokens * len(match.trace.requests)
