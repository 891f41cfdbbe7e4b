# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vllm-ascend-kvext project
"""Command lines, tables, verdicts and result files of benchmarks. Imports nothing of vLLM."""

from __future__ import annotations

import argparse
import enum
import json
import statistics
from collections.abc import Iterable, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[2]


def parser(doc: str | None, out: str = "") -> argparse.ArgumentParser:
    """A command line with ``--quick`` and, if there is an output folder, ``--out``.

    Args:
        doc: The description.
        out: The name of the folder below ``out/``; empty for a benchmark that only prints.
    """
    found = argparse.ArgumentParser(
        description=doc, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    found.add_argument("--quick", action="store_true", help="a few small measurements")
    if out:
        found.add_argument("--out", type=Path, default=ROOT / "out" / out)
    return found


class Table:
    """Columns of fixed widths, so that a row can be printed as soon as it is measured.

    Args:
        columns: ``name:spec`` each, with a format spec for text such as ``<12`` or ``>8``.
    """

    def __init__(self, *columns: str) -> None:
        self._specs = [column.rpartition(":")[2] for column in columns]
        self.head = self.line(*(column.rpartition(":")[0] for column in columns))

    def line(self, *cells: object) -> str:
        """One row; None is an empty cell."""
        texts = ["" if cell is None else str(cell) for cell in cells]
        pairs = zip(texts, self._specs, strict=True)
        return " ".join(f"{text:{spec}}" for text, spec in pairs).rstrip()


def verdict(is_met: bool, text: str) -> str:
    """A line that says whether a target is met."""
    return f"{'met' if is_met else 'NOT MET':8} {text}"


def median_ratio(ones: Sequence[float], others: Sequence[float]) -> float:
    """The median over the rounds of (one / other), where both belong to the same round.

    Raises:
        ValueError: There are no rounds, or the numbers of rounds differ.
    """
    return statistics.median(one / other for one, other in zip(ones, others, strict=True))


def write(out: Path, lines: Iterable[str], rows: Iterable[Any], name: str = "") -> None:
    """Write the printed lines as text, and all numbers as JSON.

    Args:
        out: The folder. It is made if it does not exist.
        lines: The printed lines.
        rows: The rows as dataclasses.
        name: The name of both files; if empty, they are ``table.txt`` and ``results.json``.
    """
    out.mkdir(parents=True, exist_ok=True)
    text, numbers = (f"{name}.txt", f"{name}.json") if name else ("table.txt", "results.json")
    (out / text).write_text("\n".join([*lines, ""]), encoding="utf-8")
    found = [_plain(asdict(row)) for row in rows]
    (out / numbers).write_text(json.dumps(found, indent=1) + "\n", encoding="utf-8")


def _plain(value: Any) -> Any:
    """Plain data in which enums are replaced by their values, also as keys of dictionaries."""
    if isinstance(value, enum.Enum):
        return value.value
    if isinstance(value, dict):
        return {_plain(key): _plain(each) for key, each in value.items()}
    return [_plain(each) for each in value] if isinstance(value, (list, tuple)) else value
