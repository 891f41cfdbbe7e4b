# SPDX-License-Identifier: Apache-2.0
"""A connector that is not ours reports gaps, on the real engine: they are computed, exactly."""

from __future__ import annotations

import json
import math
from typing import Any

import connector_models
import pytest
import served
from gaps_workload import BLOCK_TOKENS, LOST_BLOCKS, PROMPTS_TOKENS, REPLY_TOKENS
from served import ENGINE_ENVIRON, LOGPROB_TOLERANCE, Served

KEPT_BLOCKS = (48, 18, 9, 61)
"""Of each prompt: what the connector claims, gaps included."""


def connected(**extra: Any) -> dict[str, Any]:
    return {
        "kv_transfer_config": {
            "kv_connector": "GapsConnector",
            "kv_connector_module_path": "gaps_connector",
            "kv_role": "kv_both",
            "kv_load_failure_policy": "recompute",
            "kv_connector_extra_config": extra,
        }
    }


def one_of_several() -> dict[str, Any]:
    part = connected(between_steps=False)["kv_transfer_config"]
    return {
        "kv_transfer_config": {
            "kv_connector": "MultiConnector",
            "kv_role": "kv_both",
            "kv_connector_extra_config": {"connectors": [part]},
        },
        # In this process vLLM's logger of a MultiConnector cannot read what connectors report.
        "disable_log_stats": True,
    }


PLANS: dict[str, dict[str, Any]] = {
    "cold": {"engine": {"enable_prefix_caching": False}},
    "within a step": {"engine": connected(between_steps=False)},
    "between steps": {"engine": connected(between_steps=True)},
    "small steps": {
        "engine": {**connected(between_steps=True), "max_num_batched_tokens": 64, "max_num_seqs": 3}
    },
    "fails within a step": {"engine": connected(between_steps=False, failing_block=10)},
    "fails between steps": {"engine": connected(between_steps=True, failing_block=10)},
    "no prefix caching": {
        "engine": {**connected(between_steps=False), "enable_prefix_caching": False}
    },
    "one of several": {"engine": one_of_several()},
    "not computed within a step": {
        "engine": connected(between_steps=False),
        "leaves_out_gaps": True,
    },
    "not computed between steps": {
        "engine": connected(between_steps=True),
        "leaves_out_gaps": True,
    },
}


@pytest.fixture(scope="module")
def reports(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Served]:
    folder = tmp_path_factory.mktemp("gaps")
    connector_models.write_full(folder)
    plans = {name: {"model": str(folder), **plan} for name, plan in PLANS.items()}
    report = folder / "report.json"
    ended = served.run("gaps_workload.py", [str(report), json.dumps(plans)], ENGINE_ENVIRON)
    assert not ended.exit_code, ended.log[-6000:]
    return {
        name: Served(of_plan, ended.log) for name, of_plan in json.loads(report.read_text()).items()
    }


def gap_tokens(number: int) -> int:
    """Of one prompt: what is lost before the last block that is kept."""
    return sum(
        (min(end, KEPT_BLOCKS[number]) - first) * BLOCK_TOKENS
        for first, end in LOST_BLOCKS[number]
        if first < KEPT_BLOCKS[number]
    )


@pytest.mark.parametrize("name", [name for name in PLANS if not name.startswith("not")])
def test_answers_are_those_of_a_cold_run(reports: dict[str, Served], name: str) -> None:
    report = reports[name]
    assert "error" not in report.report, report.report["error"]
    assert report.report["held_blocks"] == 0
    for label in ("first", "together"):
        assert report.logprob_error(label, reports["cold"]) < LOGPROB_TOLERANCE


@pytest.mark.parametrize(
    "name", ["within a step", "between steps", "no prefix caching", "one of several"]
)
def test_gaps_and_ends_alone_are_computed(reports: dict[str, Served], name: str) -> None:
    computed = reports[name].report["computed"]
    of_gaps = sum(n for step in computed for id, n in step.items() if "-hole-" in id)
    of_requests = sum(n for step in computed for id, n in step.items() if "-hole-" not in id)
    numbers = range(len(PROMPTS_TOKENS))
    assert of_gaps == sum(map(gap_tokens, numbers))
    ends = [PROMPTS_TOKENS[n] - KEPT_BLOCKS[n] * BLOCK_TOKENS for n in numbers]
    assert of_requests == sum(ends) + (REPLY_TOKENS - 1) * len(numbers)
    assert reports[name].hit_tokens("together") == [
        KEPT_BLOCKS[n] * BLOCK_TOKENS - gap_tokens(n) for n in numbers
    ]


@pytest.mark.parametrize("name", [name for name in PLANS if name.startswith("not")])
def test_gaps_that_are_not_computed_are_read(reports: dict[str, Served], name: str) -> None:
    report = reports[name].report
    errors = (
        [float("nan")]
        if "error" in report
        else [
            served.logprob_error(mine, cold)
            for mine, cold in zip(
                reports[name].answers("together"), reports["cold"].answers("together"), strict=True
            )
        ]
    )
    assert any(math.isnan(error) or error > 0.1 for error in errors), report
