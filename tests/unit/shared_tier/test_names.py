# SPDX-License-Identifier: Apache-2.0
"""Whose KV may meet, what is said where it does not, and what ``status`` shows."""

from __future__ import annotations

import json
import os
import random
import shutil
from pathlib import Path
from typing import Any

import pytest

from vllm_ascend_kvext.__main__ import main
from vllm_ascend_kvext.errors import SettingsError
from vllm_ascend_kvext.shared_tier.backend import Answer, SharedObject
from vllm_ascend_kvext.shared_tier.files import FilesTier
from vllm_ascend_kvext.shared_tier.names import (
    differences,
    namespace_of,
    object_name,
    piece_of,
    weights_identity,
)
from vllm_ascend_kvext.store.entries import Piece

IDENTITY: dict[str, Any] = {"weights": ["a" * 64], "dtype": "bf16", "groups": [1, [2, 3]]}


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
    (folder / "config.json").write_text("{}")
    return folder


def test_the_same_weights_elsewhere_are_the_same(model: Path, tmp_path: Path) -> None:
    elsewhere = tmp_path / "elsewhere"
    shutil.copytree(model, elsewhere)
    os.utime(elsewhere / "a.safetensors", (1, 1))
    assert weights_identity(model) == weights_identity(elsewhere)


@pytest.mark.parametrize("name", ["small", "medium", "large"])
def test_a_tensor_of_other_weights_is_noticed(model: Path, name: str) -> None:
    """Of the same size, at the same path, with the same times."""
    before = weights_identity(model)
    times = (model / "a.safetensors").stat()
    write_safetensors(model / "a.safetensors", {**tensors_of(1), name: tensors_of(2)[name]})
    os.utime(model / "a.safetensors", ns=(times.st_atime_ns, times.st_mtime_ns))
    assert weights_identity(model) != before


@pytest.mark.parametrize("place", [0, 1_234_567, 2_499_999])
def test_one_trained_row_of_an_embedding_is_noticed(model: Path, place: int) -> None:
    before, tensors = weights_identity(model), tensors_of(1)
    embeddings = bytearray(tensors["embed_tokens"])
    embeddings[place] ^= 1
    write_safetensors(model / "a.safetensors", tensors | {"embed_tokens": bytes(embeddings)})
    assert weights_identity(model) != before


@pytest.mark.parametrize("change", ["other bytes", "renamed", "another file", "longer"])
def test_other_files_of_weights_are_noticed(model: Path, change: str) -> None:
    before = weights_identity(model)
    path = model / "b.bin"
    if change == "other bytes":
        path.write_bytes(random.Random(3).randbytes(50_000))
    elif change == "renamed":
        path.rename(model / "c.bin")
    elif change == "another file":
        write_safetensors(model / "c.safetensors", {})
    else:
        path.write_bytes(path.read_bytes() + b"\0")
    assert weights_identity(model) != before


def test_what_is_no_weights_does_not_matter(model: Path) -> None:
    before = weights_identity(model)
    (model / "README.md").write_text("new")
    assert weights_identity(model) == before


@pytest.mark.parametrize(
    "content", [None, b"", b"\xff" * 8, (20).to_bytes(8, "little") + b"x" * 20]
)
def test_weights_that_cannot_be_read_are_refused(tmp_path: Path, content: bytes | None) -> None:
    if content is not None:
        (tmp_path / "a.safetensors").write_bytes(content)
    if content == b"":
        (tmp_path / "a.safetensors").unlink()
        tmp_path = tmp_path / "absent"
    with pytest.raises(SettingsError, match=r"expected files of weights.*leave shared_tier out"):
        weights_identity(tmp_path)


def test_each_part_of_an_identity_makes_a_name_space() -> None:
    names = {namespace_of(IDENTITY)}
    for part in IDENTITY:
        names.add(namespace_of({**IDENTITY, part: "other"}))
        names.add(namespace_of({each: IDENTITY[each] for each in IDENTITY if each != part}))
    assert len(names) == 1 + 2 * len(IDENTITY)
    assert namespace_of(dict(reversed(IDENTITY.items()))) == namespace_of(IDENTITY)


def test_differences_name_what_differs() -> None:
    other = {**IDENTITY, "dtype": "fp16", "weights": ["b" * 64], "new": 1}
    assert differences(IDENTITY, other) == [
        'dtype ("bf16" here, "fp16" there)',
        "new (null here, 1 there)",
        "weights",
    ]
    assert differences(IDENTITY, json.loads(json.dumps(IDENTITY))) == []


def test_names_are_read_back() -> None:
    for piece in (Piece.rows(0, 1024), Piece.rows(64, 128), Piece.tails(256)):
        assert piece_of(object_name(piece, b"\1" * 32)) == piece


def test_status_shows_a_tier(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = tmp_path / "tier"
    tier = FilesTier(f"file://{folder}", None, 0)
    tier.register(memoryview(bytearray(1 << 20)))
    for identity in (IDENTITY, {**IDENTITY, "dtype": "fp16"}):
        namespace = namespace_of(identity)
        tier.introduce(namespace, identity)
        num_bytes = 1 << 20 if identity is IDENTITY else 1 << 10
        what = SharedObject(0, f"{namespace}/R0-64-{'a' * 32}", 0, num_bytes)
        assert tier.put(what) is Answer.WHOLE
    before = sorted(folder.rglob("*-*"))
    assert main(["status", "--shared-tier", f"file://{folder}"]) == 0
    text = capsys.readouterr().out
    assert "format 3: works" in text and "holds 0.001 GB" in text
    assert f"name space {namespace_of(IDENTITY)}: 1 objects, 0.001 GB" in text
    assert 'do not meet: dtype ("bf16" here, "fp16" there)' in text
    assert sorted(folder.rglob("*-*")) == [*before, folder / "kvext3" / "status-check"]
    assert len(tier.engines()) == 2


def test_status_of_a_tier_that_is_not_there(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["status", "--shared-tier", f"file://{tmp_path}/absent"]) == 2
    assert "expected a folder" in capsys.readouterr().out
    assert list(tmp_path.iterdir()) == []
