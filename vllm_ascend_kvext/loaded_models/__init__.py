# SPDX-License-Identifier: Apache-2.0
"""The models that this process has loaded, and the files that their weights are from.

vLLM hands a connector neither. Models are held weakly: one that is thrown away is forgotten.
``patches.connector.model_loader`` tells of both. Imports nothing of vLLM.
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
    """A model, and what is read for it, in the order of reading.

    Attributes:
        files: Grows when weights are loaded into the model again, by any loader of files.
    """

    model: weakref.ref[torch.nn.Module]
    files: list[FilesOfWeights] = field(default_factory=list)


_models: list[LoadedModel] = []


def remember(model: torch.nn.Module) -> None:
    """A model has been built, and its weights are loaded next."""
    _models[:] = [known for known in _models if known.model() not in (None, model)]
    _models.append(LoadedModel(weakref.ref(model)))


def begin_reading(model: torch.nn.Module) -> None:
    """A loader reads for this model next: the first time, or again when others are loaded, too."""
    _models.sort(key=lambda known: known.model() is model)  # Stable: it becomes the last one.


def note_files(paths: Iterable[str | os.PathLike[str]]) -> None:
    """A loader is about to read these files, for the model that was remembered or begun last."""
    if _models:
        _models[-1].files.append(FilesOfWeights(paths))


def known_models() -> list[LoadedModel]:
    """All models that are known, in the order of loading."""
    return list(_models)


def forget_all() -> None:
    """No model is known any more."""
    _models.clear()


def model_with(module: torch.nn.Module) -> torch.nn.Module | None:
    """The model that has a module among its parts; None if none is known."""
    for known in _models:
        model = known.model()
        if model is not None and any(part is module for part in model.modules()):
            return model
    return None
