# SPDX-License-Identifier: Apache-2.0
"""``vllm/v1/worker/gpu_model_runner.py``: a worker's connector gets to know the model.

How keys turn with their positions is read from the model's own modules.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from vllm_ascend_kvext.connector import loaded_models
from vllm_ascend_kvext.patching.declaration import Kind, Patch

if TYPE_CHECKING:
    from vllm.v1.worker.gpu_model_runner import GPUModelRunner


def remember_model(
    wrapped: Callable[..., None], runner: GPUModelRunner, *args: Any, **kwargs: Any
) -> None:
    """Remember the model, for as long as it lives, before the connector is handed its KV caches."""
    loaded_models.remember(runner.get_model())
    wrapped(*args, **kwargs)


PATCHES = (
    Patch(
        id="KVX-404",
        target="vllm.v1.worker.gpu_model_runner:GPUModelRunner.initialize_kv_cache",
        kind=Kind.WRAP,
        feature="connector",
        vllm=("==0.20.2.*", "==0.23.0.*"),
        wrapper=remember_model,
        undo=loaded_models.forget_all,
        why="A connector is handed the KV caches, but not the model, whose rotary modules say how "
        "keys turn when a segment is placed elsewhere.",
        retire_when="upstream hands connectors the model",
    ),
)
