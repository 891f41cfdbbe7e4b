# SPDX-License-Identifier: Apache-2.0
"""What only vLLM-Ascend has, on its real platform patches: see ``support.family``."""

from __future__ import annotations

from pathlib import Path

import ascend_sources
import pytest
from npu_platform import Start, starter
from support import family

collect_ignore_glob = [] if family.IS_ASCEND else ["test_*.py"]


@pytest.fixture(scope="session")
def ascend_folder() -> Path:
    folder = ascend_sources.sources()
    assert folder is not None, "it is activated"
    return folder


@pytest.fixture(scope="session")
def start_on_npu(ascend_folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Start:
    return starter(ascend_folder, tmp_path_factory.mktemp("npu"))
