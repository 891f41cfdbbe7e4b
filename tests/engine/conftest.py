# SPDX-License-Identifier: Apache-2.0
"""Engines that several tests look at are started once per session."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import tiny_models
from support.scenarios import processes
from support.scenarios.answers import Served
from support.scenarios.processes import CPU, DENSE, NO_PREFIX_CACHING, PLUGIN_OFF, Plan, Serve
from support.scenarios.retention import POOL_TOKENS


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
            pool = {"num_gpu_blocks_override": POOL_TOKENS // CPU.block_tokens}
            plan = Plan(tiny_model, scenarios, "retention", pool | engine)
            done[key] = processes.serve(tmp_path_factory, {key: plan}, environ)[key]
        return done[key]

    return serve


@pytest.fixture(scope="module")
def offloading_in_effect() -> Iterator[None]:
    """The patches of KvextConnector, in this process."""
    from support.connector.offload_run import offloading_installed

    with offloading_installed():
        yield


@pytest.fixture(scope="session")
def uncached(serve: Serve) -> Served:
    """What is right: no plugin, no prefix caching."""
    return serve(PLUGIN_OFF, **NO_PREFIX_CACHING)


@pytest.fixture(scope="session")
def dense(serve: Serve) -> Served:
    """Stock prefix caching of every block: the plugin is off."""
    return serve(PLUGIN_OFF, **DENSE)
