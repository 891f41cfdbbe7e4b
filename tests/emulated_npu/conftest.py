# SPDX-License-Identifier: Apache-2.0
"""Prints what was served as one table at the end, and writes it to ``out/emulated_models.txt``."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

Report = Callable[[str, float, float, dict[str, int]], None]
ROWS = pytest.StashKey[list[tuple[str, float, float, dict[str, int]]]]()


def pytest_configure(config: pytest.Config) -> None:
    config.stash[ROWS] = []


@pytest.fixture
def report_model(request: pytest.FixtureRequest) -> Report:
    rows = request.config.stash[ROWS]
    return lambda *row: rows.append(row)


def pytest_terminal_summary(
    terminalreporter: pytest.TerminalReporter, config: pytest.Config
) -> None:
    rows = config.stash[ROWS]
    if not rows:
        return
    lines = [f"{'model':36} {'largest':>9} {'control':>9} operators (calls)"]
    for name, largest, control, operators in rows:
        counted = ", ".join(f"{key} {operators[key]}" for key in sorted(operators))
        lines.append(f"{name:36} {largest:9.1e} {control:9.1e} {len(operators)}: {counted}")
    names = {name for *_, operators in rows for name in operators}
    lines.append(f"{len(names)} operators in all")
    terminalreporter.section("served on the emulated NPU: largest difference of a log-probability")
    terminalreporter.write_line("\n".join(lines))
    folder = Path("out")
    folder.mkdir(exist_ok=True)
    (folder / "emulated_models.txt").write_text("\n".join(lines) + "\n")
