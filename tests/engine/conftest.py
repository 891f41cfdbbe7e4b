# SPDX-License-Identifier: Apache-2.0
"""Engines that several tests look at are started once per session."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import connector_models
import lmcache_runs
import pytest
import served
from served import Serve


@pytest.fixture(scope="session")
def tiny_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A Gemma 3 with random weights: five sliding-window groups and one full group."""
    folder = tmp_path_factory.mktemp("model")
    served.example().write_model(folder, window_tokens=served.WINDOW_TOKENS)
    return folder


@pytest.fixture(scope="session")
def serve(tiny_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Serve:
    """Serve scenarios in a process with the given variables; equal calls share one process."""
    done: dict[str, served.Served] = {}

    def serve(
        environ: Mapping[str, str],
        scenarios: Sequence[str] = ("chat", "storm", "corruption", "branches"),
        **engine: Any,
    ) -> served.Served:
        key = json.dumps([environ, scenarios, engine], sort_keys=True)
        if key not in done:
            report = tmp_path_factory.mktemp("report") / "report.json"
            ended = served.start(tiny_model, report, environ, engine, scenarios)
            if ended.exit_code:
                pytest.fail(f"exit code {ended.exit_code} with {key}:\n{ended.log[-6000:]}")
            done[key] = served.Served(json.loads(report.read_text()), ended.log)
        return done[key]

    return serve


@pytest.fixture(scope="session")
def uncached(serve: Serve) -> served.Served:
    """What is right: no plugin, no prefix caching."""
    return serve(served.PLUGIN_OFF, enable_prefix_caching=False)


@pytest.fixture(scope="session")
def dense(serve: Serve) -> served.Served:
    """Stock prefix caching: the plugin is off, no interval is set."""
    return serve(served.PLUGIN_OFF)


@pytest.fixture(scope="session")
def lmcache_models(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """A model with two KV cache groups, and one with one."""
    folders = {}
    for name in ("alternating", "full"):
        folders[name] = tmp_path_factory.mktemp("model")
        connector_models.WRITERS[name](folders[name])
    return folders


@pytest.fixture(scope="session")
def run_lmcache(
    lmcache_models: dict[str, Path], tmp_path_factory: pytest.TempPathFactory
) -> lmcache_runs.Run:
    """Serve plans with LMCacheMPConnector; see ``lmcache_runs.serve``."""

    def run(plans: lmcache_runs.Plans, **more: Any) -> dict[str, served.Served]:
        return lmcache_runs.serve(lmcache_models, tmp_path_factory.mktemp("served"), plans, **more)

    return run
