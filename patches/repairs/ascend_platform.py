# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vllm-ascend-kvext project
"""``vllm_ascend/platform.py``: models with attention and states may recompute failed loads.

vLLM-Ascend refuses this policy because vLLM cannot recompute with several KV cache groups. With
``repairs/scheduler.py``, vLLM can.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import TYPE_CHECKING

from vllm_ascend_kvext.patching.declaration import BEFORE_0_30, SINCE_0_30, Kind, Patch

if TYPE_CHECKING:
    from vllm.config import VllmConfig


def allow_recompute(wrapped: Callable[..., None], _instance: None, vllm_config: VllmConfig) -> None:
    """Refuse nothing. The replaced function checks only this policy."""


_OF_0_23 = Patch(
    id="KVX-127",
    target="vllm_ascend.platform:NPUPlatform._validate_kv_load_failure_policy",
    kind=Kind.REPLACE,
    feature="failed-loads",
    vllm=BEFORE_0_30,
    wrapper=allow_recompute,
    why="vLLM-Ascend refuses `kv_load_failure_policy=recompute` for models with attention and "
    "states, because vLLM cannot recompute there. With this repair it can.",
    retire_when="KVX-305 is retired",
)

PATCHES = (
    _OF_0_23,
    replace(
        _OF_0_23,
        id="KVX-311",
        target="vllm_ascend.platform:_validate_kv_load_failure_policy",
        vllm=SINCE_0_30,
    ),
)
