# SPDX-License-Identifier: Apache-2.0
"""Activates vllm-ascend's real platform patches before any test module imports vLLM."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from pathlib import Path

import ascend_sources
import pytest
from npu_platform import Start, starter

HERE = Path(__file__).parent


def pytest_configure(config: pytest.Config) -> None:
    try:
        folder = ascend_sources.sources()
        if folder is not None and _is_alone(config):
            ascend_sources.activate(folder)
    except ValueError as error:
        raise pytest.UsageError(str(error)) from error


def _is_alone(config: pytest.Config) -> bool:
    """Whether this process runs these tests only: the patches stay for its whole life."""
    selected = [Path(argument.partition("::")[0]).resolve() for argument in config.args]
    return all(path == HERE or HERE in path.parents for path in selected)


@pytest.fixture(scope="session")
def ascend_folder() -> Path:
    folder = ascend_sources.sources()
    assert folder is not None, "a module without vllm_ascend is skipped as a whole"
    return folder


@pytest.fixture(scope="session")
def start_on_npu(ascend_folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Start:
    return starter(ascend_folder, tmp_path_factory.mktemp("npu"))


class _FreeListDiagnostics(logging.Handler):
    """Collects what vllm-ascend's guards of the free list complain about."""

    def __init__(self) -> None:
        super().__init__(logging.WARNING)
        self.messages: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        message = record.getMessage()
        if "SWA_BLOCK_DIAG" in message:
            self.messages.append(message)


@pytest.fixture(autouse=True)
def no_free_list_diagnostics() -> Iterator[None]:
    """vllm-ascend drops double frees and the like with a warning; a test must not cause any."""
    diagnostics = _FreeListDiagnostics()
    logger = logging.getLogger("vllm")  # vllm-ascend logs through vLLM's loggers
    logger.addHandler(diagnostics)
    yield
    logger.removeHandler(diagnostics)
    assert not diagnostics.messages
