# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vllm-ascend-kvext project
"""We note which files vLLM's loaders will read, if a model has several sets of weights."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from vllm.config.load import LoadConfig
from vllm.model_executor.model_loader import get_model_loader, runai_streamer_loader

from vllm_ascend_kvext import loaded_models
from vllm_ascend_kvext.loaded_models.weight_files import FilesOfWeights
from vllm_ascend_kvext.shared_tier.worker.loaded_weights import LoadedWeights

pytestmark = pytest.mark.usefixtures("offloading_in_effect")

SHARDED = "model-rank-0-part-0.safetensors"


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """The folder of a model with several sets of weights. ``auto`` prefers consolidated ones."""
    for number, name in enumerate(("model.safetensors", "consolidated.safetensors", SHARDED)):
        save_file({"w": torch.full((4,), float(number))}, tmp_path / name)
    torch.save({"w": torch.full((4,), 9.0)}, tmp_path / "model.pt")
    return tmp_path


@pytest.fixture
def model() -> Iterator[torch.nn.Module]:
    loaded_models.forget_all()
    model = torch.nn.Identity()
    loaded_models.remember(model)
    yield model
    loaded_models.forget_all()


def of_default(loader: Any, folder: Path) -> None:
    loader._prepare_weights(str(folder), None, None, True, None)


def of_runai(loader: Any, folder: Path) -> None:
    loader._prepare_weights(str(folder), None)


def of_sharded(loader: Any, folder: Path) -> None:
    list(loader.iterate_over_files([str(folder / SHARDED)]))


ALL = ("model.safetensors", "consolidated.safetensors", SHARDED)


@pytest.mark.parametrize(
    ("load_format", "choose", "names"),
    [
        ("auto", of_default, ("consolidated.safetensors",)),
        ("safetensors", of_default, ALL),
        ("pt", of_default, ("model.pt",)),
        ("runai_streamer", of_runai, ALL),
        ("sharded_state", of_sharded, (SHARDED,)),
    ],
)
def test_a_loader_of_files_says_what_it_reads(
    load_format: str,
    choose: Callable[[Any, Path], None],
    names: tuple[str, ...],
    folder: Path,
    model: torch.nn.Module,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    # The package with this function is made for object stores.
    monkeypatch.setattr(
        runai_streamer_loader, "list_safetensors", lambda path: [*Path(path).glob("*.safetensors")]
    )
    choose(get_model_loader(LoadConfig(load_format=load_format)), folder)
    expected = FilesOfWeights([folder / name for name in names]).digest()
    assert LoadedWeights([model]).digests() == (expected,)
    others = [name for name in (*ALL, "model.pt") if name not in names]
    assert all(FilesOfWeights([folder / name]).digest() != expected for name in others)


def test_what_is_read_again_is_of_the_model_that_it_is_read_for(
    folder: Path, model: torch.nn.Module
) -> None:
    """``reload_weights`` reads again. The last loaded model was a draft, or another engine's."""
    config = SimpleNamespace(model=str(folder), revision=None)
    loader: Any = get_model_loader(LoadConfig())

    def read(model: torch.nn.Module) -> None:
        assert len(list(loader.get_all_weights(config, model))) == 1

    read(model)
    weights = LoadedWeights([model])
    other = torch.nn.Linear(1, 1)
    loaded_models.remember(other)
    read(other)
    assert not weights.take_is_read_again()
    read(model)
    assert weights.take_is_read_again()
