# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vllm-ascend-kvext project
"""States that steps cache inside blocks, and the answers computed from these states.

Steps have 80 tokens, which is less than a block of 128; or a connector reads KV, and vLLM-Ascend
0.30 then ends steps anywhere. Answers must be the answers without prefix caching.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from emulated_plans import IS_0_23, connector, pool_of
from support.scenarios.answers import NPU_TOLERANCE, WRONG
from support.scenarios.processes import NO_PREFIX_CACHING, NPU, PLUGIN_OFF, LazyReports, Plan

ENGINE = {"enable_prefix_caching": True, "max_num_batched_tokens": 512, **pool_of("states")}
SHORT_STEPS = {**ENGINE, "long_prefill_token_threshold": 80}
CONNECTED = {**ENGINE, "max_num_batched_tokens": 200, **connector(store_policy="never")}
WITHOUT = {"VLLM_ASCEND_KVEXT_DISABLE": "aligned-steps"}


@pytest.fixture(scope="module")
def served(
    folder_of: Callable[[str], Path], tmp_path_factory: pytest.TempPathFactory
) -> LazyReports:
    folder = folder_of("states")

    def plan(engine: dict[str, Any], scenario: str = "branches") -> Plan:
        return Plan(folder, [scenario], "state_steps", engine)

    uncached = {**ENGINE, **NO_PREFIX_CACHING}
    processes = [
        (PLUGIN_OFF, {"reference": plan(uncached)}),
        ({}, {"short steps": plan(SHORT_STEPS), "connector": plan(CONNECTED)}),
        ({}, {"short steps past blocks": plan(SHORT_STEPS, "branches_past_blocks")}),
        (WITHOUT, {"connector, without the repair": plan(CONNECTED)}),
    ]
    return LazyReports(tmp_path_factory, processes, NPU)


@pytest.mark.parametrize("name", ["short steps", "connector"])
def test_what_follows_a_cached_state_is_right(
    served: LazyReports, record_property: Any, name: str
) -> None:
    found = served[name]
    reference = served["reference"]
    record_property("largest error", found.check_equal(reference, found.labels, NPU_TOLERANCE))
    assert sum(hit > 0 for hit in found.hit_tokens("branches")) >= 3
    found.check_nothing_is_left()


@pytest.mark.skipif(not IS_0_23, reason="vLLM 0.30 itself ends steps with their blocks")
def test_a_state_from_within_its_block_is_seen(served: LazyReports) -> None:
    found = served["short steps past blocks"]
    assert found.logprob_error("branches", served["reference"]) > WRONG


@pytest.mark.skipif(IS_0_23, reason="it aligns steps with every connector")
def test_vllm_ascend_0_30_caches_wrong_states_where_a_connector_reads(served: LazyReports) -> None:
    found = served["connector, without the repair"]
    assert found.logprob_error("branches", served["reference"]) > WRONG
