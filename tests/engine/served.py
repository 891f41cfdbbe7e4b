# SPDX-License-Identifier: Apache-2.0
"""Start ``serve_workload.py`` in a fresh process and read what it reports."""

from __future__ import annotations

import importlib.util
import json
import os
import subprocess
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Any
from unittest import mock

LOGPROB_TOLERANCE = 1e-4
"""fp32; a prefill in other chunks has been seen to differ by 0, a wrong cached block by 2 to 3."""

WINDOW_TOKENS = 64
INTERVAL = "VLLM_PREFIX_CACHE_RETENTION_INTERVAL"
PLUGIN_OFF = {"VLLM_ASCEND_KVEXT_MODE": "off"}
ENGINE_ENVIRON = {
    "OMP_NUM_THREADS": "1",
    "TORCHDYNAMO_DISABLE": "1",
    "VLLM_CPU_KVCACHE_SPACE": "1",
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
    "VLLM_LOGGING_LEVEL": "INFO",
}


@dataclass(frozen=True)
class Answer:
    """What one request brought back."""

    prompt_tokens: int
    hit_tokens: int
    reply: list[int]
    logprobs: list[dict[str, float]]


@dataclass(frozen=True)
class Served:
    """The report of one process."""

    report: Mapping[str, Any]
    log: str

    @property
    def labels(self) -> list[str]:
        return list(self.report["asked"])

    def answers(self, label: str) -> list[Answer]:
        return [Answer(**answer) for answer in self.report["asked"][label]["answers"]]

    def hit_tokens(self, label: str) -> list[int]:
        return [answer.hit_tokens for answer in self.answers(label)]

    def kept_blocks(self, label: str, kind: str) -> list[int]:
        """Cached blocks of each group of one kind, right after ``label`` was answered."""
        return self.report["asked"][label]["kept_blocks"][kind]

    def logprob_error(self, label: str, reference: Served) -> float:
        """The largest difference of a top-5 log-probability from the reference's."""
        return max(
            logprob_error(mine, expected)
            for mine, expected in zip(self.answers(label), reference.answers(label), strict=True)
        )


def logprob_error(answer: Answer, reference: Answer) -> float:
    """The largest difference of a top-5 log-probability from the reference's."""
    return max(
        abs(logprob - theirs.get(token, min(theirs.values())))
        for step, theirs in zip(answer.logprobs, reference.logprobs, strict=True)
        for token, logprob in step.items()
    )


Serve = Callable[..., Served]
"""What the fixture ``serve`` is."""


@dataclass(frozen=True)
class Ended:
    """How a process ended, and its output."""

    exit_code: int
    log: str


EXAMPLES = Path(__file__).parents[2] / "examples"


def example() -> ModuleType:
    """`examples/retention.py`, whose model the tests serve."""
    spec = importlib.util.spec_from_file_location("example_retention", EXAMPLES / "retention.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    with mock.patch.object(sys, "path", [str(EXAMPLES), *sys.path]):
        spec.loader.exec_module(module)
    return module


def start(
    model: Path,
    report: Path,
    environ: Mapping[str, str],
    engine: Mapping[str, Any],
    scenarios: Sequence[str],
    folder: Path | None = None,
) -> Ended:
    """Run the workload to its end; see `run`."""
    options = json.dumps({"engine": engine, "scenarios": scenarios})
    return run("serve_workload.py", [str(model), str(report), options], environ, folder)


def run(
    script: str,
    arguments: Sequence[str],
    environ: Mapping[str, str],
    folder: Path | None = None,
    most_s: float = 240,
) -> Ended:
    """Run a script of this folder to its end, in an environment that holds no settings but these.

    Args:
        folder: The working directory; that of this process if None.
        most_s: Seconds that it may take.
    """
    inherited = {
        name: value
        for name, value in os.environ.items()
        if name != INTERVAL and not name.startswith("VLLM_ASCEND_KVEXT_")
    }
    finished = subprocess.run(
        [sys.executable, "-I", Path(__file__).with_name(script), *arguments],
        env={**inherited, **ENGINE_ENVIRON, **environ},
        cwd=folder,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=most_s,
        check=False,
    )
    return Ended(finished.returncode, finished.stdout)
