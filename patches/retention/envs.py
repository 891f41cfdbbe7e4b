# SPDX-License-Identifier: Apache-2.0
"""``vllm/envs.py``: the retention interval is a variable that vLLM knows."""

from __future__ import annotations

import os
from collections.abc import Callable

from vllm_ascend_kvext.patching.declaration import Kind, Patch
from vllm_ascend_kvext.settings import RETENTION_INTERVAL_VARIABLE, parse_retention_interval


def _interval() -> int | None:
    text = parse_retention_interval(os.environ)
    return None if text is None else int(text)


def register_interval() -> Callable[[], None]:
    from vllm import envs

    original = envs.environment_variables[RETENTION_INTERVAL_VARIABLE]
    envs.environment_variables[RETENTION_INTERVAL_VARIABLE] = _interval

    def undo() -> None:
        if envs.environment_variables.get(RETENTION_INTERVAL_VARIABLE) is _interval:
            envs.environment_variables[RETENTION_INTERVAL_VARIABLE] = original

    return undo


PATCHES = (
    Patch(
        id="KVX-131",
        target="vllm.envs:environment_variables",
        kind=Kind.HOOK,
        feature="retention",
        install=register_interval,
        why="Upstream fails on a blank value, which is an unset one here.",
        retire_when="the variable is gone upstream (vLLM >= 0.32 has a config field)",
    ),
)
