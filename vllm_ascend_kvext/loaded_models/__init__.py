# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vllm-ascend-kvext project
"""Remembers the models that this process has loaded, and the files of their weights.

vLLM gives a connector neither of them, so ``patches.connector.model_loader`` reports both. The
module holds models by weak references: a model that is deleted is forgotten. The module imports
nothing of vLLM.
"""

from __future__ import annotations

import os
import weakref
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from vllm_ascend_kvext.loaded_models.weight_files import FilesOfWeights

if TYPE_CHECKING:
    import torch


@dataclass(frozen=True, slots=True, eq=False)
class LoadedModel:
    """A model, and the files that were read for it.

    Attributes:
        model: A weak reference to the model.
        files: The files in the order of reading. The list grows when a loader of files loads
            weights into the model again.
    """

    model: weakref.ref[torch.nn.Module]
    files: list[FilesOfWeights] = field(default_factory=list)


_models: list[LoadedModel] = []


def remember(model: torch.nn.Module) -> None:
    """Remember a model that has been built. Its weights are loaded next."""
    _models[:] = [known for known in _models if known.model() not in (None, model)]
    _models.append(LoadedModel(weakref.ref(model)))


def begin_reading(model: torch.nn.Module) -> None:
    """Note the model for which a loader reads next. Other models may have been loaded meanwhile."""
    # The sort is stable, so this model becomes the last one, and the others keep their order.
    _models.sort(key=lambda known: known.model() is model)


def note_files(paths: Iterable[str | os.PathLike[str]]) -> None:
    """Note files that a loader is about to read for the model that was noted last."""
    if _models:
        _models[-1].files.append(FilesOfWeights(paths))


def known_models() -> list[LoadedModel]:
    """All models that are known, in the order of loading."""
    return list(_models)


def forget_all() -> None:
    """Forget all models."""
    _models.clear()


def model_with(module: torch.nn.Module) -> torch.nn.Module | None:
    """The model that contains a module; None if no known model does."""
    for known in _models:
        model = known.model()
        if model is not None and any(part is module for part in model.modules()):
            return model
    return None
