# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vllm-ascend-kvext project
"""Quantized models with retention and KvextConnector: pages come back byte for byte.

An engine without the package answers the same prompts from its own prefix cache. Both resume at the
same tokens, so their answers are equal. With failed copies, holes and drafts they resume elsewhere.
Keys are then read as pages have them in all steps, and attention computes in float64.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import cache
from pathlib import Path
from types import MappingProxyType
from typing import Any, NamedTuple

import draft_models
import pytest
import random_models
from emulated_plans import CROWDED_BLOCKS, IS_0_23, connector, graphs
from quantized_models import (
    quantize_keys,
    quantize_weights,
    quantize_weights_for_both,
    quantize_weights_statically,
)
from support.scenarios.answers import NPU_TOLERANCE, WRONG
from support.scenarios.connector import HOLES_TOKENS
from support.scenarios.processes import (
    ADAPTIVE,
    NO_PREFIX_CACHING,
    NPU,
    PLUGIN_OFF,
    LazyReports,
    Plan,
)

EQUAL = ("first", "again", "returned", "next turn")
HIT_TOKENS = [256, 640, 512]
"""The whole blocks of 128 tokens of the prompts of `support.scenarios.eight_bit_pages`."""
WITH_DRAFTS = ("static weights, EAGLE", "experts, latents, MTP")
"""Models of `MODELS` with a draft layer."""

MODELS: dict[str, tuple[str, Sequence[Callable[[Path], None]]]] = {
    "floats": ("full attention", ()),
    "keys": ("full attention", (quantize_keys,)),
    "weights": ("full attention", (quantize_weights,)),
    "weights and keys": ("full attention", (quantize_weights, quantize_keys)),
    "static weights": ("full attention", (quantize_weights_statically,)),
    "static weights and keys": ("full attention", (quantize_weights_statically, quantize_keys)),
    "static weights, experts, latents": (
        "latent attention, experts",
        (quantize_weights_statically,),
    ),
    "weights for both": ("full attention", (quantize_weights_for_both,)),
    "experts, latents": ("latent attention, experts", (quantize_weights,)),
    "experts, states": ("states", (quantize_weights,)),
    "static weights, EAGLE": ("full attention, EAGLE", (quantize_weights_statically,)),
    "experts, latents, MTP": ("latent attention, MTP", (quantize_weights,)),
}
"""Models of `random_models` and `draft_models`, and what is quantized in them.

