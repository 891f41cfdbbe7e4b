# SPDX-License-Identifier: Apache-2.0
"""A model is asked whether its segments may be reused before clients ask theirs."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import blending_models
import pytest
import served
from connector_models import WINDOW_TOKENS
from model_check_workload import DOCUMENT_TOKENS
from support.sample import IS_SAMPLE

from vllm_ascend_kvext.blending.gate_prompts import NUM_MOVED, NUM_SEGMENTS
from vllm_ascend_kvext.blending.gate_records import all_records

HEAD_TOKENS = 16
IN_PLACE_QUESTIONS = 5 * NUM_SEGMENTS
"""A store, then alone, beside others, with other tokens, and reused."""
MOVED_QUESTIONS = 3 * NUM_MOVED
SAME_TOLERANCE = 1e-4
DIFFERENT = 1e-2
"""Log-probabilities, fp32."""

FULL, WINDOWS = "llama", "gemma3"
SMALL_POOL = {"num_gpu_blocks_override": 30, "max_model_len": 256}

MADE_UP = {"load_format": "dummy"}

# By name: model, cache folder, fault, options of the connector, arguments of LLM.
ENGINES: dict[str, tuple[str, str, str, dict[str, Any], dict[str, Any]]] = {
    "made-up weights": (FULL, "cache", "none", {}, MADE_UP),
    "full attention": (FULL, "cache", "none", {}, {}),
    "the same again": (FULL, "cache", "none", {}, {}),
    "other options": (FULL, "cache", "none", {"blend_head_tokens": 32}, {}),
    "small chunks": (FULL, "small-chunks", "none", {"chunk_tokens": 16}, {}),
    "windows": (WINDOWS, "cache", "none", {}, {}),
    "questions": (FULL, "cache", "none", {"blend_selector": "question"}, {}),
    "wrong rows": (FULL, "wrong-rows", "loads_other_rows", {}, {}),
    "wrong rows again": (FULL, "wrong-rows", "none", {}, {}),
    "holes": (FULL, "holes", "leaves_holes", {}, {}),
    "wrong keys": (FULL, "wrong-keys", "turns_keys_further", {}, {}),
    "failing loads": (FULL, "room", "fails_loads", {}, {}),
    "small pool": (FULL, "room", "none", {}, SMALL_POOL),
    "small host memory": (FULL, "room", "none", {"host_memory_gib": 0.0001}, {}),
}
PASSED = [
    "made-up weights",
    "full attention",
    "the same again",
    "other options",
    "small chunks",
    "windows",
    "questions",
]
REFUSED = [name for name in ENGINES if name not in PASSED]
ENDS_FAILED_LOADS = "failing loads"
"""vLLM's default ends their requests. The others have them computed."""

ON_OTHER_VERSIONS = {"full attention", "windows", "wrong rows", "holes"}


class Reports(dict[str, dict[str, Any]]):
    """By name."""

    def __missing__(self, name: str) -> dict[str, Any]:
        pytest.skip("on the main version only")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("model_check")


@pytest.fixture(scope="module")
def reports(folder: Path) -> Reports:
    plans = {}
    for name, (model, cache, fault, blending, engine) in ENGINES.items():
        if IS_SAMPLE and name not in ON_OTHER_VERSIONS:
            continue
        if not (folder / model).exists():
            (folder / model).mkdir()
            blending_models.WRITERS[model](folder / model)
        plans[name] = {
            "model": str(folder / model),
            "cache": str(folder / cache),
            "fault": fault,
            "blending": blending,
            "engine": engine,
            "failed_loads": "fail" if name == ENDS_FAILED_LOADS else "recompute",
        }
    plans_path, report_path = folder / "plans.json", folder / "report.json"
    plans_path.write_text(json.dumps(plans))
    ended = served.run(
        "model_check_workload.py", [str(report_path), str(plans_path)], {}, most_s=300
    )
    assert not ended.exit_code, ended.log[-6000:]
    found = Reports(json.loads(report_path.read_text()))
    for name, report in found.items():
        assert "error" not in report, f"{name}: {report['error']}"
    return found


