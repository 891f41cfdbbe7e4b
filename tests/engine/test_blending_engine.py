# SPDX-License-Identifier: Apache-2.0
"""Blended requests on the real engine: what they answer is what plain torch says of their spans.

Nothing of them is seen by others: see the tests of leaks.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import blending_models
import pytest
import served
from blended_prompts import SEPARATOR, STORED_LENGTHS
from blending_workload import (
    CROWD,
    CROWD_REPLY_TOKENS,
    HEADS_TOKENS,
    MIXED_REPLY_TOKENS,
    ORDERS,
    REPLY_TOKENS,
)
from connector_models import WINDOW_TOKENS
from served import PLUGIN_OFF
from support.blending.oracle import Oracle
from support.blending.reused import Reused
from support.sample import IS_SAMPLE

ORACLE_TOLERANCE = 1e-3
"""Log-probabilities, fp32; 3e-4 has been seen."""
SAME_TOLERANCE = 1e-4
"""Between engines."""
MIN_TOKENS = 32
MOST_TOKENS = 1200
SINK_IDS = (7, 8, 9)
LONG_SINK_IDS = tuple(range(100, 175))
"""Four blocks and some tokens, more than a window."""
WRONG = 0.1
"""Log-probabilities: what is wrong differs by more."""
MOST_ORACLE_ANSWERS = 30
"""Of a setting whose requests are mixed: the oracle is slow."""
PARAMS = {"kvext_exact_tokens", "kvext_reused_tokens", "kvext_recomputed_tokens"}


@dataclass(frozen=True)
class Setting:
    """An engine that blends.

    Attributes:
        model: See ``blending_models.WRITERS``.
        scenarios: Names of functions of the workload.
        heads: Tokens.
        blending: Options of the connector.
        engine: Arguments of ``LLM``.
        environ: Of its process.
        window_tokens: Where tokens are computed because a window reaches across.
        is_main_only: Whether it says nothing about other versions of vLLM.
        requests: How many are mixed.
        without: What does not protect the prefix cache.
    """

    model: str
    scenarios: Sequence[str] = ("orders",)
    heads: Sequence[int] = (16,)
    blending: Mapping[str, Any] | None = None
    engine: Mapping[str, Any] | None = None
    environ: Mapping[str, str] | None = None
    window_tokens: int = 0
    is_main_only: bool = False
    requests: int = 0
    without: Sequence[str] = ()

    def plan(self, models: Mapping[str, Path]) -> dict[str, Any]:
        blending = {"segment_separator": SEPARATOR, **(self.blending or {})}
        return {
            "model": str(models[self.model]),
            "scenarios": self.scenarios,
            "heads": self.heads,
            "blending": blending,
            "engine": dict(self.engine or {}),
            "requests": self.requests,
            "without": self.without,
        }


MIXED_REQUESTS = 500
MIXED_BLENDING = {"store_policy": "all", "host_memory_gib": 0.5}
SMALL_POOL = {
    "max_num_seqs": 16,
    "max_num_batched_tokens": 256,
    "max_model_len": 1280,
    "num_gpu_blocks_override": 100,
}
ACROSS = {"blend_across_windows": True}
ALL_SETTINGS = {
    "llama": Setting("llama", ("orders", "exact", "controls"), HEADS_TOKENS),
    "qwen3": Setting("qwen3", blending={"segment_sink": SINK_IDS}, is_main_only=True),
    "gemma3": Setting("gemma3", ("orders", "exact"), window_tokens=WINDOW_TOKENS),
    "gemma3, across windows": Setting("gemma3", blending=ACROSS),
    "gemma3, long sink": Setting(
        "gemma3",
        ("orders", "exact"),
        blending={"segment_sink": LONG_SINK_IDS},
        window_tokens=WINDOW_TOKENS,
        is_main_only=True,
    ),
    "gpt-oss": Setting("gpt-oss", window_tokens=WINDOW_TOKENS, is_main_only=True),
    "gpt-oss, across windows": Setting("gpt-oss", blending=ACROSS, is_main_only=True),
    "crowd": Setting("llama", ("crowd",), engine=CROWD),
    "crowd, two workers": Setting(
        "llama",
        ("crowd",),
        engine={**CROWD, "tensor_parallel_size": 2},
        environ={"VLLM_CPU_OMP_THREADS_BIND": "0|1"},
        is_main_only=True,
    ),
    "mixed": Setting(
        "llama",
        ("mixed",),
        blending=MIXED_BLENDING,
        engine=SMALL_POOL,
        requests=MIXED_REQUESTS,
    ),
    "mixed, gemma3": Setting(
        "gemma3",
        ("mixed",),
        blending=MIXED_BLENDING,
        engine=SMALL_POOL | {"num_gpu_blocks_override": 220},
        window_tokens=WINDOW_TOKENS,
        is_main_only=True,
        requests=MIXED_REQUESTS,
    ),
}
UNPROTECTED = {
    "mixed, no clamp": replace(ALL_SETTINGS["mixed"], requests=50, without=("clamp",)),
    "mixed, no protection": replace(
        ALL_SETTINGS["mixed"], requests=50, without=("clamp", "private hashes")
    ),
}
SETTINGS = {
    name: setting
    for name, setting in ALL_SETTINGS.items()
    if not (IS_SAMPLE and setting.is_main_only)
}
MIXED = [name for name in SETTINGS if "mixed" in SETTINGS[name].scenarios]
CROWDS = [name for name in SETTINGS if "crowd" in SETTINGS[name].scenarios]
REPLIES = {"crowd": CROWD_REPLY_TOKENS, "plain": MIXED_REPLY_TOKENS}
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
    is_preempted: bool = False

    @property
    def exact_tokens(self) -> int:
        return self.params["kvext_exact_tokens"] if self.params else len(self.prompt)

    @property
    def reused_tokens(self) -> int:
        return self.params["kvext_reused_tokens"] if self.params else 0


Reports = Mapping[str, dict[str, Any]]
Oracles = Callable[[str], Oracle]


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    folders = {}
    for name in {setting.model for setting in SETTINGS.values()}:
        folders[name] = tmp_path_factory.mktemp("model")
        blending_models.WRITERS[name](folders[name])
    return folders


Run = Callable[[Mapping[str, Any], Mapping[str, str]], dict[str, dict[str, Any]]]


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Run:
    def run(plans: Mapping[str, Any], environ: Mapping[str, str]) -> dict[str, dict[str, Any]]:
        folder = tmp_path_factory.mktemp("plans")
        plans_path, report_path = folder / "plans.json", folder / "report.json"
        plans_path.write_text(json.dumps(plans))
        ended = served.run(
            "blending_workload.py", [str(report_path), str(plans_path)], environ, most_s=500
        )
        if ended.exit_code:
            pytest.fail(f"exit code {ended.exit_code} with {environ}:\n{ended.log[-6000:]}")
        reports: dict[str, dict[str, Any]] = json.loads(report_path.read_text())
        for name, report in reports.items():
            if "error" in report:
                pytest.fail(f"{name}: {report['error']}\n{ended.log[-3000:]}")
        return reports

    return run


@pytest.fixture(scope="module")
def reports(models: Mapping[str, Path], run: Run) -> Reports:
    """Of all engines that blend, and of those that compute anew what their caches held."""
    plans: dict[str, Any] = {}
    found: dict[str, dict[str, Any]] = {}
    for name, setting in (SETTINGS | UNPROTECTED).items():
        if setting.environ is not None:
            found |= run({name: setting.plan(models)}, setting.environ)
            continue
        plans[name] = setting.plan(models)
        if setting.requests:
            plans[f"{name}, recomputed"] = {
                "model": str(models[setting.model]),
                "scenarios": ["recomputed"],
                "of": name,
                "engine": {},
            }
    return found | run(plans, {})


@pytest.fixture(scope="module")
def references(reports: Reports, models: Mapping[str, Path], run: Run) -> Reports:
    """Prompts of which nothing may be approximate, without plugin, connector and prefix caching."""
    plans = {}
    for name, setting in SETTINGS.items():
        prompts = {
            label: (
                [answer.prompt for answer in unblended(reports, name, label)],
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


@pytest.fixture(scope="module")
def oracles(models: Mapping[str, Path], reports: Reports) -> Oracles:
    made: dict[str, Oracle] = {}

    def oracle(name: str) -> Oracle:
        if name not in made:
            sink_ids = reports[name]["facts"]["sink"]
            made[name] = Oracle(models[SETTINGS[name].model], sink_ids, MOST_TOKENS)
        return made[name]

    return oracle


def answers(reports: Reports, name: str, label: str) -> list[Answer]:
    return [Answer(**answer) for answer in reports[name]["asked"][label]]


def unblended(reports: Reports, name: str, label: str) -> list[Answer]:
    """Answers that are to be those of an engine without a connector."""
    found = answers(reports, name, label)
    return [each for each in found if not each.segments or label.startswith("exact")]


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


def num_tokens(reused: Sequence[Reused]) -> int:
    return sum(each.end_tokens - each.first_tokens for each in reused)


def oracle_error(oracle: Oracle, answer: Answer, reused: Sequence[Reused]) -> float:
    """The largest difference of a top-5 log-probability from the oracle's."""
    expected = oracle.log_probabilities(answer.prompt, answer.reply, reused)
    return max(
        abs(float(of_token[int(token)]) - logprob)
        for of_token, step in zip(expected, answer.logprobs, strict=True)
        for token, logprob in step.items()
    )


