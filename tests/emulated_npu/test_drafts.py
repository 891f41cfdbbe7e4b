# SPDX-License-Identifier: Apache-2.0
"""With draft tokens, what comes back from host memory is what is computed without any of it.

vLLM-Ascend's own proposer and rejection sampler run. The reference has neither drafts nor package
nor prefix caching; its greedy tokens are the only right ones, whatever the drafts are.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import cache, partial
from pathlib import Path
from typing import Any

import draft_models
import pytest
import random_models
from emulated_run import run_plans
from test_features import TOLERANCE, WORKLOAD, WRONG, connector

# isort: split
# `test_features` has put their folder on the path.
from connector_workload import HOLES_TOKENS
from served import PLUGIN_OFF, Served

Reports = Callable[[str], Mapping[str, Served]]

MODELS: dict[str, Callable[[Path], dict[str, object]]] = {
    "full attention, EAGLE": partial(
        draft_models.write_with_eagle, make=random_models.full_attention
    ),
    "latent attention, MTP": draft_models.write_with_mtp,
}
SCENARIOS = ("turns", "document", "damage", "holes")
POOL = {"num_gpu_blocks_override": 120}
CROWDED_POOL = {"num_gpu_blocks_override": 24}
"""Too few for the storm."""


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> Reports:
    @cache
    def serve(model: str) -> Mapping[str, Served]:
        folder = tmp_path_factory.mktemp("model")
        drafter = MODELS[model](folder)
        drafts = {
            "speculative_config": {
                **drafter,
                "num_speculative_tokens": draft_models.NUM_DRAFT_TOKENS,
            }
        }
        alone: dict[str, Any] = {"enable_prefix_caching": False, **POOL}
        small = connector(host_memory_gib=1 / 256, swap_on_preemption=True)

        def plan(engine: dict[str, Any], *scenarios: str) -> dict[str, Any]:
            return {"model": str(folder), "engine": engine, "scenarios": scenarios}

        def run(environ: Mapping[str, str], **plans: Any) -> dict[str, Any]:
            return run_plans(WORKLOAD, plans, tmp_path_factory.mktemp("reports"), environ)

        found = run(
            PLUGIN_OFF,
            reference=plan(alone, *SCENARIOS, "storm"),
            drafts=plan(alone | drafts, *SCENARIOS, "storm"),
        ) | run(
            {"VLLM_ASCEND_KVEXT_RETENTION": "adaptive"},
            kvext=plan(connector() | POOL | drafts, *SCENARIOS),
            crowded=plan(small | CROWDED_POOL | drafts, "storm"),
        )
        return {name: Served(report, "") for name, report in found.items()}

    return serve


def counted(served: Served, name: str, beginning: str = "") -> int:
    return sum(
        asked["counted"].get(name, 0)
        for label, asked in served.report["asked"].items()
        if label.startswith(beginning)
    )


def is_wrong_on_purpose(label: str) -> bool:
    return label.startswith(("zeroed rows", "swapped rows"))


@pytest.mark.parametrize("setting", ["drafts", "kvext", "crowded"])
@pytest.mark.parametrize("model", MODELS)
def test_answers_with_drafts_are_those_without(
    served: Reports, report_cell: Any, model: str, setting: str
) -> None:
    reports = served(model)
    found, reference = reports[setting], reports["reference"]
    has_damage = setting == "kvext"
    errors = {label: found.logprob_error(label, reference) for label in found.labels}
    right = {key: error for key, error in errors.items() if not is_wrong_on_purpose(key)}
    control = max(
        reports["kvext"].logprob_error(label, reference)
        for label in ("zeroed rows", "swapped rows")
    )
    checked = right if has_damage else errors
    report_cell(f"drafts: {setting}", model, max(checked.values()), control)
    assert max(checked.values()) <= TOLERANCE, checked
    for label in checked:
        replies = [answer.reply for answer in found.answers(label)]
        assert replies == [answer.reply for answer in reference.answers(label)], label


@pytest.mark.parametrize("model", MODELS)
def test_what_is_wrong_in_host_memory_is_seen(served: Reports, model: str) -> None:
    found, reference = served(model)["kvext"], served(model)["reference"]
    for label in ("zeroed rows", "swapped rows"):
        assert found.logprob_error(label, reference) > WRONG, label


@pytest.mark.parametrize("model", MODELS)
def test_what_host_memory_has_before_lost_chunks_is_loaded_and_no_hole_is_left(
    served: Reports, model: str
) -> None:
    """Beside draft tokens the connector leaves no holes (docs/offload.md)."""
    found = served(model)["kvext"]
    assert counted(found, "hole tokens") == 0
    hits = {name: found.hit_tokens(f"hole: {name}")[0] for name in HOLES_TOKENS}
    assert hits == {name: lost[0][0] for name, lost in HOLES_TOKENS.items()}


@pytest.mark.parametrize("model", MODELS)
def test_drafts_hits_and_preemption_were_met(served: Reports, model: str) -> None:
    reports = served(model)
    assert counted(reports["reference"], "draft tokens") == 0
    for name in ("drafts", "kvext", "crowded"):
        accepted = counted(reports[name], "accepted draft tokens")
        drafted = counted(reports[name], "draft tokens")
        print(f"{model}, {name}: {accepted} of {drafted} draft tokens accepted")
        assert 0.02 * drafted < accepted < drafted
    kvext, crowded = reports["kvext"], reports["crowded"]
    assert sum(kvext.hit_tokens("warm")) > 0 and sum(kvext.hit_tokens("second turn")) > 0
    assert counted(crowded, "preemptions", "storm") > 0
    for report in (kvext, crowded):
        assert set(report.report["left"].values()) == {0}
