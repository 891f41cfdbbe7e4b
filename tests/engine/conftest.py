# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vllm-ascend-kvext project
"""Engines that several tests look at are started once per session."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import cache
from pathlib import Path

import pytest
import tiny_models


@pytest.fixture(scope="session")
def model_folder(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """The folder of a model of `tiny_models`."""

    @cache
    def model_folder(name: str) -> Path:
        return tiny_models.write(name, tmp_path_factory.mktemp("model"))

    return model_folder


@pytest.fixture(scope="session")
def tiny_model(model_folder: Callable[[str], Path]) -> Path:
    """A Gemma 3: five sliding-window groups and one full group."""
    return model_folder("one window")


@pytest.fixture(scope="module")
def offloading_in_effect() -> Iterator[None]:
    """The patches of KvextConnector, in this process."""
    from support.connector.offload_run import offloading_installed

    with offloading_installed():
        yield
