# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vllm-ascend-kvext project
"""Weights are known by their content, except if they were changed during the load."""

from __future__ import annotations

import gc
import json
import os
import random
import shutil
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from vllm_ascend_kvext import loaded_models
from vllm_ascend_kvext.errors import SettingsError
from vllm_ascend_kvext.loaded_models.weight_files import FilesOfWeights
from vllm_ascend_kvext.shared_tier.worker.loaded_weights import LoadedWeights


def write_safetensors(path: Path, tensors: dict[str, bytes]) -> None:
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    first = 0
    for name, content in tensors.items():
        end = first + len(content)
        header[name] = {"dtype": "U8", "shape": [len(content)], "data_offsets": [first, end]}
        first = end
    text = json.dumps(header).encode()
    path.write_bytes(len(text).to_bytes(8, "little") + text + b"".join(tensors.values()))


def tensors_of(seed: int) -> dict[str, bytes]:
    rng = random.Random(seed)
    sizes = {"small": 10, "medium": 3000, "large": 100_000, "embed_tokens": 2_500_000}
    return {name: rng.randbytes(num_bytes) for name, num_bytes in sizes.items()}


@pytest.fixture
def model(tmp_path: Path) -> Path:
    folder = tmp_path / "model"
    folder.mkdir()
    write_safetensors(folder / "a.safetensors", tensors_of(1))
    (folder / "b.bin").write_bytes(random.Random(2).randbytes(50_000))
    for name in ("config.json", "quant_model_description.json", "preprocessor_config.json"):
        (folder / name).write_text("{}")
    return folder


def files_of(folder: Path) -> FilesOfWeights:
    return FilesOfWeights([folder / "b.bin", *folder.glob("*.safetensors")])


def digest(folder: Path) -> str:
    return files_of(folder).digest()


def with_its_times(path: Path, change: Callable[[], object]) -> None:
    times = path.stat()
    change()
    os.utime(path, ns=(times.st_atime_ns, times.st_mtime_ns))


def test_the_same_weights_elsewhere_are_the_same(model: Path, tmp_path: Path) -> None:
    elsewhere = tmp_path / "elsewhere"
    shutil.copytree(model, elsewhere)
    os.utime(elsewhere / "a.safetensors", (1, 1))
    linked = tmp_path / "linked"
    linked.mkdir()
    for path in model.iterdir():
        (linked / path.name).symlink_to(path)
    assert digest(model) == digest(elsewhere) == digest(linked)


@pytest.mark.parametrize("name", ["small", "medium", "large"])
def test_a_tensor_of_other_weights_is_noticed(model: Path, name: str) -> None:
    """The new file has the same size, path and times."""
    before, path = digest(model), model / "a.safetensors"
    others = {**tensors_of(1), name: tensors_of(2)[name]}
    with_its_times(path, lambda: write_safetensors(path, others))
    assert digest(model) != before


@pytest.mark.parametrize("place", [0, 1_234_567, 2_499_999])
def test_one_trained_row_of_an_embedding_is_noticed(model: Path, place: int) -> None:
    before, tensors = digest(model), tensors_of(1)
    embeddings = bytearray(tensors["embed_tokens"])
    embeddings[place] ^= 1
    write_safetensors(model / "a.safetensors", tensors | {"embed_tokens": bytes(embeddings)})
    assert digest(model) != before


def test_one_changed_byte_of_a_file_of_torch_is_noticed(model: Path) -> None:
    """Its tensors are parts of an archive. The archive has their checksums."""

    def write(content: bytes) -> None:
        with zipfile.ZipFile(model / "b.bin", "w") as archive:
            archive.writestr("data/0", content)

    content = bytearray(random.Random(3).randbytes(8_000_000))
    write(content)
    before = digest(model)
    content[3_000_001] ^= 1
    write(content)
    assert digest(model) != before


@pytest.mark.parametrize("change", ["other bytes", "another file", "longer"])
def test_other_files_of_weights_are_noticed(model: Path, change: str) -> None:
    before = digest(model)
    path = model / "b.bin"
    if change == "other bytes":
        path.write_bytes(random.Random(3).randbytes(50_000))
    elif change == "another file":
        write_safetensors(model / "c.safetensors", {})
    else:
        path.write_bytes(path.read_bytes() + b"\0")
    assert digest(model) != before


@pytest.mark.parametrize("name", ["quant_model_description.json", "preprocessor_config.json"])
def test_what_decides_their_meaning_is_noticed(model: Path, name: str) -> None:
    before = digest(model)
    (model / name).write_text("[]")
    assert digest(model) != before


def test_what_is_not_loaded_does_not_matter(model: Path) -> None:
    before = digest(model)
    (model / "README.md").write_text("new")
    (model / "model.pt").write_bytes(b"of another load format")
    assert digest(model) == before


def test_the_owner_and_the_mode_of_a_file_may_change(model: Path, tmp_path: Path) -> None:
    """This happens when a volume moves to another machine, or a backup links files."""
    files = files_of(model)
    path = model / "a.safetensors"
    path.chmod(0o400)
    os.link(path, tmp_path / "backup")
    os.chown(path, os.getuid(), os.getgid())
    assert files.digest() == digest(model)


