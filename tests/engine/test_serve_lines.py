# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vllm-ascend-kvext project
"""Every ``vllm serve`` line of the documentation starts an engine of a hybrid model on a CPU.

An environment with LMCache starts LMCache's lines, any other one starts the rest. The lines with
connectors of vLLM-Ascend start on the emulated NPU only.
"""

from __future__ import annotations

from importlib.util import find_spec
from pathlib import Path

import pytest
from support.serve_lines import ServeLine, serve_lines, start

ASCEND = "MultiConnector"
LINES = serve_lines()
LMCACHE = "LMCacheMPConnector"
STARTED = [
    line
    for line in LINES
    if (line.connector == LMCACHE) is bool(find_spec("lmcache")) and line.connector != ASCEND
]


def test_lines_of_all_kinds_are_found() -> None:
    assert {line.connector for line in LINES} == {"", "KvextConnector", LMCACHE, ASCEND}
    assert {line.place.partition(":")[0] for line in LINES} >= {"README.md", "docs/blending.md"}


@pytest.mark.parametrize("line", STARTED, ids=lambda line: line.place)
def test_a_printed_line_starts(line: ServeLine, tiny_model: Path) -> None:
    """LMCache's lines only start the configuration; ``test_lmcache_engine.py`` has a server."""
    is_lmcache = line.connector == LMCACHE
    stage = "config" if is_lmcache else "engine"
    started = start(line, tiny_model, stage, {}, tiny_model)
    assert started.report, started.log[-4000:]
    assert started.report["policy"] == ("recompute" if line.connector else "")
    if not is_lmcache:
        assert started.report["connector"] == (line.connector or "NoneType")
        assert started.report["recomputes"] is bool(line.connector)
        assert len(started.report["answer"]) == 4
