# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vllm-ascend-kvext project
"""Quantized models with retention and KvextConnector: pages come back byte for byte.

An engine without the package answers the same prompts from its own prefix cache. Both resume at the
same tokens, so their answers are equal. With failed copies and holes they resume elsewhere, so keys
are then read as pages have them in all steps.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import random_models
from emulated_plans import connector
from quantized_models import quantize_keys, quantize_weights
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

MODELS: dict[str, tuple[str, Sequence[Callable[[Path], None]]]] = {
    "floats": ("full attention", ()),
    "keys": ("full attention", (quantize_keys,)),
    "weights": ("full attention", (quantize_weights,)),
    "weights and keys": ("full attention", (quantize_weights, quantize_keys)),
    "experts, latents": ("latent attention, experts", (quantize_weights,)),
    "experts, states": ("states", (quantize_weights,)),
}
"""Models of `random_models`, and what is quantized in them."""
ENGINE = {"enable_prefix_caching": True, "num_gpu_blocks_override": 60}


class Case(NamedTuple):
    """An engine with the package.

    Attributes:
        quantized: The model, a key of `MODELS`.
        reference: The model of the engine without the package.
        role: The role of a ``MultiConnector`` around KvextConnector. Empty for none.
    """

    quantized: str
    reference: str
    role: str = ""

    @property
    def engine(self) -> dict[str, Any]:
        own = connector()
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
    "experts, latents": Case("experts, latents", "experts, latents"),
    "experts, states": Case("experts, states", "experts, states"),
    "keys of a decode node": Case("keys", "keys", "kv_consumer"),
    "keys of a prefill node": Case("keys", "floats", "kv_producer"),  # It keeps them as floats.
}


LOST = "weights and keys"
"""The model whose copies fail and whose chunks are lost."""
LOSSES = ("damage", "failures", "holes")
CONTROLS = ("zeroed rows", "swapped rows", *(f"hole left out: {name}" for name in HOLES_TOKENS))
LOST_ENGINE = {"quantization": "ascend", "num_gpu_blocks_override": 120}
READS_PAGES = {"reads_rounded": True}


def plan(folder: Path, quantized: str, engine: Mapping[str, Any]) -> Plan:
    quantization = {"quantization": "ascend"} if MODELS[quantized][1] else {}
    return Plan(folder, ["sightings"], "eight_bit_pages", {**ENGINE, **quantization, **engine})


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """The folder of a model of `MODELS`."""

    @cache
    def folder(quantized: str) -> Path:
        folder = tmp_path_factory.mktemp("model")
        model, quantizations = MODELS[quantized]
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
        # vLLM-Ascend prepares a process for the experts of one model.
        alone = {name: plans.pop(name) for name in [*plans] if "experts" in name}
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
    assert found.hit_tokens("returned") == reference.hit_tokens("returned") == HIT_TOKENS
    largest = found.check_equal(reference, EQUAL, NPU_TOLERANCE)
    wrong = found.logprob_error("zeroed", reference)
    record_property("largest error, control", (largest, wrong))
    assert wrong > WRONG
    pages = found.report["facts"]["pages"]
    if "states" not in name:  # Host memory has states for some boundaries only.
        assert pages["returned as computed"] == pages["computed"] == sum(HIT_TOKENS) // 128
    found.check_nothing_is_left()


def test_failed_copies_and_holes_of_quantized_models(
    folder: Callable[[str], Path],
    tmp_path_factory: pytest.TempPathFactory,
    record_property: Callable[[str, Any], None],
) -> None:
    """The scenarios of ``test_features.py``. The reference caches no prefix."""
    plans = {
        name: Plan(folder(LOST), LOSSES, "eight_bit_pages", {**LOST_ENGINE, **engine}, READS_PAGES)
        for name, engine in {"reference": NO_PREFIX_CACHING, "found": connector()}.items()
    }
    started = [
        (PLUGIN_OFF, {"reference": plans["reference"]}),
        (ADAPTIVE, {"found": plans["found"]}),
    ]
    reports = LazyReports(tmp_path_factory, started, NPU)
    found, reference = reports["found"], reports["reference"]
    right = [label for label in found.labels if label not in CONTROLS]
    largest = found.check_equal(reference, right, NPU_TOLERANCE)
    wrong = {label: found.logprob_error(label, reference) for label in CONTROLS}
    record_property("largest error, controls", (largest, wrong))
    assert min(wrong.values()) > WRONG
    own = found.report["own"]
    assert own["transfer_failures.load"] > 0 and own["transfer_failures.store"] > 0
    assert found.counted_in_all("hole tokens") > 0
    found.check_nothing_is_left()
