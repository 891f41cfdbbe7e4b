# SPDX-License-Identifier: Apache-2.0
"""Prints what was served as tables at the end, and writes them to ``out/``."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

Report = Callable[[str, float, float, dict[str, int]], None]
Cell = Callable[[str, str, float, float], None]
ROWS = pytest.StashKey[list[tuple[str, float, float, dict[str, int]]]]()
CELLS = pytest.StashKey[list[tuple[str, str, float, float]]]()


def pytest_configure(config: pytest.Config) -> None:
    config.stash[ROWS] = []
    config.stash[CELLS] = []


@pytest.fixture
def report_model(request: pytest.FixtureRequest) -> Report:
    rows = request.config.stash[ROWS]
    return lambda *row: rows.append(row)


@pytest.fixture
def report_cell(request: pytest.FixtureRequest) -> Cell:
    """Feature, model, the largest difference, and that of the control."""
    cells = request.config.stash[CELLS]
    return lambda *cell: cells.append(cell)


def pytest_terminal_summary(
    terminalreporter: pytest.TerminalReporter, config: pytest.Config
) -> None:
    rows, cells = config.stash[ROWS], config.stash[CELLS]
    if rows:
        write(terminalreporter, "served", model_lines(rows), "emulated_models.txt")
    if cells:
        write(terminalreporter, "features", feature_lines(cells), "emulated_features.txt")


def feature_lines(cells: list[tuple[str, str, float, float]]) -> list[str]:
    """A row per feature; in a cell the largest difference and, behind a slash, the control's."""
    models = list(dict.fromkeys(model for _, model, *_ in cells))
    found = {(feature, model): f"{one:.1e} / {other:.2g}" for feature, model, one, other in cells}
    lines = [f"{'feature':24}" + "".join(f" {model:>26}" for model in models)]
    for feature in dict.fromkeys(feature for feature, *_ in cells):
        of_models = (found.get((feature, model), "") for model in models)
        lines.append(f"{feature:24}" + "".join(f" {cell:>26}" for cell in of_models))
    return lines


def model_lines(rows: list[tuple[str, float, float, dict[str, int]]]) -> list[str]:
    lines = [f"{'model':36} {'largest':>9} {'control':>9} operators (calls)"]
    for name, largest, control, operators in rows:
        counted = ", ".join(f"{key} {operators[key]}" for key in sorted(operators))
        lines.append(f"{name:36} {largest:9.1e} {control:9.1e} {len(operators)}: {counted}")
    names = {name for *_, operators in rows for name in operators}
    lines.append(f"{len(names)} operators in all")
    return lines


def write(
    terminalreporter: pytest.TerminalReporter, title: str, lines: list[str], file: str
) -> None:
    terminalreporter.section(
        f"{title} on the emulated NPU: largest difference of a log-probability"
    )
    terminalreporter.write_line("\n".join(lines))
    folder = Path("out")
    folder.mkdir(exist_ok=True)
    (folder / file).write_text("\n".join(lines) + "\n")