The head of EAGLE has floats.
"""
ENGINE = {"enable_prefix_caching": True, "num_gpu_blocks_override": 60}


GRAPHS = graphs("FULL_DECODE_ONLY", 1, 2, 4)


class Case(NamedTuple):
    """An engine with the package.

    Attributes:
        quantized: The model, a key of `MODELS`.
        reference: The model of the engine without the package.
        role: The role of a ``MultiConnector`` around KvextConnector. Empty for none.
        has_graphs: Whether decode steps are graphs. Those of the reference are not.
    """

    quantized: str
    reference: str
    role: str = ""
    has_graphs: bool = False

    @property
    def engine(self) -> dict[str, Any]:
        own = connector() | (GRAPHS if self.has_graphs else {})
        if not self.role:
            return own
        several = {
            "kv_connector": "MultiConnector",
            "kv_role": self.role,
            "kv_load_failure_policy": "recompute",
            "kv_connector_extra_config": {"connectors": [own["kv_transfer_config"]]},
        }
        # vLLM's logger of a MultiConnector cannot read in this process what connectors report.
        return {"kv_transfer_config": several, "disable_log_stats": True}


CASES = {
    "keys": Case("keys", "keys"),
    "weights": Case("weights", "weights"),
    "weights and keys": Case("weights and keys", "weights and keys"),
    "static weights": Case("static weights", "static weights"),
    "static weights and keys": Case("static weights and keys", "static weights and keys"),
    "static weights, experts, latents": Case(
        "static weights, experts, latents", "static weights, experts, latents"
    ),
    "experts, latents": Case("experts, latents", "experts, latents"),
    "experts, states": Case("experts, states", "experts, states"),
    "experts, latents, MTP": Case("experts, latents, MTP", "experts, latents, MTP"),
    # vLLM-Ascend quantizes inputs token by token only if the connector is no consumer.
    "weights for both": Case("weights for both", "static weights"),
    "keys of a decode node": Case("keys", "keys", "kv_consumer"),
    "keys of a prefill node": Case("keys", "floats", "kv_producer"),  # It keeps them as floats.
}
if not IS_0_23:
    CASES |= {f"{name}, graphs": Case(name, name, has_graphs=True) for name in ("weights",)}


LOSSES = ("damage", "failures", "holes")
CONTROLS = ("zeroed rows", "swapped rows", *(f"hole left out: {name}" for name in HOLES_TOKENS))


class Lost(NamedTuple):
    """An engine whose copies fail, whose chunks are lost, or whose requests are preempted.

    Attributes:
        quantized: The model, a key of `MODELS`.
        engine: Arguments of the engine with the package.
        is_exact: Whether attention computes in float64.
    """

    quantized: str
    scenarios: Sequence[str] = LOSSES
    engine: Mapping[str, Any] = MappingProxyType({})
    is_exact: bool = True


SMALL_POOL = {"num_gpu_blocks_override": CROWDED_BLOCKS[1]}
CROWD = ("storm", "damage")
LOST = {
    "weights and keys": Lost("weights and keys", is_exact=False),
}
LOST_ENGINE = {"quantization": "ascend", "num_gpu_blocks_override": 120}
MIN_REPLAYS = 50


def plan(folder: Path, quantized: str, engine: Mapping[str, Any]) -> Plan:
    quantization = {"quantization": "ascend"} if MODELS[quantized][1] else {}
    drafts = draft_models.drafts(folder) if quantized in WITH_DRAFTS else {}
    arguments = {**ENGINE, **quantization, **drafts, **engine}
    return Plan(folder, ["sightings"], "eight_bit_pages", arguments)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """The folder of a model of `MODELS`."""

    @cache
    def folder(quantized: str) -> Path:
        folder = tmp_path_factory.mktemp("model")
        model, quantizations = MODELS[quantized]
        if model in draft_models.WRITERS:
            draft_models.WRITERS[model](folder)
        else:
            random_models.write(folder, random_models.MODELS[model]())
        for quantize in quantizations:
            quantize(folder)
        return folder

    return folder


@pytest.fixture(scope="module")
def served(folder: Callable[[str], Path], tmp_path_factory: pytest.TempPathFactory) -> LazyReports:
    """Reports by case, and by ``reference`` and model."""
    references = {
        f"reference, {name}": plan(folder(name), name, {})
        for name in dict.fromkeys(case.reference for case in CASES.values())
    }
    found = {
        name: plan(folder(case.quantized), case.quantized, case.engine)
        for name, case in CASES.items()
    }
    processes = []
    for environ, plans in ((PLUGIN_OFF, references), (ADAPTIVE, found)):
        # vLLM-Ascend prepares a process for the experts of one model, and for graphs of one engine.
        alone = {
            name: plans.pop(name) for name in [*plans] if "experts" in name or "graphs" in name
        }
        processes += [(environ, plans), *((environ, {name: alone[name]}) for name in alone)]
    return LazyReports(tmp_path_factory, processes, NPU)


@pytest.mark.parametrize("name", CASES)
def test_pages_of_quantized_models_come_back(
    served: LazyReports, record_property: Callable[[str, Any], None], name: str
) -> None:
    case = CASES[name]
    found = served[name]
    reference = served[f"reference, {case.reference}"]
    types = ["torch.int8" if "keys" in case.reference else "torch.float32"]
    assert found.report["facts"]["page types"] == reference.report["facts"]["page types"] == types
    # A connector of a prefill node reads the scales (``mooncake_layerwise_connector.py``).
    assert found.report["facts"]["has scales"] is ("keys" in case.quantized)
    # With drafts, vLLM alone computes the last block of a hit again.
    has_drafts = name in WITH_DRAFTS
    fewer_tokens = 128 if has_drafts else 0
    hits = [tokens - fewer_tokens for tokens in HIT_TOKENS]
    assert found.hit_tokens("returned") == HIT_TOKENS
    assert reference.hit_tokens("returned") == hits
    assert (found.counted_in_all("accepted draft tokens") > 0) is has_drafts
    largest = found.check_equal(reference, EQUAL, NPU_TOLERANCE)
    wrong = found.logprob_error("zeroed", reference)
    record_property("largest error, control", (largest, wrong))
    assert wrong > WRONG
    pages = found.report["facts"]["pages"]
    if "states" not in name:  # Host memory has states for some boundaries only.
        assert pages["returned as computed"] == pages["computed"]
        assert has_drafts or pages["computed"] == sum(HIT_TOKENS) // 128
    found.check_nothing_is_left()
    assert not case.has_graphs or found.report["replays"] > MIN_REPLAYS


@pytest.mark.parametrize("name", LOST)
def test_answers_do_not_depend_on_where_they_resume(
    folder: Callable[[str], Path],
    tmp_path_factory: pytest.TempPathFactory,
    record_property: Callable[[str, Any], None],
    name: str,
) -> None:
    """Scenarios of ``test_features.py``. The reference has no prefix caching and no drafts."""
    lost = LOST[name]
    path = folder(lost.quantized)
    drafts = draft_models.drafts(path) if lost.quantized in WITH_DRAFTS else {}
    options = {"reads_rounded": "keys" in lost.quantized, "is_exact": lost.is_exact}
    plans = {
        kind: Plan(path, lost.scenarios, "eight_bit_pages", {**LOST_ENGINE, **engine}, options)
        for kind, engine in {
            "reference": NO_PREFIX_CACHING,
            "found": {**connector(), **drafts, **lost.engine},
        }.items()
    }
    started = [
        (PLUGIN_OFF, {"reference": plans["reference"]}),
        (ADAPTIVE, {"found": plans["found"]}),
    ]
    reports = LazyReports(tmp_path_factory, started, NPU)
    found, reference = reports["found"], reports["reference"]
    controls = [label for label in found.labels if label in CONTROLS]
    right = [label for label in found.labels if label not in controls]
    largest = found.check_equal(reference, right, NPU_TOLERANCE)
    wrong = {label: found.logprob_error(label, reference) for label in controls}
    record_property("largest error, controls", (largest, wrong))
    assert min(wrong.values()) > WRONG
    own = found.report["own"]
    if "failures" in lost.scenarios:
        assert own["transfer_failures.load"] > 0 and own["transfer_failures.store"] > 0
    if "holes" in lost.scenarios:
        assert found.counted_in_all("hole tokens") > 0
    if lost.scenarios == CROWD:
        assert found.counted("storm", "preemptions") > 0
        assert own["host_swapped_requests"] > 0
    if drafts:
        assert found.counted_in_all("accepted draft tokens") > 0
    assert (found.report["replays"] > MIN_REPLAYS) is ("graphs" in name)
    found.check_nothing_is_left()
