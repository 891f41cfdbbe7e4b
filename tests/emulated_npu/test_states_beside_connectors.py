# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vllm-ascend-kvext project
"""States beside a KV connector on vLLM-Ascend 0.30.0rc2: the hits, and whether they are right.

Stock vLLM-Ascend answers wrong where steps end within blocks (``aligned-steps``). A default install
hits at least as many tokens as stock where stock answers right. It answers as an engine without
prefix caching does.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from emulated_plans import IS_0_23, connector
from support.scenarios.answers import NPU_TOLERANCE
from support.scenarios.processes import NO_PREFIX_CACHING, NPU, PLUGIN_OFF, LazyReports, Plan

pytestmark = pytest.mark.skipif(IS_0_23, reason="vLLM's own steps end at blocks there")

HITTING = ("again", "next turn", "sibling")


def foreign(kv_role: str) -> dict[str, Any]:
    module = "support.scenarios.null_connector"
    return {
        "kv_transfer_config": {
            "kv_connector": "NullConnector",
            "kv_connector_module_path": module,
            "kv_role": kv_role,
        }
    }


BESIDE: dict[str, dict[str, Any]] = {
    "no connector": {},
    "kv_both": foreign("kv_both"),
    "kv_producer": foreign("kv_producer"),
    "kv_consumer": foreign("kv_consumer"),
    "ours, never": connector(store_policy="never"),
}
CELLS = [(beside, 512) for beside in ("no connector", "kv_both", "ours, never")]
CELLS += [(beside, 500) for beside in BESIDE]
"""Connectors and tokens per step. No step of 512 tokens ends within a block; some of 500 do.

Cells with longer steps come first, because vLLM-Ascend reserves memory for the steps of the first
engine of a process.
"""


@pytest.fixture(scope="module")
def served(
    folder_of: Callable[[str], Path], tmp_path_factory: pytest.TempPathFactory
) -> LazyReports:
    def plan(step_tokens: int, engine: dict[str, Any]) -> Plan:
        model = partial(folder_of, "states")
        sizes = {"max_num_batched_tokens": step_tokens, "num_gpu_blocks_override": 600}
        caches = {"enable_prefix_caching": True}
        return Plan(model, ["longer_than_a_step"], "models", caches | sizes | engine)

    processes: dict[tuple[str, str], dict[str, Plan]] = {}
    for beside, step_tokens in CELLS:
        for label in ("stock", "default"):
            if label == "stock" and beside == "ours, never":
                continue  # Stock does not have this connector.
            of_process = processes.setdefault((label, beside), {})
            of_process[f"{label}, {beside}, {step_tokens}"] = plan(step_tokens, BESIDE[beside])
    processes["stock", ""] = {"reference": plan(512, NO_PREFIX_CACHING)}
    environ = {"stock": PLUGIN_OFF, "default": {}}
    return LazyReports(
        tmp_path_factory, [(environ[key[0]], plans) for key, plans in processes.items()], NPU
    )


@pytest.mark.parametrize(("beside", "step_tokens"), CELLS)
def test_a_default_install_hits_what_stock_hits_and_answers_right(
    served: LazyReports, beside: str, step_tokens: int
) -> None:
    found = served[f"default, {beside}, {step_tokens}"]
    compared = "kv_both" if beside == "ours, never" else beside
    stock = served[f"stock, {compared}, {step_tokens}"]
    reference = served["reference"]
    for label in HITTING:
        errors = stock.logprob_errors(label, reference)
        hits = zip(stock.hit_tokens(label), found.hit_tokens(label), errors, strict=True)
        assert all(of_stock <= own or error > NPU_TOLERANCE for of_stock, own, error in hits), label
    total = {
        name: sum(sum(each.hit_tokens(label)) for label in HITTING)
        for name, each in (("stock", stock), ("default", found))
    }
    print(f"{beside}, steps of {step_tokens}: {total}")
    found.check_equal(reference, found.labels, NPU_TOLERANCE)


@pytest.mark.parametrize("beside", ["kv_both", "kv_consumer"])
def test_stock_answers_wrong_where_steps_end_within_blocks(
    served: LazyReports, beside: str
) -> None:
    stock = served[f"stock, {beside}, 500"]
    assert stock.logprob_error("first", served["reference"]) <= NPU_TOLERANCE
    assert stock.logprob_error("again", served["reference"]) > NPU_TOLERANCE
