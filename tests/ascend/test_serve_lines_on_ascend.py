# SPDX-License-Identifier: Apache-2.0
"""Every ``vllm serve`` line of the documentation passes vllm-ascend's checks, up to a scheduler."""

from __future__ import annotations

import dataclasses

import pytest
from npu_platform import Start
from support.serve_lines import ServeLine, serve_lines

LINES = [line for line in serve_lines() if line.connector != "LMCacheMPConnector"]


@pytest.mark.parametrize("line", LINES, ids=lambda line: line.place)
def test_a_printed_line_starts_on_ascend(line: ServeLine, start_on_npu: Start) -> None:
    started = start_on_npu(line)
    assert started.report, started.log[-4000:]
    assert started.report["platform"] == "NPUPlatform"
    assert started.report["connector"] == (line.connector or "NoneType")
    assert started.report["recomputes"] is bool(line.connector)


@pytest.fixture(scope="module")
def recompute_line() -> ServeLine:
    return next(line for line in LINES if line.connector)


@pytest.mark.parametrize(
    ("variables", "message"),
    [
        (
            {"VLLM_ASCEND_KVEXT_DISABLE": "failed-loads"},
            "found recompute, expected fail: the model has attention and states, and vLLM-Ascend "
            "refuses to recompute their failed loads. The repair 'failed-loads' can, but is not in "
            "effect: VLLM_ASCEND_KVEXT_DISABLE names it. Take it out of VLLM_ASCEND_KVEXT_DISABLE",
        ),
        (
            {"VLLM_ASCEND_KVEXT_MODE": "off"},
            "Hybrid models do not support recompute mode kv load failure policy now",
        ),
    ],
)
def test_without_the_repair_recompute_is_refused_for_states(
    variables: dict[str, str], message: str, recompute_line: ServeLine, start_on_npu: Start
) -> None:
    started = start_on_npu(recompute_line, **variables)
    assert not started.report
    assert message in started.log


def test_the_repair_allows_it_for_connectors_of_others(
    recompute_line: ServeLine, start_on_npu: Start
) -> None:
    """The repair recovers what any connector reports."""
    arguments = tuple(
        word.replace("KvextConnector", "ExampleConnector") for word in recompute_line.arguments
    )
    line = dataclasses.replace(recompute_line, arguments=arguments)
    started = start_on_npu(line, "config")
    assert started.report.get("policy") == "recompute", started.log[-4000:]
