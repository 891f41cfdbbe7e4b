# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vllm-ascend-kvext project
"""Loaders of ``vllm/model_executor/model_loader/``: a worker gets to know its model and weights.

The model's own modules say how keys turn with their positions. The loader passes each model that it
has built to ``log_model_inspection``, which is patched. ``load_model`` is not patched, because
upstream itself wraps ``load_model`` if OpenTelemetry is installed. A fingerprint cannot tell this
wrapper from another program's wrapper.

A shared tier knows KV by the content of the weights. Before a loader of files reads, it calls a
method of its own that chooses the files.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from vllm_ascend_kvext import loaded_models
from vllm_ascend_kvext.patching.declaration import Patch

if TYPE_CHECKING:
    import torch


def remember_model(
    wrapped: Callable[..., None], instance: None, model: torch.nn.Module, *args: Any, **kwargs: Any
) -> None:
    """Remember a model that has been built, for as long as it lives."""
    wrapped(model, *args, **kwargs)
    loaded_models.remember(model)


def begin_reading(
    wrapped: Callable[..., Any],
    instance: object,
    model_config: object,
    model: torch.nn.Module,
    *args: Any,
    **kwargs: Any,
) -> Any:
    """Note for which model a loader is about to choose files."""
    loaded_models.begin_reading(model)
    return wrapped(model_config, model, *args, **kwargs)


def note_chosen_files(
    wrapped: Callable[..., Any], instance: object, *args: Any, **kwargs: Any
) -> Any:
    """Note the files that a loader has chosen: its method's result, or the result's second part."""
    chosen = wrapped(*args, **kwargs)
    _note_files(chosen[1] if isinstance(chosen, tuple) else chosen)
    return chosen


def note_given_files(
    wrapped: Callable[..., Any], instance: object, paths: list[str], *args: Any, **kwargs: Any
) -> Any:
    """Note the files that a loader is given. It reads them while its result is iterated over."""
    _note_files(paths)
    return wrapped(paths, *args, **kwargs)


def _note_files(paths: list[str]) -> None:
    from vllm.config import get_current_vllm_config_or_none

    config = get_current_vllm_config_or_none()
    # An engine without a connector does not need the files.
    if config is None or config.kv_transfer_config is not None:
        loaded_models.note_files(paths)


_LOADERS = "vllm.model_executor.model_loader"
_FILES = Patch(
    id="KVX-412",
    target=f"{_LOADERS}.default_loader:DefaultModelLoader._prepare_weights",
    feature="connector",
    wrapper=note_chosen_files,
    why="KV in a shared tier is known by the content of the weights. Files may be replaced once "
    "they are loaded, and only the loader knows which ones it reads, and when.",
    retire_when="upstream tells connectors what the weights in memory are",
    relies_on=(
        f"{_LOADERS}.default_loader:DefaultModelLoader._get_weights_iterator",
        f"{_LOADERS}.default_loader:DefaultModelLoader.get_all_weights",
    ),
)

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
    _FILES,
    replace(
        _FILES,
        id="KVX-413",
        target=f"{_LOADERS}.runai_streamer_loader:RunaiModelStreamerLoader._prepare_weights",
        relies_on=(
            f"{_LOADERS}.runai_streamer_loader:RunaiModelStreamerLoader._get_weights_iterator",
        ),
    ),
    replace(
        _FILES,
        id="KVX-414",
        target=f"{_LOADERS}.sharded_state_loader:ShardedStateLoader.iterate_over_files",
        relies_on=(f"{_LOADERS}.sharded_state_loader:ShardedStateLoader.load_weights",),
        wrapper=note_given_files,
    ),
    Patch(
        id="KVX-415",
        target=f"{_LOADERS}.default_loader:DefaultModelLoader.get_all_weights",
        feature="connector",
        wrapper=begin_reading,
        why="Weights may be read again for a model that was not loaded last. A draft, or the model "
        "of another engine of the process, may have been loaded after it. KV of the new weights "
        "must not get the name of the old ones in a shared tier.",
        retire_when="upstream tells connectors what the weights in memory are",
        relies_on=("vllm.v1.worker.gpu_model_runner:GPUModelRunner.reload_weights",),
    ),
)
