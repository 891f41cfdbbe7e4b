# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vllm-ascend-kvext project
"""A KvextConnector below vLLM's MultiConnector: a load fails in part, and blocks are in flight."""

from __future__ import annotations

import copy
import random
from dataclasses import replace
from typing import Any
from unittest import mock

import pytest
from pytest_mock import MockerFixture
from support.connector.engines import fail_next, make_holes, plan_of
from support.connector.offload_run import check_nothing_is_left, serve
from support.connector.offload_workloads import offloading, tokens
from support.connector.paged_layouts import FULL, GEMMA, PagedLayout
from support.connector.scripted_transfers import TransferScript
from support.connector.simulated_engine import SimulatedEngine
from support.connector.stand_ins import NullConnector
from support.scheduler import options as engine_options
from support.scheduler.options import EngineOptions
from vllm.config import KVTransferConfig
from vllm.distributed.kv_transfer.kv_connector.v1.multi_connector import (
    MultiKVConnectorWorkerMetadata,
)

from vllm_ascend_kvext.patches.connector.scheduler import connector_of

pytestmark = pytest.mark.usefixtures("offloading_in_effect")


class MultiEngine(SimulatedEngine):
    """A `SimulatedEngine` behind a MultiConnector."""

    @property
    def side(self) -> Any:
        return connector_of(self.scheduler).scheduler_side

    def _new_runner(self, *args: Any) -> Any:
        config = copy.copy(self.scheduler.vllm_config)
        config.kv_transfer_config = self.scheduler.connector._ktc_kv_transfer_config[0]
        with mock.patch.object(self.scheduler, "vllm_config", config):
            runner = super()._new_runner(*args)
        execute = runner.execute

        def translated(scheduled: Any) -> Any:
            metadata, *others = scheduled.kv_connector_metadata.metadata
            output = execute(replace(scheduled, kv_connector_metadata=metadata))
            found = output.kv_connector_output
            found.kv_connector_stats = None
            if found.kv_connector_worker_meta is not None:
                parts = (found.kv_connector_worker_meta, *(None for _ in others))
                found.kv_connector_worker_meta = MultiKVConnectorWorkerMetadata(parts)
            return output

        runner.execute = translated
        return runner


def one_of_several(layout: Any, options: EngineOptions) -> KVTransferConfig:
    own = {"kv_connector": "KvextConnector", "kv_role": "kv_both"}
    own["kv_connector_extra_config"] = dict(options.offloading or {})
    return KVTransferConfig(
        kv_connector="MultiConnector",
        kv_role="kv_both",
        kv_load_failure_policy="recompute",
        kv_connector_extra_config={"connectors": [own]},
    )


def engine_of_several(
    request: pytest.FixtureRequest, layout: PagedLayout, is_async: bool = False, **offload: Any
) -> MultiEngine:
    options = EngineOptions(
        num_blocks=1200,
        max_num_batched_tokens=256,
        is_async=is_async,
        caching=False,
        events=False,
        offloading=offloading(layout, **offload),
    )
    with mock.patch.object(engine_options, "_kv_transfer_config", one_of_several):
        engine = MultiEngine(layout, options, TransferScript())
    request.addfinalizer(engine.shutdown)
    return engine


def test_one_of_several_connectors_loads_what_can_be_read(
    mocker: MockerFixture, request: pytest.FixtureRequest
) -> None:
    """A single connector loads them, too: see ``test_loads_that_fail_in_part``."""
    prompt = tokens(random.Random(4), 400)
    engine = engine_of_several(request, GEMMA, hole_reuse=False, chunk_tokens=16)
    serve(engine, plan_of("other", prompt[:133], max_tokens=1))
    serve(engine, plan_of("first", prompt, max_tokens=1))
    fail_next(engine, 1, 20)
    before_tokens = engine.side.counters.hit_tokens
    begun = mocker.spy(engine.tier, "begin_load")
    serve(engine, plan_of("second", prompt))
    check_nothing_is_left(engine)
    _, again = (call.args[1] for call in begun.call_args_list)
    assert engine.side.counters.hit_tokens - before_tokens == again


@pytest.mark.vllm(">=0.30")
def test_steps_of_holes_alone_do_not_let_go_of_blocks_in_flight(
    request: pytest.FixtureRequest,
) -> None:
    """Upstream counts steps for connectors whose loads delay no request. Others may be such."""
    prompt = tokens(random.Random(4), 400)
    engine = engine_of_several(request, FULL, is_async=True)
    serve(engine, plan_of("first", prompt, max_tokens=1))
    make_holes(engine, (64, 96))
    serve(engine, plan_of("second", prompt))
    assert engine.side.counters.hole_tokens
    last = engine.add_request(plan_of("last", prompt[:20], max_tokens=20))
    while not last.num_output_tokens:
        engine.step()
    held = {
        block.block_id for blocks in engine.managers[0].req_to_blocks.values() for block in blocks
    }
    assert last.num_in_flight_tokens and held
    engine.abort("last")
    free = {block.block_id for block in engine.block_pool.free_block_queue.get_all_free_blocks()}
    assert not held & free
    serve(engine)
    check_nothing_is_left(engine)


class WithParameters(NullConnector):
    """It answers each request with fields of its own, as connectors between engines do."""

    def request_finished_all_groups(self, request: Any, block_ids: Any) -> Any:
        return False, {"do_remote_prefill": True}


def test_a_request_cannot_end_the_engine_by_asking_what_was_reused(
    request: pytest.FixtureRequest,
) -> None:
    """If two connectors answer, vLLM's MultiConnector raises an error, which ends the engine."""
    engine = engine_of_several(request, FULL)
    connectors = engine.scheduler.connector._connectors
    connectors.append(object.__new__(WithParameters))
    answer = plan_of("asks", tokens(random.Random(4), 100))
    serve(engine, replace(answer, extra_args=(("kvext_explain", True),)))
