# SPDX-License-Identifier: Apache-2.0
"""The models that this process has loaded. vLLM does not hand a connector the model it works for.

They are held weakly: a model that is thrown away is forgotten.
``patches.connector.model_loader`` tells of them. Imports nothing of vLLM.
"""

from __future__ import annotations

import weakref
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch

_models: list[weakref.ref[torch.nn.Module]] = []


def remember(model: torch.nn.Module) -> None:
    """A model has been loaded."""
    _models[:] = [known for known in _models if known() not in (None, model)]
    _models.append(weakref.ref(model))


def forget_all() -> None:
    """No model is known any more."""
    _models.clear()


def model_with(module: torch.nn.Module) -> torch.nn.Module | None:
    """The model that has a module among its parts; None if none is known."""
    for known in _models:
        model = known()
        if model is not None and any(part is module for part in model.modules()):
            return model
    return None
