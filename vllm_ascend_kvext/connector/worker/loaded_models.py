# SPDX-License-Identifier: Apache-2.0
"""Remembers the models that this process has loaded, and the files of their weights.

vLLM gives a connector neither of them, so ``patches.connector.model_loader`` reports both. The
module holds models by weak references: a model that is deleted is forgotten. It imports nothing of
vLLM.
"""

from __future__ import annotations

import os
import weakref
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from vllm_ascend_kvext.connector.worker.weight_files import FilesOfWeights
from vllm_ascend_kvext.errors import SettingsError

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


class LoadedWeights:
    """The files of the weights of one worker's models.

    Args:
        layers: The layers of these models that have KV.

    Raises:
        SettingsError: If a layer belongs to a model whose weights were not read from files.
    """

    def __init__(self, layers: Iterable[torch.nn.Module]) -> None:
        missing = {id(layer) for layer in layers}
        self._models: list[LoadedModel] = []
        for known in _models:
            model = known.model()
            parts = set() if model is None else _parts_of(model)
            if known.files and not missing.isdisjoint(parts):
                missing -= parts
                self._models.append(known)
        if missing or not self._models:
            raise SettingsError(
                "shared_tier: expected weights that a loader of vLLM reads from files, by whose "
                "content KV of this model is known, found a loader that has them from elsewhere, "
                "such as another engine, a daemon or a server. Use load_format auto, safetensors, "
                "pt, mistral, sharded_state or runai_streamer, or leave shared_tier out."
            )
        self._num_read = self._count_read()

    def digests(self) -> tuple[str, ...]:
        """The digests of the files of all models, in the order of loading.

        Raises:
            SettingsError: If a file has changed since it was going to be read.
        """
        return tuple(files.digest() for known in self._models for files in known.files)

    def take_is_read_again(self) -> bool:
        """Whether files were read for these models since the last call."""
        before = self._num_read
        self._num_read = self._count_read()
        return self._num_read != before

    def _count_read(self) -> int:
        return sum(len(known.files) for known in self._models)


def _parts_of(model: torch.nn.Module) -> set[int]:
    """The ids of a model's modules, and of the objects in their lists and dictionaries.

    vLLM's Transformers models keep their attention layers in a plain dictionary.
    """
    found = set()
    for module in model.modules():
        found.add(id(module))
        for value in vars(module).values():
            if isinstance(value, dict):
                found.update(map(id, value.values()))
            elif isinstance(value, (list, tuple)):
                found.update(map(id, value))
    return found