CHANGES: dict[str, Callable[[Path], object]] = {
    "in place": lambda path: write_safetensors(path, tensors_of(2)),
    "by another file": lambda path: other_file(path).replace(path),
    "by a link": lambda path: (path.unlink(), path.symlink_to(other_file(path))),
    "by nothing": lambda path: path.unlink(),
    "by part of it": lambda path: os.truncate(path, 100),
}


def other_file(path: Path) -> Path:
    other = path.with_suffix(".new")
    write_safetensors(other, tensors_of(2))
    return other


@pytest.mark.parametrize("how", CHANGES)
def test_weights_that_were_replaced_since_have_no_digest(model: Path, how: str) -> None:
    path = model / "a.safetensors"
    files = files_of(model)
    if how == "by nothing":
        path.unlink()
    else:
        with_its_times(path, lambda: CHANGES[how](path))
    with pytest.raises(SettingsError, match=f"found {path} changed since .*start the engine again"):
        files.digest()


def test_a_folder_that_becomes_another_is_noticed(model: Path, tmp_path: Path) -> None:
    """This happens if a link names the latest of several folders."""
    latest, other = tmp_path / "latest", tmp_path / "other"
    shutil.copytree(model, other)
    latest.symlink_to(model)
    files = files_of(latest)
    latest.unlink()
    latest.symlink_to(other)
    with pytest.raises(SettingsError, match=f"found {latest}/.* changed since"):
        files.digest()


@pytest.mark.parametrize(
    "content", [None, b"", b"\xff" * 8, (20).to_bytes(8, "little") + b"x" * 20]
)
def test_weights_that_cannot_be_read_are_refused(tmp_path: Path, content: bytes | None) -> None:
    path = tmp_path / "a.safetensors"
    if content is not None:
        path.write_bytes(content)
    files = FilesOfWeights([path])
    with pytest.raises(SettingsError, match=rf"found {path}: .*leave shared_tier out"):
        files.digest()


@pytest.mark.parametrize("paths", [[], ["s3://bucket/a.safetensors", "s3://bucket/b.safetensors"]])
def test_weights_that_are_no_files_are_refused(paths: list[str]) -> None:
    files = FilesOfWeights(paths)
    with pytest.raises(SettingsError, match="expected files of weights on this machine"):
        files.digest()


# The models of a process.


class Module:
    """The parts of ``torch.nn.Module`` that are used."""

    def __init__(self, *parts: Module) -> None:
        self._modules = {str(number): part for number, part in enumerate(parts)}
        self.by_number: dict[int, Module] = {}

    def modules(self) -> list[Any]:
        return [self, *self._modules.values()]


@pytest.fixture
def no_models() -> Any:
    loaded_models.forget_all()
    yield
    loaded_models.forget_all()


def load(folder: Path | None, *layers: Any) -> Any:
    model: Any = Module(*layers)
    loaded_models.remember(model)
    if folder is not None:
        loaded_models.note_files([folder / "b.bin"])
    return model


@pytest.mark.usefixtures("no_models")
def test_an_engine_has_the_weights_of_its_model_and_its_draft(model: Path, tmp_path: Path) -> None:
    other = shutil.copytree(model, tmp_path / "other")
    (other / "b.bin").write_bytes(b"other")
    mine, drafted, theirs = (Module() for _ in range(3))
    held = [load(other, theirs), load(model, mine), load(other, drafted)]
    layers: list[Any] = [mine, drafted]
    found = LoadedWeights(layers).digests()
    expected = [FilesOfWeights([each / "b.bin"]).digest() for each in (model, other)]
    assert list(found) == expected
    del held


@pytest.mark.usefixtures("no_models")
def test_layers_in_a_dictionary_of_a_model_are_its_own(model: Path) -> None:
    """Layers of vLLM's Transformers models are in such dictionaries."""
    layer: Any = Module()
    held = load(model)
    held.by_number[0] = layer
    assert LoadedWeights([layer]).digests() == (FilesOfWeights([model / "b.bin"]).digest(),)


@pytest.mark.usefixtures("no_models")
def test_a_model_that_no_file_was_read_for_is_refused(model: Path) -> None:
    """The model is refused even if another model of the engine has weights from files."""
    mine, drafted = Module(), Module()
    held = [load(None, mine), load(model, drafted)]
    layers: list[Any] = [mine, drafted]
    with pytest.raises(SettingsError, match="found a loader that has them from elsewhere"):
        LoadedWeights(layers)
    del held


@pytest.mark.usefixtures("no_models")
def test_weights_that_are_loaded_again_are_news_once(model: Path) -> None:
    mine: Any = Module()
    held = load(model, mine)
    weights = LoadedWeights([mine])
    assert not weights.take_is_read_again()
    loaded_models.note_files([model / "b.bin"])
    assert weights.take_is_read_again() and not weights.take_is_read_again()
    del held


@pytest.mark.usefixtures("no_models")
def test_a_model_that_is_thrown_away_is_forgotten(model: Path) -> None:
    mine: Any = Module()
    load(model, mine)
    gc.collect()
    with pytest.raises(SettingsError):
        LoadedWeights([mine])
