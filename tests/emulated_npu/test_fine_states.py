# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vllm-ascend-kvext project
"""States that are stored and loaded within their blocks, on vLLM-Ascend's model runner."""

from __future__ import annotations

import json
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import pytest
from fine_states import UNIT_TOKENS
from state_hits import WRONG
from support.sample import IS_LONG
from support.scenarios import processes
from support.scenarios.states import NUM_DRAFT_TOKENS

NUM_PROMPTS = 100 if IS_LONG else 12


@pytest.fixture(scope="module")
def run(
    folder_of: Callable[[str], Path], tmp_path_factory: pytest.TempPathFactory
) -> Callable[..., dict[str, Any]]:
    @cache
    def run(*options: str, model: str = "states") -> dict[str, Any]:
        report = tmp_path_factory.mktemp("report") / "report.json"
        ended = processes.run(
            Path(__file__).with_name("fine_states.py"),
            [str(report), str(folder_of(model)), "--prompts", str(NUM_PROMPTS), *options],
            {},
            processes.NPU,
        )
        assert not ended.exit_code, ended.log[-6000:]
        found: dict[str, Any] = json.loads(report.read_text())
        return found

    return run


@pytest.mark.parametrize("has_drafts", [False, True], ids=["plain", "MTP"])
def test_a_prompt_hits_in_host_memory_up_to_its_last_unit(
    run: Callable[..., dict[str, Any]], record_property: Any, has_drafts: bool
) -> None:
    found = run("--drafts", model="states, MTP") if has_drafts else run()
    assert found["unit_tokens"] == UNIT_TOKENS
    record_property("largest error", max(max(each) for each in found["errors"]))
    assert found["wrong"] == 0
    num_left_out = 0
    for length, hit_tokens in zip(found["lengths"], found["hit_tokens"][1], strict=True):
        last_tokens = (length - 1) // UNIT_TOKENS * UNIT_TOKENS
        # No step ends where it would leave as many tokens as a decode with drafts computes.
        is_left_out = has_drafts and length - last_tokens == NUM_DRAFT_TOKENS + 1
        assert hit_tokens < last_tokens if is_left_out else hit_tokens == last_tokens
        num_left_out += is_left_out
    assert num_left_out <= NUM_PROMPTS // 10
    assert max(max(each) for each in found["errors"]) < WRONG


def test_foreign_states_are_seen(run: Callable[..., dict[str, Any]]) -> None:
    found = run("--spoil")
    assert found["wrong"] > NUM_PROMPTS // 2
