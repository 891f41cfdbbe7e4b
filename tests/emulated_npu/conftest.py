# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vllm-ascend-kvext project
"""Models, which are written once."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from pathlib import Path

import draft_models
import pytest
import random_models


@pytest.fixture(scope="session")
def folder_of(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """The folder of a model of `random_models` or `draft_models`."""

    @cache
    def folder_of(model: str) -> Path:
        folder = tmp_path_factory.mktemp("model")
        writers = draft_models.WRITERS | draft_models.STATE_WRITERS
        if model in writers:
            writers[model](folder)
        else:
            random_models.write(folder, random_models.CONFIGS[model]())
        return folder

    return folder_of
