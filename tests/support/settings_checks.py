# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vllm-ascend-kvext project
"""Runs the starts of `support.settings_starts`, on a CPU or on the emulated NPU."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from support.scenarios.processes import LazyReports, Plan, Platform
from support.scenarios.settings import IN_HOST_MEMORY, ON_DEVICE, SEGMENTS
from support.settings_starts import STOCK, starts

NAMES = list(starts(Path("/")))


class Starts:
    """The processes of all starts. Each process begins when it is asked for."""

    def __init__(
        self, folders: pytest.TempPathFactory, model: Path, platform: Platform, **engine: Any
    ) -> None:
        self._starts = starts(folders.mktemp("shared tier"))
        processes = [
            (
                start.environ,
                {
                    name: Plan(model, ["answers"], "settings", engine | _connector(options))
                    for name, options in start.engines.items()
                },
            )
            for start in self._starts.values()
        ]
        self._reports = LazyReports(folders, processes, platform)

    def check(self, name: str, tolerance: float) -> None:
        """Assert that each engine of a start gives the answers of vLLM alone."""
        (reference,) = self._starts[STOCK].engines
        for engine, options in self._starts[name].engines.items():
            found = self._reports[engine]
            assert found.labels == ["new", ON_DEVICE, IN_HOST_MEMORY]
            found.check_equal(self._reports[reference], found.labels, tolerance)
            found.check_nothing_is_left()
            assert min(found.hit_tokens(ON_DEVICE)) > 0
            assert ("own" in found.report) is (options is not None)
            if options is None:
                continue
            has_segments = options.get("segments") is not None
            segments = "SegmentsSide" if has_segments else "SchedulerExtension"
            assert found.report["facts"][SEGMENTS] == segments
            if options.get("store_policy") == "all":
                assert min(found.hit_tokens(IN_HOST_MEMORY)) > 0


def _connector(options: Any) -> dict[str, Any]:
    if options is None:
        return {}
    return {
        "kv_transfer_config": {
            "kv_connector": "KvextConnector",
            "kv_role": "kv_both",
            "kv_load_failure_policy": "recompute",
            "kv_connector_extra_config": options,
        }
    }
