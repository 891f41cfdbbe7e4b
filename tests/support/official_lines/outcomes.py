# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vllm-ascend-kvext project
"""What came of a line, in one text per arm, and the texts that are kept as data.

started: STAGE          the stages before it were reached, too
refused: SENTENCE       this package does not start it, and says what to change
not emulated: REASON    the emulation, or this environment, lacks something
upstream: ERROR         vLLM or vLLM-Ascend alone does not start it
broken: ERROR           it starts without this package, and not with it
"""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from support.official_lines import ARMS, OfficialLine
from support.official_lines.families import WITHOUT_KV, write_configs
from support.official_lines.start import read_by_plugins
from support.scenarios import processes

START = Path(__file__).with_name("start.py")

OWN_ERRORS = ("ConnectorError", "HostMemoryError", "LayoutError", "SettingsError")
"""Errors of this package that a user can cause."""

MISSING: Mapping[str, str] = {
    "import Ray": "Ray is not installed",
    "FP8_ATTENTION": "8-bit floats in the KV cache need an A5, and the emulated NPU is an A2",
    "Flash Comm v1 requires": "the line's model has no experts, and the small one has some",
    "Dots3NoteForCausalLM": "the classes of the model cannot be imported here",
    "Arctic Inference": "arctic-inference, which makes suffix drafts, is not installed",
}
"""By a part of an error: what the environment of the tests lacks."""

LINES_PER_ROUND = 30

MAX_DEVICES = 256
"""The devices of the emulation in the stage ``configuration``, which only counts them."""


def outcome(found: Mapping[str, Any], without: Mapping[str, Any]) -> str:
    """The outcome of a line, from what it and the same line without this package reported."""
    error = _one_line(found.get("error", ""))
    if not error:
        return f"started: {found['stage']}"
    if without.get("error"):
        # This package may refuse the line before the others do. Without it, it starts neither.
        error = _one_line(without["error"])
        reason = next((text for part, text in MISSING.items() if re.search(part, error)), None)
        return f"not emulated: {reason}" if reason else f"upstream: {error}"
    if any(f"{name}: " in error for name in OWN_ERRORS) or found["raised_by"].endswith("kvext"):
        return f"refused: {error.partition(': ')[2]}"
    return f"broken: {error}"


def _one_line(error: str) -> str:
    """An error without what differs between machines."""
    error = re.sub(r"\s*For further information visit \S+", "", error)
    error = re.sub(r"/\S+/(?=[\w.-]+)", "", error)
    return " ".join(error.split())[:400]


class Starts:
    """Lines that are started in a process of their own, one after the other.

    Args:
        lines: The lines.
        folder: Gets the models, and the files of the process.
        stage: See `OfficialLine.arguments`.
        arms: Keys of `ARMS`. The first is the one without this package.
    """

    def __init__(
        self,
        lines: Sequence[OfficialLine],
        folder: Path,
        stage: str,
        arms: Sequence[str] = (*ARMS,),
    ) -> None:
        models = folder / "models"
        write_configs(models, stage)
        self._arms = arms
        self._report = folder / "report.jsonl"
        self._log = folder / "log"
        # Lines with the same variables are started together, in all arms before the next ones.
        by_variables = sorted(
            lines, key=lambda line: sorted(read_by_plugins(line.variables).items())
        )
        startable = [line for line in by_variables if line.family]
        several = (
            startable[at : at + LINES_PER_ROUND] for at in range(0, len(startable), LINES_PER_ROUND)
        )
        cases = {
            f"{line.name} {arm}": {
                "stage": stage,
                "environ": {**line.variables, **ARMS[arm][0]},
                "arguments": line.arguments(models, arm, stage),
            }
            for some in several
            for arm in arms
            for line in some
        }
        asked = folder / "cases.json"
        asked.write_text(json.dumps(cases))
        num_devices = "1" if stage == "engine" else str(MAX_DEVICES)
        environ = {
            name: value
            for name, value in os.environ.items()
            if not name.startswith("VLLM_ASCEND_KVEXT_")
        }
        with self._log.open("w") as log:
            self._process = subprocess.Popen(
                [sys.executable, str(START), str(asked), str(self._report)],
                env={**environ, **processes.NPU.environ, "EMULATED_NPU_DEVICES": num_devices},
                stdout=log,
                stderr=log,
                cwd=folder,
            )

    def reports(self, line: OfficialLine) -> dict[str, Any]:
        """What a line reported, by arm. It is waited for."""
        while True:
            has_ended = self._process.poll() is not None
            text = self._report.read_text() if self._report.exists() else ""
            complete = text[: text.rfind("\n") + 1].splitlines()
            found = {each["name"]: each for each in map(json.loads, complete)}
            names = {arm: f"{line.name} {arm}" for arm in self._arms}
            if all(name in found for name in names.values()):
                return {arm: found[name] for arm, name in names.items()}
            assert not has_ended, self._log.read_text()[-4000:]
            time.sleep(0.2)

    def outcomes(self, line: OfficialLine) -> dict[str, str]:
        """The outcomes of a line, by arm."""
        if not line.family:
            return dict.fromkeys(self._arms, f"not emulated: {WITHOUT_KV[line.page]}")
        reports = self.reports(line)
        without = reports[self._arms[0]]
        return {arm: outcome(report, without) for arm, report in reports.items()}

    def end(self) -> None:
        self._process.kill()
        self._process.wait()
