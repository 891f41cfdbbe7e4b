# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vllm-ascend-kvext project
"""KvextConnector beside vLLM-Ascend's own Mooncake connector, in both orders and both roles.

Both connectors have handshakes. The workers of one tell the scheduler side what their pages look
like, and the workers of the other where they can be reached. Below ``AscendMultiConnector`` each
connector must get its own handshake. Nothing is sent to another node: KV is computed here, and is
loaded from host memory.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import pytest
from emulated_plans import connector, pool_of
from support.scenarios.answers import NPU_TOLERANCE, WRONG
from support.scenarios.processes import NO_PREFIX_CACHING, NPU, PLUGIN_OFF, LazyReports, Plan

PORTS = {"before": 23100, "behind": 23200}


class Case(NamedTuple):
    """An engine with two connectors.

    Attributes:
        place: Order of the connectors: KvextConnector is ``before`` or ``behind`` the other one.
        role: Role of the node.
    """

    place: str
    mooncake: str
    model: str
    role: str
    num_devices: int = 1


CASES = {
    "before, prefill node": Case("before", "MooncakeConnectorV1", "full attention", "kv_producer"),
    "behind, prefill node": Case("behind", "MooncakeConnectorV1", "full attention", "kv_producer"),
    "before, decode node": Case("before", "MooncakeHybridConnector", "states", "kv_consumer"),
    "behind, decode node": Case("behind", "MooncakeHybridConnector", "states", "kv_consumer"),
    "two devices": Case("behind", "MooncakeConnectorV1", "full attention", "kv_producer", 2),
}
CONTROL = "zeroed rows"


def engine_of(case: Case) -> dict[str, Any]:
    own = connector()["kv_transfer_config"]
    deployment = {
        name: {"dp_size": 1, "tp_size": case.num_devices} for name in ("prefill", "decode")
    }
    node = {"kv_role": case.role, "kv_port": PORTS[case.place] + 10 * case.num_devices}
    other = node | {
        "kv_connector": case.mooncake,
        "kv_connector_module_path": "support.connector.ascend_mooncake",
        "kv_connector_extra_config": deployment,
    }
    connectors = [own, other] if case.place == "before" else [other, own]
    several = node | {
        "kv_connector": "MultiConnector",
        "kv_load_failure_policy": "recompute",
        "kv_connector_extra_config": {"connectors": connectors, **deployment},
    }
    workers = {"tensor_parallel_size": 2, "distributed_executor_backend": "mp"}
    return {
        "kv_transfer_config": several,
        "enable_prefix_caching": True,
        # vLLM's logger of a MultiConnector cannot read in this process what connectors report.
        "disable_log_stats": True,
        **pool_of(case.model),
        **(workers if case.num_devices > 1 else {}),
    }


def scenarios_of(case: Case) -> Sequence[str]:
    """Scenarios of a case. The test cannot damage KV of workers in other processes."""
    return ("turns", "damage") if case.num_devices == 1 else ("turns",)


@pytest.fixture(scope="module")
def served(
    folder_of: Callable[[str], Path], tmp_path_factory: pytest.TempPathFactory
) -> LazyReports:
    """Reports by case, and by ``reference, MODEL``."""
    started: list[tuple[Mapping[str, str], dict[str, Plan]]] = []
    for model in dict.fromkeys(case.model for case in CASES.values()):
        engine = pool_of(model) | NO_PREFIX_CACHING
        plan = Plan(folder_of(model), ("turns", "damage"), engine=engine)
        started.append((PLUGIN_OFF, {f"reference, {model}": plan}))
    for name, case in CASES.items():
        plan = Plan(folder_of(case.model), scenarios_of(case), engine=engine_of(case))
        started.append(({}, {name: plan}))
    return LazyReports(tmp_path_factory, started, NPU)


@pytest.mark.parametrize("name", CASES)
def test_answers_are_those_without_connectors(
    served: LazyReports, record_property: Any, name: str
) -> None:
    case = CASES[name]
    found = served[name]
    reference = served[f"reference, {case.model}"]
    damaged = [label for label in found.labels if label.startswith(("zeroed", "swapped"))]
    right = [label for label in found.labels if label not in damaged]
    largest = found.check_equal(reference, right, NPU_TOLERANCE)
    record_property("largest error", largest)
    assert sum(found.hit_tokens("warm")) > 0, "hits of host memory"
    found.check_nothing_is_left()
    if case.num_devices == 1:
        assert found.logprob_error(CONTROL, reference) > WRONG, "what is loaded is read"
