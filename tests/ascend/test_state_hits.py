# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vllm-ascend-kvext project
"""Schedulers of vLLM-Ascend take a hit without its state only where the connector brings the state.

The balance scheduler of 0.30 and the recompute scheduler of 0.23 serve random prompts that begin
alike; a model runner without a model sees what each request reads. A test named ``test_stock_...``
shows vLLM-Ascend on its own. Whole engines are in ``tests/emulated_npu/test_state_hits.py``.
"""

from __future__ import annotations

import random
from types import SimpleNamespace
from typing import Any

import pytest
from pytest_mock import MockerFixture
from support.installed import installed
from support.sample import sampled
from support.scheduler import engine as engines
from support.scheduler import options as engine_options
from support.scheduler.block_manager import BlockManager, Layout, full, mamba
from support.scheduler.connector import ScriptedConnector
from support.scheduler.layouts import MAMBA
from support.scheduler.model_runner import ReadCheck
from support.scheduler.options import EngineOptions, ExternalLoad
from support.scheduler.run import run
from support.scheduler.workload import RequestPlan, Workload
from support.upstream_version import IS_SINCE_0_30

from vllm_ascend_kvext.patches.repairs.state_hits import StateHits

NUM_SEEDS = sampled(40)
NUM_REQUESTS = 8
LOADS = (ExternalLoad.NEVER, ExternalLoad.BETWEEN_STEPS)


@pytest.fixture
def schedulers(monkeypatch: pytest.MonkeyPatch) -> None:
    """Engines get the scheduler that is wrong in this release, and a connector that it can have."""
    if IS_SINCE_0_30:
        from vllm_ascend.patch.platform import patch_balance_schedule as balance

        monkeypatch.setattr(balance, "_balance_scheduling_enabled", lambda config: True)
        assert engines.Scheduler is balance.BalanceScheduler
        assert issubclass(engines.AsyncScheduler, balance.BalanceScheduler)
        # The loaded tokens end with a state.
        monkeypatch.setattr(ScriptedConnector, "supports_divergent_local_hybrid_hits", True)
        return
    from vllm_ascend.core import recompute_scheduler as recompute

    transfer_config_of = engine_options._kv_transfer_config

    def on_a_decode_node(layout: Any, options: EngineOptions) -> Any:
        config = transfer_config_of(layout, options)
        config.kv_role = "kv_consumer"
        return config

    monkeypatch.setattr(engine_options, "_kv_transfer_config", on_a_decode_node)
    monkeypatch.setattr(engines, "Scheduler", recompute.RecomputeScheduler)
    monkeypatch.setattr(engines, "AsyncScheduler", recompute.AsyncRecomputeScheduler)


def workload(seed: int, load: ExternalLoad, is_async: bool) -> Workload:
    """The prompts begin alike and end differently, one after the other."""
    rng = random.Random(seed)

    def tokens(number: int) -> list[int]:
        return [rng.randrange(64) for _ in range(number)]

    shared = tokens(60)
    plans = [
        RequestPlan(
            request_id=f"state-{number}",
            arrival_step=6 * number,
            prompt=tuple(shared[: rng.randrange(9, 60)] + tokens(rng.randrange(1, 20))),
            max_tokens=4,
        )
        for number in range(NUM_REQUESTS)
    ]
    options = EngineOptions(num_blocks=200, external_load=load, is_async=is_async)
    return Workload(name=f"seed {seed}", layout=MAMBA, options=options, requests=tuple(plans))


def wrong_seeds(load: ExternalLoad, is_async: bool) -> tuple[list[int], int]:
    """The seeds in which a request reads or answers wrong; the number of loads of the others."""
    wrong, num_loads = [], 0
    for seed in range(NUM_SEEDS):
        each = workload(seed, load, is_async)
        try:
            result = run(each, read_check=ReadCheck.ALL)
            assert not result.wrong_outputs(each)
        except AssertionError:
            wrong.append(seed)
        else:
            num_loads += result.transcript.counts["external loads"]
    return wrong, num_loads


@pytest.mark.usefixtures("schedulers")
@pytest.mark.parametrize("is_async", [False, True])
def test_stock_goes_on_from_states_that_were_never_computed(is_async: bool) -> None:
    wrong, _ = wrong_seeds(ExternalLoad.NEVER, is_async)
    assert len(wrong) > NUM_SEEDS / 2


@pytest.mark.usefixtures("schedulers")
@pytest.mark.parametrize("is_async", [False, True])
@pytest.mark.parametrize("load", LOADS)
def test_no_request_reads_a_state_that_is_not_its_own(
    mocker: MockerFixture, load: ExternalLoad, is_async: bool
) -> None:
    longer = mocker.spy(StateHits, "_hit_of_attention")
    with installed("state-hits"):
        wrong, num_loads = wrong_seeds(load, is_async)
    assert wrong == []
    assert any(found is not None for found in longer.spy_return_list), "hits without states"
    assert (num_loads > 0) is (load is not ExternalLoad.NEVER)


# The load-balancing scheduler of 0.30 starts with several ranks of a decode node only: its lookup
# is called, on true managers.

BLOCK_TOKENS = 16
TURNS_TOKENS = (5 * BLOCK_TOKENS + 3, 4 * BLOCK_TOKENS + 3)


def load_balanced_hits(brings_states: bool) -> tuple[int, int]:
    """The tokens that the scheduler offers to its connector, and the tokens that all groups hit."""
    from vllm_ascend.core.dyntra_lb_scheduler import DyntraLBScheduler

    world = BlockManager(Layout((full(BLOCK_TOKENS), mamba(BLOCK_TOKENS))), 0)
    longer, shorter = (world.request(range(tokens)) for tokens in TURNS_TOKENS)
    world.prefill(longer, 1024)
    world.finish(longer)
    scheduler = object.__new__(DyntraLBScheduler)
    scheduler.kv_cache_manager = world.manager
    scheduler.connector = SimpleNamespace(supports_divergent_local_hybrid_hits=brings_states)
    _, offered_tokens, *_ = scheduler._get_connector_computed_blocks(shorter)
    return offered_tokens, world.manager.get_computed_blocks(shorter)[1]


@pytest.mark.vllm(">=0.30")
def test_stock_offers_every_connector_a_hit_without_its_state() -> None:
    for brings_states in (True, False):
        offered_tokens, of_all_tokens = load_balanced_hits(brings_states)
        assert offered_tokens == 4 * BLOCK_TOKENS > of_all_tokens


@pytest.mark.vllm(">=0.30")
@pytest.mark.parametrize("brings_states", [True, False])
def test_only_a_connector_that_brings_states_is_offered_one(brings_states: bool) -> None:
    with installed("state-hits"):
        offered_tokens, of_all_tokens = load_balanced_hits(brings_states)
    assert (offered_tokens > of_all_tokens) is brings_states
