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

from vllm_ascend_kvext.connector.worker.weight_files import FilesOfWeights
from vllm_ascend_kvext.errors import SettingsError

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


class LoadedWeights:
    """The files from which the models of one worker have their weights.

    Args:
        layers: Of these models: those that have KV.

    Raises:
        SettingsError: If not all of them are of models whose weights are read from files.
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
        """What each of the models is known by, in the order of loading.

        Raises:
            SettingsError: If files are not what they were before they were read.
        """
        return tuple(files.digest() for known in self._models for files in known.files)

    def take_is_read_again(self) -> bool:
        """Whether more files have been read for these models since this was asked."""
        before = self._num_read
        self._num_read = self._count_read()
        return self._num_read != before

    def _count_read(self) -> int:
        return sum(len(known.files) for known in self._models)


def _parts_of(model: torch.nn.Module) -> set[int]:
    """Ids of a model's modules, and of what they hold in a list or a dictionary.

    vLLM's Transformers models have their attention layers in a plain dictionary.
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