def difference(one: Answer, other: Answer) -> float:
    """The largest difference of a top-5 log-probability. The first reply may be a shorter one."""
    assert one.prompt == other.prompt
    assert one.reply == other.reply[: len(one.reply)]
    return max(
        abs(logprob - theirs.get(token, min(theirs.values())))
        for step, theirs in zip(one.logprobs, other.logprobs, strict=False)
        for token, logprob in step.items()
    )


def differences(some: Sequence[Answer], others: Sequence[Answer]) -> list[float]:
    return [difference(one, other) for one, other in zip(some, others, strict=True)]


OF_HEADS = [
    (name, f"heads {head_tokens}", head_tokens)
    for name, setting in SETTINGS.items()
    if "orders" in setting.scenarios
    for head_tokens in setting.heads
]
EXACT = [name for name, setting in SETTINGS.items() if "exact" in setting.scenarios]


# What is approximate is what it is said to be.


@pytest.mark.parametrize(("name", "label", "head_tokens"), OF_HEADS)
def test_blended_answers_are_those_of_the_oracle(
    reports: Reports, oracles: Oracles, name: str, label: str, head_tokens: int
) -> None:
    found = answers(reports, name, label)
    assert len(found) == len(ORDERS) + 1
    for answer in found:
        reused = expected_reuse(answer, SETTINGS[name], head_tokens)
        assert answer.reused_tokens == num_tokens(reused) > 0
        assert oracle_error(oracles(name), answer, reused) <= ORACLE_TOLERANCE
        # It could be told from full recompute.
        assert oracle_error(oracles(name), answer, ()) > WRONG


