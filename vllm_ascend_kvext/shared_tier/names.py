# SPDX-License-Identifier: Apache-2.0
"""Whose KV may meet: the name space of an engine, and the names of its objects.

An *identity* says all that decides what bytes of KV mean: layout, weights, versions, block hashes.
Equal identities have one name space, others never meet. Its parts are readable: where engines do
not find each other, `differences` says why.

Weights are known by their content, wherever they lie: `weights_identity` reads the head of each
file, and a few bytes in the middle of every tensor. That takes a read of a block per tensor: some
milliseconds from memory, a second from a disk for ten thousand tensors.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, BinaryIO

from vllm_ascend_kvext.errors import SettingsError
from vllm_ascend_kvext.shared_tier.protocol import FORMAT_VERSION
from vllm_ascend_kvext.store.entries import Kind, Piece

Identity = Mapping[str, Any]
"""Plain data, by part."""

ENGINE_FILE = "engine.json"

_WEIGHT_SUFFIXES = (".safetensors", ".bin", ".pt", ".pth", ".gguf")
_SAMPLE_BYTES = 256
_MAX_HEADER_BYTES = 100 << 20  # As the safetensors library has it.
_SAMPLES_OF_OTHERS = 1024


def namespace_of(identity: Identity) -> str:
    """The name space: a name that other identities do not have."""
    text = json.dumps([FORMAT_VERSION, identity], sort_keys=True)
    return hashlib.sha256(text.encode()).hexdigest()[:32]


def differences(one: Identity, other: Identity) -> list[str]:
    """Parts in which two identities differ, with their values where these are short."""
    found = []
    for part in sorted(one.keys() | other.keys()):
        values = [json.dumps(each.get(part), sort_keys=True) for each in (one, other)]
        if values[0] != values[1]:
            is_short = max(map(len, values)) <= 40
            found.append(f"{part} ({values[0]} here, {values[1]} there)" if is_short else part)
    return found


def key_name(key: bytes) -> str:
    """128 bits of a chained hash; sizes and checksum are verified besides."""
    return key.hex()[:32]


def note_name(key: bytes) -> str:
    """The note that leads to rows up to a boundary."""
    return f"N{key_name(key)}"


def object_name(piece: Piece, key: bytes) -> str:
    """The name of a piece that ends with a key."""
    if piece.kind is Kind.TAILS:
        return f"T{piece.end_tokens}-{key_name(key)}"
    return f"R{piece.first_tokens}-{piece.end_tokens}-{key_name(key)}"


def rows_of_name(name: str) -> Piece | None:
    """The piece of an object of rows; None if the name is none of such."""
    parts = name[1:].split("-")
    if not name.startswith("R") or len(parts) != 3 or not (parts[0] + parts[1]).isdecimal():
        return None
    return Piece.rows(int(parts[0]), int(parts[1]))


def describe_engine(root: str, namespace: str, identity: Identity) -> None:
    """Leave a file that says what the name space of an engine in a folder stands for."""
    path = os.path.join(root, namespace, ENGINE_FILE)
    unfinished = f"{path}.{os.getpid()}"
    with contextlib.suppress(OSError):
        file = os.open(unfinished, os.O_CREAT | os.O_TRUNC | os.O_WRONLY, 0o600)
        with open(file, "w", encoding="utf-8") as text:
            json.dump(identity, text, indent=1, sort_keys=True)
        os.replace(unfinished, path)


def engines_below(root: str) -> dict[str, Identity]:
    """The identities of all name spaces in a folder that can be read."""
    found: dict[str, Identity] = {}
    for path in sorted(Path(root).glob(f"*/{ENGINE_FILE}")):
        with contextlib.suppress(OSError, ValueError):
            identity = json.loads(path.read_text(encoding="utf-8"))
            if isinstance(identity, dict):
                found[path.parent.name] = identity
    return found


def weights_identity(folder: str | Path) -> str:
    """The same for the same weights, wherever they lie; for others it is another.

    Raises:
        SettingsError: If there are no files of weights, or they cannot be read.
    """
    try:
        paths = sorted(
            path
            for path in Path(folder).iterdir()
            if path.name.endswith(_WEIGHT_SUFFIXES) and path.is_file()
        )
        digest = hashlib.sha256()
        for path in paths:
            with path.open("rb") as file:
                digest.update(f"{path.name} {path.stat().st_size}\n".encode())
                for offset, num_bytes in _samples(path, file):
                    file.seek(offset)
                    digest.update(file.read(num_bytes))
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise _no_weights(folder, f"{type(error).__name__}: {error}") from error
    if not paths:
        raise _no_weights(folder, "none")
    return digest.hexdigest()


def _samples(path: Path, file: BinaryIO) -> Iterator[tuple[int, int]]:
    """Where the bytes are that a file of weights is known by; and how many."""
    size = path.stat().st_size
    if path.suffix != ".safetensors":
        step = max(_SAMPLE_BYTES, size // _SAMPLES_OF_OTHERS)
        yield from ((offset, _SAMPLE_BYTES) for offset in range(0, size, step))
        return
    header_bytes = int.from_bytes(file.read(8), "little")
    if header_bytes > min(size, _MAX_HEADER_BYTES):
        raise ValueError(f"{path.name} has no header of safetensors")
    tensors = json.loads(file.read(header_bytes))
    yield 0, 8 + header_bytes
    for name, tensor in sorted(tensors.items()):
        if name != "__metadata__":
            first, end = tensor["data_offsets"]
            middle = max(first, (first + end - _SAMPLE_BYTES) // 2)
            yield 8 + header_bytes + middle, min(_SAMPLE_BYTES, end - middle)


def _no_weights(folder: str | Path, found: str) -> SettingsError:
    return SettingsError(
        f"shared_tier: expected files of weights ({', '.join(_WEIGHT_SUFFIXES)}) in {folder}, by "
        f"whose content KV of this model is known, found {found}. Serve the model from a folder "
        "with its weights, or leave shared_tier out."
    )
