# SPDX-License-Identifier: Apache-2.0
"""Blended requests on the real engine: what they answer is what plain torch says of their spans.

Nothing of them is seen by others: see the tests of leaks.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import blending_models
import pytest
import served
from blending_workload import CROWD, CROWD_REPLY_TOKENS, HEADS_TOKENS, REPLY_TOKENS, STORED_LENGTHS
from connector_models import WINDOW_TOKENS
from served import PLUGIN_OFF
from support.blending.oracle import Oracle, Reused
from support.sample import IS_SAMPLE

ORACLE_TOLERANCE = 1e-3
"""Log-probabilities, fp32; 1e-4 has been seen. What is wrong differs by more than 0.1."""
SAME_TOLERANCE = 1e-4
"""Between engines."""
MIN_TOKENS = 32
MOST_TOKENS = 1200
SINK_IDS = (7, 8, 9)


@dataclass(frozen=True)
class Setting:
    """An engine that blends.

    Attributes:
        model: See ``blending_models.WRITERS``.
        scenarios: Names of functions of the workload.
        heads: Tokens.
        blending: Options of the connector.
        engine: Arguments of ``LLM``.
        window_tokens: Where tokens are computed because a window reaches across.
        is_main_only: Whether it says nothing about other versions of vLLM.
    """

    model: str
    scenarios: Sequence[str] = ("orders",)
    heads: Sequence[int] = (16,)
    blending: Mapping[str, Any] | None = None
    engine: Mapping[str, Any] | None = None
    window_tokens: int = 0
    is_main_only: bool = False

    def plan(self, models: Mapping[str, Path]) -> dict[str, Any]:
        blending = {"segment_separator": [3, 2], **(self.blending or {})}
        return {
            "model": str(models[self.model]),
            "scenarios": self.scenarios,
            "heads": self.heads,
            "blending": blending,
            "engine": dict(self.engine or {}),
        }


ACROSS = {"blend_across_windows": True}
ALL_SETTINGS = {
    "llama": Setting("llama", ("orders", "exact", "controls"), HEADS_TOKENS),
    "qwen3": Setting("qwen3", blending={"segment_sink": SINK_IDS}),
    "gemma3": Setting("gemma3", ("orders", "exact"), window_tokens=WINDOW_TOKENS),
    "gemma3, across windows": Setting("gemma3", blending=ACROSS),
    "gpt-oss": Setting("gpt-oss", window_tokens=WINDOW_TOKENS, is_main_only=True),
    "gpt-oss, across windows": Setting("gpt-oss", blending=ACROSS),
    "crowd": Setting("llama", ("crowd",), engine=CROWD),
    "mixed": Setting("llama", ("mixed",), blending={"store_policy": "all"}),
    "mixed, gemma3": Setting(
        "gemma3",
        ("mixed",),
        blending={"store_policy": "all"},
        window_tokens=WINDOW_TOKENS,
        is_main_only=True,
    ),
}
SETTINGS = {
    name: setting
    for name, setting in ALL_SETTINGS.items()
    if not (IS_SAMPLE and setting.is_main_only)
}
MIXED = [name for name in SETTINGS if "mixed" in SETTINGS[name].scenarios]
REPLIES = {"crowd": CROWD_REPLY_TOKENS}
"""By label, where they are not of the usual length."""


@dataclass(frozen=True)
class Answer:
    """A request, and what it brought back; see the workload."""

    prompt: list[int]
    segments: list[list[int]]
    reply: list[int]
    logprobs: list[dict[str, float]]
    params: dict[str, int] | None
    hit_tokens: int

    @property
    def exact_tokens(self) -> int:
        return self.params["kvext_exact_tokens"] if self.params else len(self.prompt)

    def difference(self, other: Answer) -> float:
        """The largest of a top-5 log-probability, as far as the replies are the same."""
        assert self.prompt == other.prompt
        return served.logprob_error(self, other)  # type: ignore[arg-type]


Reports = Mapping[str, dict[str, Any]]


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    folders = {}
    for name in {setting.model for setting in SETTINGS.values()}:
        folders[name] = tmp_path_factory.mktemp("model")
        blending_models.WRITERS[name](folders[name])
    return folders


Run = Callable[[Mapping[str, Any], Mapping[str, str]], Reports]


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Run:
    def run(plans: Mapping[str, Any], environ: Mapping[str, str]) -> Reports:
        folder = tmp_path_factory.mktemp("plans")
        plans_path, report_path = folder / "plans.json", folder / "report.json"
        plans_path.write_text(json.dumps(plans))
        ended = served.run(
            "blending_workload.py", [str(report_path), str(plans_path)], environ, most_s=500
        )
        if ended.exit_code:
            pytest.fail(f"exit code {ended.exit_code} with {environ}:\n{ended.log[-6000:]}")
        reports: Reports = json.loads(report_path.read_text())
        for name, report in reports.items():
            if "error" in report:
                pytest.fail(f"{name}: {report['error']}\n{ended.log[-3000:]}")
        return reports

    return run


@pytest.fixture(scope="module")
def reports(models: Mapping[str, Path], run: Run) -> Reports:
    """Of all engines that blend, and of those that compute anew what their caches held."""
    plans: dict[str, Any] = {}
    for name, setting in SETTINGS.items():
        plans[name] = setting.plan(models)
        if name in MIXED:
            plans[f"{name}, recomputed"] = {
                "model": str(models[setting.model]),
                "scenarios": ["recomputed"],
                "of": name,
                "engine": {},
            }
    return run(plans, {})


@pytest.fixture(scope="module")
def references(reports: Reports, models: Mapping[str, Path], run: Run) -> Reports:
    """Prompts of which nothing may be approximate, without plugin, connector and prefix caching."""
    plans = {}
    for name, setting in SETTINGS.items():
        prompts = {
            label: (
                [answer.prompt for answer in answers(reports, name, label) if is_plain(answer)],
                REPLIES.get(label, REPLY_TOKENS),
            )
            for label in reports[name]["asked"]
            if label.startswith("exact") or label in ("crowd", "plain")
        }
        if prompts:
            plans[name] = {
                "model": str(models[setting.model]),
                "scenarios": ["plain"],
                "prompts": prompts,
                "engine": {"enable_prefix_caching": False},
            }
    return run(plans, PLUGIN_OFF)


def is_plain(answer: Answer) -> bool:
    return answer.params is None or "in place" in str(answer.params) or not answer.segments


@pytest.fixture(scope="module")
def oracles(models: Mapping[str, Path], reports: Reports) -> Callable[[str], Oracle]:
    made: dict[str, Oracle] = {}

    def oracle(name: str) -> Oracle:
        if name not in made:
            sink_ids = reports[name]["facts"]["sink"]
            made[name] = Oracle(models[SETTINGS[name].model], sink_ids, MOST_TOKENS)
        return made[name]

    return oracle


def answers(reports: Reports, name: str, label: str) -> list[Answer]:
    return [Answer(**answer) for answer in reports[name]["asked"][label]]


def expected_reuse(answer: Answer, setting: Setting, head_tokens: int) -> list[Reused]:
    """What is to be reused behind the exact beginning; the missing document has its own length."""
    found = []
    for first, end in answer.segments:
        if end - first not in STORED_LENGTHS or end - first < 2 * head_tokens:
            continue
        head_end = first + max(head_tokens, setting.window_tokens - 1, 0)
        begin = max(head_end, answer.exact_tokens)
        if end - begin >= MIN_TOKENS:
            found.append(Reused(begin, end, (first, end)))
    return found


def oracle_error(oracle: Oracle, answer: Answer, reused: Sequence[Reused]) -> float:
    """The largest difference of a top-5 log-probability from the oracle's."""
    expected = oracle.log_probabilities(answer.prompt, answer.reply, reused)
    return max(
        abs(float(of_token[int(token)]) - logprob)
        for of_token, step in zip(expected, answer.logprobs, strict=True)
        for token, logprob in step.items()
    )
