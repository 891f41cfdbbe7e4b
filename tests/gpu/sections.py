# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vllm-ascend-kvext project
"""Sections of a long check: each in its own process, with a time limit, and a report at once.

A section writes rows to a file as it finds them. So a section that is cut off, or the whole check,
loses nothing that was found.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import time
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from dataclasses import asdict, dataclass, field
from itertools import groupby
from pathlib import Path
from typing import Any

OK = "ok"
WRONG = "WRONG"
"""The outcome of a check that found an error, or of a control that found none."""
MEASURED = "measured"
LEFT_OUT = "left out"

ENDED = "ended"
_TAIL_CHARS = 3000


@dataclass(frozen=True)
class Row:
    """One thing that was checked or measured.

    Attributes:
        what: What was checked, as a claim.
        found: The numbers, in words.
    """

    what: str
    outcome: str
    found: str = ""
    facts: Mapping[str, Any] = field(default_factory=dict)


class Rows:
    """The rows of one section, in a file with a JSON object per line."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def add(self, what: str, outcome: str, found: str = "", **facts: Any) -> None:
        """Write a row. It is in the file when the call returns."""
        line = json.dumps(asdict(Row(what, outcome, found, facts)), default=str)
        with self.path.open("a", encoding="utf-8") as file:
            file.write(line + "\n")
        print(f"{outcome:9} {what}: {found}", flush=True)

    def check(self, what: str, is_right: bool, found: str = "", **facts: Any) -> bool:
        self.add(what, OK if is_right else WRONG, found, **facts)
        return is_right

    def read(self) -> list[Row]:
        """The rows so far. A line that is not complete is left out."""
        if not self.path.exists():
            return []
        rows = []
        for line in self.path.read_text(encoding="utf-8").splitlines():
            with contextlib.suppress(ValueError):
                rows.append(Row(**json.loads(line)))
        return rows


@dataclass(frozen=True)
class Section:
    """A part of the check.

    Attributes:
        command: The process. It gets the path of its rows as its last argument.
        max_s: The longest time of the process.
        stage: Sections of one stage run at the same time; stages follow each other.
    """

    name: str
    command: Sequence[str]
    max_s: float
    stage: int
    environ: Mapping[str, str] = field(default_factory=dict)


@dataclass
class Ended:
    """How a section ended.

    Attributes:
        how: `ENDED`, or why it did not end by itself.
        log_tail: The end of its output if something went wrong.
    """

    section: Section
    how: str
    seconds: float = 0.0
    rows: Sequence[Row] = ()
    log_tail: str = ""

    @property
    def is_good(self) -> bool:
        return self.how == ENDED and all(row.outcome != WRONG for row in self.rows)


def run_section(section: Section, folder: Path, max_s: float) -> Ended:
    """Run a section to its end or to a time limit. Its process and all that it has started end."""
    name = section.name.replace(" ", "_").replace(",", "")
    rows = Rows(folder / f"{name}.rows.jsonl")
    rows.path.unlink(missing_ok=True)
    log_path = folder / f"{name}.log"
    began_s = time.monotonic()
    with log_path.open("w") as log:
        process = subprocess.Popen(
            [*section.command, str(rows.path)],
            stdout=log,
            stderr=subprocess.STDOUT,
            env={**os.environ, **section.environ},
            start_new_session=True,
        )
        try:
            exit_code = process.wait(min(section.max_s, max_s))
            how = ENDED if not exit_code else f"failed with exit code {exit_code}"
        except subprocess.TimeoutExpired:
            how = f"cut off after {time.monotonic() - began_s:.0f} s"
        finally:
            # What the section has started has its process group.
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()
    ended = Ended(section, how, time.monotonic() - began_s, rows.read())
    if not ended.is_good:
        ended.log_tail = log_path.read_text(errors="replace")[-_TAIL_CHARS:]
    return ended


class Report:
    """What is known so far, as JSON and as Markdown. Both are written whenever a section ends."""

    def __init__(self, folder: Path, title: str, facts: Mapping[str, str]) -> None:
        self._folder = folder
        self._title = title
        self.facts = dict(facts)
        self.ended: list[Ended] = []

    def add(self, *ended: Ended) -> None:
        self.ended += ended
        self.write()

    def write(self) -> None:
        found = {"facts": self.facts, "sections": [asdict(each) for each in self.ended]}
        for name, text in (
            ("report.json", json.dumps(found, indent=1, default=str) + "\n"),
            ("report.md", "\n".join(self.markdown()) + "\n"),
        ):
            # A reader never finds half a report.
            path = self._folder / name
            path.with_suffix(".new").write_text(text, encoding="utf-8")
            path.with_suffix(".new").replace(path)

    def markdown(self) -> list[str]:
        lines = [f"# {self._title}", "", "| | |", "| --- | --- |"]
        lines += [f"| {name} | {_cell(value)} |" for name, value in self.facts.items()]
        wrong = [each.section.name for each in self.ended if not each.is_good]
        rows = [row for each in self.ended for row in each.rows]
        counts = ", ".join(
            f"{sum(row.outcome == outcome for row in rows)} {outcome}"
            for outcome in (OK, WRONG, MEASURED, LEFT_OUT)
        )
        lines += ["", f"{len(self.ended)} sections; {counts}."]
        if wrong:
            lines += ["", f"**Not all is right: {', '.join(wrong)}.**"]
        for each in self.ended:
            lines += ["", f"## {each.section.name}", "", f"{each.how}, {each.seconds:.0f} s", ""]
            if each.rows:
                lines += ["| what | outcome | found |", "| --- | --- | --- |"]
            for row in each.rows:
                lines.append(f"| {_cell(row.what)} | {row.outcome} | {_cell(row.found)} |")
            if each.log_tail:
                lines += ["", "```", *each.log_tail.splitlines(), "```"]
        return lines


def _cell(text: str) -> str:
    return " ".join(str(text).split()).replace("|", "\\|")


def run_all(sections: Sequence[Section], report: Report, folder: Path, budget_s: float) -> None:
    """Run sections stage by stage, while there is time. The report says what was not started."""
    end_s = time.monotonic() + budget_s
    for _, stage in groupby(sorted(sections, key=lambda each: each.stage), lambda each: each.stage):
        together = list(stage)
        left_s = end_s - time.monotonic()
        if left_s < 1:
            report.add(*(Ended(each, "not started: no time was left") for each in together))
            continue
        with ThreadPoolExecutor(len(together)) as threads:
            running = [threads.submit(run_section, each, folder, left_s) for each in together]
            for each in as_completed(running):
                report.add(each.result())
