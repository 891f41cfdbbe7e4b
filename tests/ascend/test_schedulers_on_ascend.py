# SPDX-License-Identifier: Apache-2.0
"""Which of vllm-ascend's schedulers can meet holes: what docs/tested_on_ascend.md says."""

from __future__ import annotations

import importlib
import json
import sys
from dataclasses import replace
from types import ModuleType

import pytest
from npu_platform import Start
from support.serve_lines import ServeLine

PROFILING = {"profiling_chunk_config": {"enabled": True}}
RECOMPUTE = {"recompute_scheduler_enable": True}
NEEDS_STAGES = "profiling_chunk_config requires pipeline parallelism (pp > 1)"
NEEDS_CONSUMER = "recompute_scheduler_enable can only be enabled on PD-disaggregated D nodes"


def line_with(additional: dict[str, object], role: str = "kv_both") -> ServeLine:
    transfer = {
        "kv_connector": "KvextConnector",
        "kv_role": role,
        "kv_load_failure_policy": "recompute",
        "kv_connector_extra_config": {"host_memory_gib": 1},
    }
    options = ["--kv-transfer-config", json.dumps(transfer)]
    options += ["--additional-config", json.dumps(additional)]
    return ServeLine("", {}, ("MODEL", *options))


def test_balance_scheduling_works_with_the_connector(start_on_npu: Start) -> None:
    line = line_with({"enable_balance_scheduling": True})
    synchronous = replace(line, arguments=(*line.arguments, "--no-async-scheduling"))
    started = start_on_npu(synchronous)
    assert started.report, started.log[-4000:]
    assert started.report["scheduler"] == "BalanceScheduler"
    assert started.report["connector"] == "KvextConnector"


@pytest.mark.parametrize(
    ("line", "message"),
    [
        pytest.param(line_with(PROFILING), NEEDS_STAGES, id="profiling-chunk"),
        pytest.param(line_with(RECOMPUTE), NEEDS_CONSUMER, id="recompute with kv_both"),
        pytest.param(
            line_with(RECOMPUTE, role="kv_consumer"),
            "KvextConnector: expected kv_role kv_both, found kv_consumer",
            id="recompute with kv_consumer",
        ),
    ],
)
def test_other_schedulers_do_not_start_beside_the_connector(
    line: ServeLine, message: str, start_on_npu: Start
) -> None:
    started = start_on_npu(line)
    assert not started.report
    assert message in started.log, started.log[-4000:]


def test_dynamic_batch_cannot_be_constructed_as_vllm_does(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "pandas", ModuleType("pandas"))  # it may be missing
    module = importlib.import_module("vllm_ascend.core.scheduler_dynamic_batch")
    with pytest.raises(TypeError, match="unexpected keyword argument 'hash_block_size'"):
        module.SchedulerDynamicBatch(
            vllm_config=None,
            kv_cache_config=None,
            structured_output_manager=None,
            include_finished_set=False,
            log_stats=False,
            block_size=16,
            hash_block_size=16,
        )
