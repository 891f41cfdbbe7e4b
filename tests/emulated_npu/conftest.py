# SPDX-License-Identifier: Apache-2.0
"""Models, which are written once; how far answers were from their references is printed."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from pathlib import Path

import draft_models
import pytest
import random_models

LINES = pytest.StashKey[list[str]]()
ReportCell = Callable[..., None]


def pytest_configure(config: pytest.Config) -> None:
    config.stash[LINES] = []


@pytest.fixture(scope="session")
def folder_of(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """Where a model of `random_models`, or one with drafts, lies."""

    @cache
    def folder_of(model: str) -> Path:
        folder = tmp_path_factory.mktemp("model")
        if model in draft_models.WRITERS:
            draft_models.WRITERS[model](folder)
        else:
            random_models.write(folder, random_models.MODELS[model]())
        return folder

    return folder_of


@pytest.fixture
def report_cell(request: pytest.FixtureRequest) -> ReportCell:
    """Feature, model, the largest difference, that of the control, and what else there is to say.

    Differences are of log-probabilities.
    """
    lines = request.config.stash[LINES]

    def report(
        feature: str, model: str, largest: float, control: float, remark: object = ""
    ) -> None:
        lines.append(f"{feature:26} {model:36} {largest:8.1e} {control:8.2g} {remark}")

    return report


def pytest_terminal_summary(
    terminalreporter: pytest.TerminalReporter, config: pytest.Config
) -> None:
    if config.stash[LINES]:
        terminalreporter.section("largest difference of a log-probability, and the control's")
        terminalreporter.write_line("\n".join(config.stash[LINES]))
