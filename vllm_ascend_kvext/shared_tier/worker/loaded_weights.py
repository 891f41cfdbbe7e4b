# SPDX-License-Identifier: Apache-2.0
"""The weights of one worker's models, by the content of the files that they were read from."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING

from vllm_ascend_kvext.errors import SettingsError
from vllm_ascend_kvext.loaded_models import LoadedModel, known_models

if TYPE_CHECKING:
    import torch


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
        """What each of the models is known by, in the order of loading.

        Raises:
            SettingsError: If files are not what they were before they were read.
        """
        return tuple(files.digest() for known in self._models for files in known.files)

    def take_is_read_again(self) -> bool:
        """Whether more files have been read for these models since this was asked."""
        before, self._num_read = self._num_read, self._count_read()
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
