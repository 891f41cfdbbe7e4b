# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vllm-ascend-kvext project
"""The reports of docs/upstream: their scripts, what they should print, and what they print."""

from __future__ import annotations

import os
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path

from support import run_scripts

FOLDER = Path(__file__).parents[2] / "docs" / "upstream"
WRONG = "WRONG"
"""A line with this word shows the defect."""

_SCRIPT = re.compile(r"```python\n(.*?)```", re.DOTALL)
_OUTPUT = re.compile(
    r"^It prints (on an emulated NPU )?with (vLLM\S* \S+):\n\n```text\n(.*?)```",
    re.DOTALL | re.MULTILINE,
)
_RELEASES = re.compile(r"^\*\*Releases\.\*\* ([^.]*(?:\.\d[^.]*)*)\.", re.MULTILINE)


@dataclass(frozen=True)
class Report:
    """One report with a script.

    Attributes:
        name: The name of its file, without the ending.
        script: The script that shows the defect.
        outputs: What the script prints, by release, such as ``vLLM 0.30.0``.
        releases: The releases that have the defect.
        needs_npu: Whether the script runs on an NPU only, or on an emulated one.
    """

    name: str
    script: str
    outputs: Mapping[str, str]
    releases: frozenset[str]
    needs_npu: bool


def reports() -> list[Report]:
    """All reports that say what their script prints."""
    found = []
    for page in sorted(FOLDER.glob("*.md")):
        text = page.read_text(encoding="utf-8")
        printed = _OUTPUT.findall(text)
        if printed:
            (script,) = _SCRIPT.findall(text)
            (releases,) = _RELEASES.findall(text)
            (place,) = {place for place, _, _ in printed}
            outputs = {release: output for _, release, output in printed}
            found.append(
                Report(page.stem, script, outputs, frozenset(releases.split(" and ")), bool(place))
            )
    return found


def reports_of(release: str, needs_npu: bool = False) -> list[Report]:
    """The reports that say what their script prints with this release."""
    return [
        report
        for report in reports()
        if release in report.outputs and report.needs_npu == needs_npu
    ]


def run(chosen: Iterable[Report], path: Iterable[Path] = ()) -> dict[str, str]:
    """What the scripts print, by report. The scripts run without plugins of vLLM.

    Args:
        chosen: The reports.
        path: More folders from which the scripts import.
    """
    variables = {name: value for name, value in os.environ.items() if not name.startswith("VLLM_")}
    variables |= {"VLLM_PLUGINS": "", "VLLM_LOGGING_LEVEL": "ERROR"}
    variables["PYTHONPATH"] = os.pathsep.join(map(str, path))
    return run_scripts.run({report.name: report.script for report in chosen}, variables)
