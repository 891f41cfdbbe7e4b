# SPDX-License-Identifier: Apache-2.0
"""``vllm/model_executor/model_loader/base_loader.py``: a worker's connector gets to know the model.

How keys turn with their positions is read from the model's own modules.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from vllm_ascend_kvext.connector import loaded_models
from vllm_ascend_kvext.patching.declaration import Kind, Patch

if TYPE_CHECKING:
    import torch
    from vllm.model_executor.model_loader.base_loader import BaseModelLoader


def remember_model(
    wrapped: Callable[..., torch.nn.Module], loader: BaseModelLoader, *args: Any, **kwargs: Any
) -> torch.nn.Module:
    """Load a model, and remember it for as long as it lives."""
    model = wrapped(*args, **kwargs)
    loaded_models.remember(model)
    return model


PATCHES = (
    Patch(
        id="KVX-404",
        target="vllm.model_executor.model_loader.base_loader:BaseModelLoader.load_model",
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
