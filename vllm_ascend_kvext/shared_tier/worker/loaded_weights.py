# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vllm-ascend-kvext project
"""The weights of one worker's models, by the content of the files that they were read from."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING

from vllm_ascend_kvext.errors import SettingsError
from vllm_ascend_kvext.loaded_models import LoadedModel, known_models

if TYPE_CHECKING:
    import torch


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
        for known in known_models():
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
