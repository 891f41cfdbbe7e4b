# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vllm-ascend-kvext project
"""Engines whose weight files are replaced while the engines start or run.

``replaced_by`` of a plan is a file. Its bytes replace those of the model. ``replaced`` says when.
Without it, a plan's engine is like others.
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from support.scenarios import connector, scenario

shared = connector.shared


class Engine(connector.Engine):
    """An engine whose files are replaced right after its workers have loaded them."""

    def __init__(self, plan: Mapping[str, Any]) -> None:
        from vllm.v1.engine.core import EngineCore

        initialize = EngineCore._initialize_kv_caches

        def replace_and_initialize(core: Any, *args: Any, **more: Any) -> Any:
            _replace(plan)
            return initialize(core, *args, **more)

        if plan["replaced"] == "while it starts":
            EngineCore._initialize_kv_caches = replace_and_initialize
        try:
            super().__init__(dict(plan))
        finally:
            EngineCore._initialize_kv_caches = initialize


@scenario
def reloaded(engine: Engine) -> None:
    """Load new weights from the old folder in a running engine, without any reset."""
    _replace(engine.plan)
    engine.llm.collective_rpc("reload_weights")
    shared(engine)


def _replace(plan: Mapping[str, Any]) -> None:
    """Replace the weights by others of the same size, with the same times."""
    path = Path(plan["model"], "model.safetensors")
    new = Path(plan["replaced_by"])
    before = path.stat()
    shutil.copyfile(new, path)
    os.utime(path, ns=(before.st_atime_ns, before.st_mtime_ns))
    assert path.stat().st_size == before.st_size