def difference(one: Mapping[str, Any], other: Mapping[str, Any]) -> float:
    """The largest of a log-probability of the first token of an answer."""
    mine, theirs = one["answer"][0], other["answer"][0]
    least = min(theirs.values())
    return max(abs(value - theirs.get(token, least)) for token, value in mine.items())


def test_a_model_with_full_attention_is_asked_for_its_segments_in_place(reports: Reports) -> None:
    assert reports["full attention"]["asked"] == IN_PLACE_QUESTIONS


def test_a_model_with_windows_is_also_asked_whether_repair_helps(reports: Reports) -> None:
    assert reports["windows"]["asked"] == IN_PLACE_QUESTIONS + MOVED_QUESTIONS


def test_what_was_found_is_remembered(reports: Reports, folder: Path) -> None:
    assert reports["the same again"]["asked"] == 0
    records = all_records(str(folder / "cache"))
    assert sorted(Path(record.model).name for record in records) == [WINDOWS, FULL, FULL, FULL]
    assert all(record.passed for record in records)


def test_other_options_are_asked_about_anew(reports: Reports) -> None:
    assert reports["other options"]["asked"] == IN_PLACE_QUESTIONS


def test_made_up_weights_say_nothing_of_others(reports: Reports, folder: Path) -> None:
    assert reports["made-up weights"]["asked"] == IN_PLACE_QUESTIONS
    assert reports["full attention"]["asked"] == IN_PLACE_QUESTIONS
    messages = [record.message for record in all_records(str(folder / "cache"))]
    assert len([message for message in messages if "says nothing" in message]) == 1


@pytest.mark.parametrize("name", PASSED)
def test_segments_are_reused_at_once_where_a_model_has_passed(reports: Reports, name: str) -> None:
    assert reports[name]["why_no_reuse"] == ""
    options = ENGINES[name][3]
    head_tokens = options.get("blend_head_tokens", HEAD_TOKENS)
    if ENGINES[name][0] == WINDOWS:
        head_tokens = WINDOW_TOKENS - 1
    expected = DOCUMENT_TOKENS - head_tokens if DOCUMENT_TOKENS - head_tokens >= 32 else 0
    found = (reports[name]["params"] or {}).get("kvext_reused_tokens", 0)
    assert found == expected or (name == "questions" and 0 < found < expected)


@pytest.mark.parametrize("name", REFUSED)
def test_nothing_is_reused_where_a_model_has_not(reports: Reports, name: str) -> None:
    assert reports[name]["params"] is None
    assert difference(reports[name], reports["wrong rows"]) <= SAME_TOLERANCE
    assert difference(reports[name], reports["full attention"]) > DIFFERENT


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("wrong rows", "where segments are reused in place"),
        ("holes", "where segments are reused in place"),
        ("wrong keys", "keys of the first layer"),
        ("failing loads", "expected answers to 3 prompts, found 0"),
        ("small pool", "found room for"),
        ("small host memory", "found no room for it"),
    ],
)
def test_it_is_said_why(reports: Reports, name: str, expected: str) -> None:
    assert expected in reports[name]["why_no_reuse"]


def test_a_model_that_has_not_passed_is_not_asked_again(reports: Reports, folder: Path) -> None:
    assert reports["wrong rows again"]["asked"] == 0
    assert reports["wrong rows again"]["why_no_reuse"] == reports["wrong rows"]["why_no_reuse"]
    (record,) = all_records(str(folder / "wrong-rows"))
    assert not record.passed


def test_too_little_room_is_not_remembered(reports: Reports, folder: Path) -> None:
    assert not all_records(str(folder / "room"))


@pytest.mark.parametrize("name", ENGINES)
def test_nothing_is_left_of_it(reports: Reports, name: str) -> None:
    assert {what: number for what, number in reports[name]["left"].items() if number} == {}