@pytest.mark.parametrize("name", SETTINGS)
def test_tokens_of_a_response_add_up(reports: Reports, name: str) -> None:
    found = [
        answer
        for label in reports[name]["asked"]
        for answer in answers(reports, name, label)
        if answer.params is not None
    ]
    assert found
    for answer in found:
        assert set(answer.params or ()) == PARAMS
        assert sum((answer.params or {}).values()) == len(answer.prompt)
        assert answer.reused_tokens >= MIN_TOKENS


@pytest.mark.parametrize("name", SETTINGS)
def test_what_is_exact_and_what_is_reused_counts_as_cached(reports: Reports, name: str) -> None:
    for label in reports[name]["asked"]:
        if label == "crowd":  # A request that was preempted may find more.
            continue
        for answer in answers(reports, name, label):
            if answer.params is not None and not answer.is_preempted:
                assert answer.hit_tokens == answer.exact_tokens + answer.reused_tokens


@pytest.mark.parametrize("label", ["not rotated", "swapped", "zeroed keys"])
def test_what_is_loaded_wrong_shows(reports: Reports, oracles: Oracles, label: str) -> None:
    (answer,) = answers(reports, "llama", f"wrong: {label}")
    reused = expected_reuse(answer, SETTINGS["llama"], 16)
    assert answer.reused_tokens == num_tokens(reused) > 0
    assert oracle_error(oracles("llama"), answer, reused) > WRONG


def test_what_is_loaded_right_does_not_show(reports: Reports, oracles: Oracles) -> None:
    (answer,) = answers(reports, "llama", "right after wrong")
    reused = expected_reuse(answer, SETTINGS["llama"], 16)
    assert oracle_error(oracles("llama"), answer, reused) <= ORACLE_TOLERANCE


# Exact where it must be.


@pytest.mark.parametrize("name", EXACT)
def test_with_heads_as_long_as_segments_nothing_is_approximate(
    reports: Reports, references: Reports, name: str
) -> None:
    label = "exact: long heads"
    found = answers(reports, name, label)
    assert all(answer.segments and answer.params is None for answer in found)
    assert max(differences(found, answers(references, name, label))) <= SAME_TOLERANCE


@pytest.mark.parametrize("name", EXACT)
def test_a_segment_where_it_was_computed_is_exact(
    reports: Reports, references: Reports, name: str
) -> None:
    label = "exact: in place"
    found = answers(reports, name, label)
    assert all(answer.reused_tokens > 0 for answer in found)
    assert max(differences(found, answers(references, name, label))) <= SAME_TOLERANCE


