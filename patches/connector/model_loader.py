# SPDX-License-Identifier: Apache-2.0
"""``vllm/model_executor/model_loader/base_loader.py``: a worker's connector gets to know the model.

How keys turn with their positions is read from the model's own modules. The loader shows each model
that it has built to a function that may log it. ``load_model`` itself cannot be told from a wrapper
of somebody else where OpenTelemetry is installed: upstream then wraps it.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from vllm_ascend_kvext.connector.worker import loaded_models
from vllm_ascend_kvext.patching.declaration import Patch

if TYPE_CHECKING:
    import torch


def remember_model(
    wrapped: Callable[..., None], instance: None, model: torch.nn.Module, *args: Any, **kwargs: Any
) -> None:
    """Remember a model that has been built, for as long as it lives."""
    wrapped(model, *args, **kwargs)
    loaded_models.remember(model)


PATCHES = (
    Patch(
        id="KVX-405",
        target="vllm.model_executor.model_loader.base_loader:log_model_inspection",
        feature="connector",
        wrapper=remember_model,
        undo=loaded_models.forget_all,
        why="A connector is handed the KV caches, but not the model, whose rotary modules say how "
        "keys turn when a segment is placed elsewhere.",
        retire_when="upstream hands connectors the model",
    ),
)
