# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vllm-ascend-kvext project
"""Engines share a folder, but have different weights of one model: they share no KV.

Each engine answers as an engine without this package and with the same weights. A control shows
that KV of other weights would change answers.
"""

from __future__ import annotations

import shutil
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest
from support.connector.shared_objects import objects
from support.scenarios import processes
from support.scenarios.answers import LOGPROB_TOLERANCE, Served
from support.scenarios.connector import SHARED_LENGTHS
from support.scenarios.processes import CPU, NO_PREFIX_CACHING, PLUGIN_OFF, TWO_CPUS, Plan

LABELS = ("shared", "shared, again")
HITS = [(length - 1) // CPU.block_tokens * CPU.block_tokens for length in SHARED_LENGTHS]
SEED = {"PYTHONHASHSEED": "0"}


class Weights:
    """Two folders of a model, each with weights of its own, and an empty tier for their engines."""

    def __init__(self, model: Path, folders: pytest.TempPathFactory) -> None:
        self._folders = folders
        self.model, self.others = (
            shutil.copytree(model, folders.mktemp("model") / "model") for _ in range(2)
        )
        self.path = self.model / "model.safetensors"
        write_others(self.others / "model.safetensors")
        self.tier = folders.mktemp("tier")

    def plan(
        self,
        scenario: str = "shared",
        replaced: str | None = None,
        model: Path | None = None,
        **engine: Any,
    ) -> Plan:
        """An engine that uses the tier, answers and ends."""
        url = {"shared_tier": f"file://{self.tier}", "store_policy": "all"}
        return Plan(
            model or self.model,
            (scenario,),
            "replaced_weights",
            processes.connector(**url) | NO_PREFIX_CACHING | engine,
            {"replaced": replaced, "replaced_by": str(self.others / "model.safetensors")},
        )

    def serve(self, environ: Mapping[str, str] = SEED, **plans: Plan) -> dict[str, Served]:
        """The reports, by name of a plan. If a plan fails, its report has an error."""
        return dict(processes.serve(self._folders, plans, SEED | environ).items())


def write_others(path: Path) -> None:
    """Write weights of the same names, shapes and file size, but with other values."""
    import torch
    from safetensors.torch import load_file, save_file

    num_bytes = path.stat().st_size
    torch.manual_seed(9)
    weights = {
        name: torch.randn_like(weight) * 0.2 if weight.ndim > 1 else weight
        for name, weight in load_file(path).items()
    }
    save_file(weights, path, metadata={"format": "pt"})
    assert path.stat().st_size == num_bytes


@pytest.fixture
def weights(
    model_folder: Callable[[str], Path], tmp_path_factory: pytest.TempPathFactory
) -> Weights:
    return Weights(model_folder("full"), tmp_path_factory)


@pytest.fixture(scope="module")
def references(
    model_folder: Callable[[str], Path], tmp_path_factory: pytest.TempPathFactory
) -> dict[str, Served]:
    """Engines without this package, by weights. They compute everything."""
    weights = Weights(model_folder("full"), tmp_path_factory)
    plans = {
        name: Plan(model, ("shared",), engine=NO_PREFIX_CACHING)
        for name, model in (("mine", weights.model), ("others", weights.others))
    }
    return weights.serve(PLUGIN_OFF, **plans)


def check(served: Served, reference: Served) -> None:
    served.check_equal(reference, LABELS, LOGPROB_TOLERANCE)


def test_kv_of_other_weights_would_change_answers(references: Mapping[str, Served]) -> None:
    """This is the control."""
    error = references["others"].logprob_error("shared", references["mine"])
    assert error > 100 * LOGPROB_TOLERANCE


def check_refused(served: Served, weights: Weights) -> None:
    error = served.report.get("error", "")
    assert "expected files of weights that nobody changes while an engine loads them" in error
    assert f"found {weights.path} changed since" in error and "start the engine again" in error


def test_kv_of_weights_that_are_replaced_while_an_engine_starts_is_never_read(
    weights: Weights, references: Mapping[str, Served]
) -> None:
    """Other weights replace them. Their size and time of modification are the same."""
    first = weights.serve(first=weights.plan(replaced="while it starts"))["first"]
    second = weights.serve(second=weights.plan())["second"]
    check(second, references["others"])
    assert second.hit_tokens("shared") == [0] * len(HITS)
    check_refused(first, weights)


@pytest.mark.main_version
def test_weights_that_are_replaced_are_refused_by_several_workers(weights: Weights) -> None:
    engine = {"tensor_parallel_size": 2, "distributed_executor_backend": "mp"}
    plan = weights.plan(replaced="while it starts", **engine)
    check_refused(weights.serve(TWO_CPUS, first=plan)["first"], weights)
    assert not objects(weights.tier)


@pytest.mark.main_version
def test_weights_of_another_load_format_do_not_meet(
    weights: Weights, references: Mapping[str, Served]
) -> None:
    """One folder has two sets of weights. ``load_format`` chooses one of them."""
    import torch
    from safetensors.torch import load_file

    torch.save(load_file(weights.others / "model.safetensors"), weights.model / "model.pt")
    served = weights.serve(
        first=weights.plan(),
        second=weights.plan(load_format="pt"),
        first_again=weights.plan(),
        second_again=weights.plan(load_format="pt"),
    )
    for name, of in (("first", "mine"), ("second", "others")):
        check(served[name], references[of])
        assert served[name].hit_tokens("shared") == [0] * len(HITS)
        check(served[f"{name}_again"], references[of])
        assert served[f"{name}_again"].hit_tokens("shared") == HITS
    said = next(line for line in served["second"].log.splitlines() if "differs in: " in line)
    assert '"load_format": "pt"}] here' in said and "; weights." in said


def test_kv_of_weights_that_are_loaded_again_is_not_put(
    weights: Weights, references: Mapping[str, Served], tmp_path: Path
) -> None:
    """The engine was not told to reset its connector. The tier has KV of the first weights."""
    first = shutil.copytree(weights.model, tmp_path / "first")
    served = weights.serve(
        reloaded=weights.plan("reloaded", "before it answers"), second=weights.plan(model=first)
    )
    check(served["reloaded"], references["others"])
    check(served["second"], references["mine"])
    assert served["second"].hit_tokens("shared") == [0] * len(HITS)
    assert "not used by this engine any more: a worker has loaded weights" in served["second"].log