# Beside others.


@pytest.mark.parametrize("name", CROWDS)
def test_requests_of_the_crowd_were_preempted(reports: Reports, name: str) -> None:
    # Which of them depends on when loads end.
    preemptions = reports[name]["facts"]["preemptions"]
    assert preemptions["blended"] + preemptions["plain"] > 0


@pytest.mark.parametrize("name", CROWDS)
def test_blended_requests_of_a_crowd_answer_as_alone(
    reports: Reports, oracles: Oracles, name: str
) -> None:
    alone = answers(reports, name, "alone")
    crowd = [answer for answer in answers(reports, name, "crowd") if answer.segments]
    assert len(crowd) == len(alone) == 8
    assert max(differences(alone, crowd)) <= SAME_TOLERANCE
    for answer in crowd:
        reused = expected_reuse(answer, SETTINGS[name], 16)
        assert answer.reused_tokens == num_tokens(reused) > 0
        assert oracle_error(oracles(name), answer, reused) <= ORACLE_TOLERANCE


@pytest.mark.parametrize("name", CROWDS)
def test_plain_requests_of_a_crowd_answer_as_without_a_connector(
    reports: Reports, references: Reports, name: str
) -> None:
    crowd = unblended(reports, name, "crowd")
    assert len(crowd) == 8
    assert all(answer.params is None for answer in crowd)
    assert max(differences(crowd, answers(references, name, "crowd"))) <= SAME_TOLERANCE


# Leaks.


@pytest.mark.parametrize("name", MIXED)
def test_requests_of_all_kinds_were_mixed(reports: Reports, name: str) -> None:
    counted = reports[name]["facts"]["counted"]
    assert counted["requests"] == SETTINGS[name].requests
    kinds = "blended", "plain", "stored", "salted", "aborted"
    assert all(counted[kind] >= 20 for kind in kinds), counted
    assert counted["preempted"] > 0  # Who, depends on when loads end.


@pytest.mark.parametrize("name", MIXED)
def test_blended_requests_begin_with_what_plain_ones_have_computed(
    reports: Reports, oracles: Oracles, name: str
) -> None:
    found = [
        answer
        for answer in answers(reports, name, "blended")
        # One that was preempted may have answered by two plans.
        if answer.params is not None and not answer.is_preempted
    ]
    assert len(found) > SETTINGS[name].requests / 5
    assert sum(answer.exact_tokens > 0 for answer in found) > len(found) / 10
    for number, answer in enumerate(found):
        reused = expected_reuse(answer, SETTINGS[name], 16)
        assert answer.reused_tokens == num_tokens(reused)
        if number < MOST_ORACLE_ANSWERS:
            assert oracle_error(oracles(name), answer, reused) <= ORACLE_TOLERANCE


@pytest.mark.parametrize("name", MIXED)
def test_plain_requests_see_nothing_of_blended_ones(
    reports: Reports, references: Reports, name: str
) -> None:
    """They begin like blended ones, or go on where these have ended."""
    found = answers(reports, name, "plain")
    assert len(found) == reports[name]["facts"]["counted"]["plain"] > SETTINGS[name].requests / 3
    assert sum(answer.hit_tokens > 0 for answer in found) > len(found) / 3
    assert max(differences(found, answers(references, name, "plain"))) <= SAME_TOLERANCE


@pytest.mark.parametrize("name", MIXED)
def test_cached_blocks_hold_what_their_hashes_say(reports: Reports, name: str) -> None:
    facts = reports[name]["facts"]
    again = reports[f"{name}, recomputed"]["facts"]
    assert facts["blocks of no tokens"] == 0
    assert again["compared"] == facts["blocks"] > 2 * SETTINGS[name].requests
    assert again["largest difference"] <= SAME_TOLERANCE


def test_approximate_blocks_would_have_private_hashes(reports: Reports) -> None:
    """Each of two protections is enough; this is what the first one prevents."""
    facts = reports["mixed, no clamp"]["facts"]
    again = reports["mixed, no clamp, recomputed"]["facts"]
    assert facts["blocks of no tokens"] > 20
    assert again["largest difference"] <= SAME_TOLERANCE


def test_approximate_blocks_would_show(reports: Reports) -> None:
    assert reports["mixed, no protection, recomputed"]["facts"]["largest difference"] > WRONG


@pytest.mark.parametrize("name", SETTINGS)
def test_nothing_is_left_when_all_is_done(reports: Reports, name: str) -> None:
    assert set(reports[name]["left"].values()) == {0}, reports[name]["left"]
