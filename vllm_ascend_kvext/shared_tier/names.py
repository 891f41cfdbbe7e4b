# SPDX-License-Identifier: Apache-2.0
"""Whose KV may meet: the name space of an engine, and the names of its objects.

An *identity* says all that decides what bytes of KV mean. Equal identities have one name space,
others never meet; its parts are readable, so that `differences` says why engines do not meet.
"""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, BinaryIO

from vllm_ascend_kvext.errors import SettingsError
from vllm_ascend_kvext.store.entries import Kind, Piece

Identity = Mapping[str, Any]  # Plain data, by part.
FORMAT_VERSION = 3  # Of objects and names: those of another version are not looked at.

_ROWS_NAME = re.compile("R[0-9]{1,12}-[0-9]{1,12}-[0-9a-f]{32}")
_SUFFIXES = (".safetensors", ".bin", ".pt", ".pth", ".gguf")
_SAMPLE_BYTES, _SAMPLES_OF_TENSOR, _SAMPLES_OF_FILE = 256, 8, 4096
_READ_BYTES = 1 << 20


def namespace_of(identity: Identity) -> str:
    """The name space: a name that other identities do not have."""
    text = json.dumps([FORMAT_VERSION, identity], sort_keys=True)
    return hashlib.sha256(text.encode()).hexdigest()[:32]


def parse_identity(text: bytes) -> tuple[str, Identity]:
    """An identity that was written down as JSON, with its name space.

    Raises:
        ValueError: If it is none.
    """
    try:
        identity = json.loads(text)
        namespace = namespace_of(identity)
    except RecursionError as error:
        raise ValueError("JSON that is nested too deeply") from error
    if not isinstance(identity, dict):
        raise ValueError(f"JSON of a {type(identity).__name__}, which is no object")
    return namespace, identity


def differences(here: Identity, there: Identity) -> list[str]:
    """Parts in which two identities differ, with their values where these are short."""
    found = []
    for part in sorted(here.keys() | there.keys()):
        one, other = (json.dumps(each.get(part), sort_keys=True) for each in (here, there))
        if one != other:
            is_short = len(one) + len(other) <= 60
            found.append(f"{part} ({one} here, {other} there)" if is_short else part)
    return found


def note_name(key: bytes) -> str:
    """The note that leads to rows before a boundary. 128 bits of its chained hash."""
    return f"N{key.hex()[:32]}"


def is_note(name: str) -> bool:
    """Whether this is a note's name, and not that of an object."""
    return name.rpartition("/")[2].startswith("N")


def is_rows_name(name: str) -> bool:
    """Whether this is the name of an object with rows of a prompt: what notes lead to."""
    return _ROWS_NAME.fullmatch(name) is not None


def object_name(piece: Piece, key: bytes, is_segment: bool = False) -> str:
    """The name of a piece that ends with a key; those of segments are no hashes of prompts."""
    kind = "S" if is_segment else "T" if piece.kind is Kind.TAILS else "R"
    return f"{kind}{piece.first_tokens}-{piece.end_tokens}-{key.hex()[:32]}"


def piece_of(name: str) -> Piece:
    """The piece of an object of a prompt, whose name is one of `object_name`."""
    first, end, _ = name[1:].split("-")
    return Piece(Kind.TAILS if name[0] == "T" else Kind.ROWS, int(first), int(end))


def weights_identity(folder: str | Path) -> str:
    """The same for the same weights, wherever they lie; for others it is another.

    Of each file it hashes the size, the header, whole embeddings, of which few rows may have been
    trained, and 256 bytes at 8 places of every other tensor: 80,000 reads of a block where there
    are 10,000 tensors. Weights that are trained differ there.

    Raises:
        SettingsError: If there are no files of weights, or they cannot be read.
    """
    digest, found = hashlib.sha256(), "none"
    try:
        for path in sorted(Path(folder).iterdir()):
            if path.suffix in _SUFFIXES:
                with path.open("rb") as file:
                    found = path.name
                    digest.update(f"{found} {path.stat().st_size}\n".encode())
                    for first, num_bytes in _samples(path, file):
                        file.seek(first)
                        digest.update(file.read(num_bytes))
        if found != "none":
            return digest.hexdigest()
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        found = f"{found}: {type(error).__name__}: {error}"
    raise SettingsError(
        f"shared_tier: expected files of weights ({', '.join(_SUFFIXES)}) in {folder}, by whose "
        f"content KV of this model is known, found {found}. Serve the model from a folder with its "
        "weights, or leave shared_tier out."
    )


def _samples(path: Path, file: BinaryIO) -> Iterator[tuple[int, int]]:
    """Where the bytes are that a file of weights is known by; and how many."""
    size = path.stat().st_size
    if path.suffix != ".safetensors":
        step = max(_SAMPLE_BYTES, size // _SAMPLES_OF_FILE)
        yield from ((first, _SAMPLE_BYTES) for first in range(0, size, step))
        return
    begin = 8 + int.from_bytes(file.read(8), "little")
    if begin > size:
        raise ValueError("it has no header of safetensors")
    tensors = json.loads(file.read(begin - 8))
    yield 0, begin
    for name, tensor in tensors.items():
        if name != "__metadata__":
            first, end = (begin + each for each in tensor["data_offsets"])
            num_bytes = _READ_BYTES if "embed" in name else _SAMPLE_BYTES
            step = num_bytes if "embed" in name else (end - first) // _SAMPLES_OF_TENSOR
            places = range(first, end, max(num_bytes, step))
            yield from ((each, min(num_bytes, end - each)) for each in places)
