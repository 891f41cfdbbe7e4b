# SPDX-License-Identifier: Apache-2.0
"""Engines that several tests look at are started once per session."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import connector_models
import pytest
from support.scenarios import processes
from support.scenarios.answers import Served
from support.scenarios.processes import NO_PREFIX_CACHING, PLUGIN_OFF, Plan, Serve


@pytest.fixture(scope="session")
def tiny_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A Gemma 3 with random weights: five sliding-window groups and one full group."""
    folder = tmp_path_factory.mktemp("model")
    connector_models.write_one_window(folder)
    return folder


@pytest.fixture(scope="session")
def serve(tiny_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Serve:
    """Serve scenarios of `retention` with the given variables; equal calls share one process."""
    done: dict[str, Served] = {}

    def serve(
        environ: Mapping[str, str],
        scenarios: Sequence[str] = ("chat", "storm", "corruption", "branches"),
        **engine: Any,
    ) -> Served:
        key = json.dumps([environ, scenarios, engine], sort_keys=True)
        if key not in done:
            plan = Plan(tiny_model, scenarios, "retention", engine)
            done[key] = processes.serve(tmp_path_factory, {key: plan}, environ)[key]
        return done[key]

    return serve


@pytest.fixture(scope="session")
def uncached(serve: Serve) -> Served:
    """What is right: no plugin, no prefix caching."""
    return serve(PLUGIN_OFF, **NO_PREFIX_CACHING)


@pytest.fixture(scope="session")
def dense(serve: Serve) -> Served:
    """Stock prefix caching: the plugin is off, no interval is set."""
    return serve(PLUGIN_OFF)
