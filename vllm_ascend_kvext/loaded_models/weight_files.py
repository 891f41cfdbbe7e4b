# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vllm-ascend-kvext project
"""Identifies weights by the content of the files that a loader reads.

`FilesOfWeights` is made when a loader names the files that it is about to read. At that time, it
reads only small samples of the files, because files that were not loaded yet are not in memory. The
digest is computed after the files were loaded. If a file has changed meanwhile, there is no digest,
because it is not known which bytes are in memory.
"""

from __future__ import annotations

import glob
import hashlib
import json
import os
import time
from collections.abc import Iterable, Iterator
from typing import BinaryIO, NamedTuple

from vllm_ascend_kvext.errors import SettingsError

_BESIDE = ("*quant*.json", "*processor_config.json")
"""Further files that decide what weights mean, and how media become inputs."""

_SAMPLE_BYTES = 256
"""The size of one sample of a file."""

_SAMPLES_OF_STAMP = 16
"""The number of samples of a file before it is loaded."""

_SAMPLES_OF_TENSOR = 8
"""The number of samples of a tensor in the digest."""

_SAMPLES_OF_FILE = 4096
"""The number of samples in the digest of a file that is not of safetensors."""

_READ_BYTES = 1 << 20
"""The size of one read of bytes that are hashed as a whole."""


class _Stamp(NamedTuple):
    """Identifies a file before it is loaded.

    Owner and mode of the file may change. If another file of the same size and times was copied
    over it, the sample differs.
    """

    real_path: str
    num_bytes: int
    modified_ns: int
    sample: str

    def __str__(self) -> str:
        modified = time.strftime("%F %T", time.localtime(self.modified_ns / 1e9))
        return (
            f"{self.real_path}, {self.num_bytes} bytes, modified {modified}, "
            f"content {self.sample[:8]}"
        )


class FilesOfWeights:
    """The files that weights are going to be loaded from, and further files beside them.

    Args:
        paths: The paths that the loader names. A path that is no file of this machine makes the
            weights unknown.
    """

    def __init__(self, paths: Iterable[str | os.PathLike[str]]) -> None:
        weights = sorted(os.fspath(path) for path in paths)
        self._folders = sorted({os.path.dirname(path) for path in weights})
        beside = {
            path
            for folder in map(glob.escape, self._folders)
            for pattern in _BESIDE
            for path in glob.glob(os.path.join(folder, pattern))
        }
        self._stamps = {path: _stamp(path) for path in (*weights, *sorted(beside))}

    def digest(self) -> str:
        """The digest of the weights. Equal weights have equal digests in any folder.

        The digest hashes the name and the size of each file. A safetensors file adds its header,
        whole embeddings, and 256 bytes at 8 places of every other tensor. Embeddings are hashed as
        a whole because training may change only a few of their rows. Other trained tensors differ
        at the sampled places. A model of 10,000 tensors takes 80,000 reads of a block. Any other
        file adds 256 bytes at 4,096 places, and its last 1 MiB, where a file of ``torch.save`` has
        the checksums of its tensors.

        Raises:
            SettingsError: If there are no files, if they cannot be read, or if they have changed.
        """
        self._require_same()
        digest = hashlib.sha256()
        path = ""
        try:
            root = os.path.commonpath(self._folders)
            for path in self._stamps:
                with open(path, "rb") as file:
                    size = os.fstat(file.fileno()).st_size
                    digest.update(f"{os.path.relpath(path, root)} {size}\n".encode())
                    for first, num_bytes in _samples(path, size, file):
                        file.seek(first)
                        digest.update(file.read(num_bytes))
        except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
            self._require_same()
            raise _unreadable(f"{path}: {type(error).__name__}: {error}") from error
        self._require_same()
        return digest.hexdigest()

    def _require_same(self) -> None:
        """Raise `SettingsError` if a file is unknown, was replaced, or was written to."""
        if not self._stamps:
            raise _unreadable("none")
        for path, before in self._stamps.items():
            if isinstance(before, str):
                raise _unreadable(before)
            found = _stamp(path)
            if found != before:
                raise SettingsError(
                    "shared_tier: expected files of weights that nobody changes while an engine "
                    f"loads them ({before}), found {path} changed since ({found}): KV of the "
                    "weights in memory would get the name of others. Put new weights into another "
                    "folder, or wait until no engine loads the old ones, and start the engine "
                    "again; or leave shared_tier out."
                )


def _stamp(path: str) -> _Stamp | str:
    """The stamp of a file, or why it has none."""
    try:
        with open(path, "rb") as file:
            found = os.fstat(file.fileno())
            digest = hashlib.sha256()
            step = max(_SAMPLE_BYTES, (found.st_size - _SAMPLE_BYTES) // (_SAMPLES_OF_STAMP - 1))
            for first in range(0, found.st_size, step):
                file.seek(first)
                digest.update(file.read(_SAMPLE_BYTES))
    except OSError as error:
        return f"{path}: {type(error).__name__}: {error}"
    real_path = os.path.realpath(path)
    return _Stamp(real_path, found.st_size, found.st_mtime_ns, digest.hexdigest())


def _unreadable(found: str) -> SettingsError:
    return SettingsError(
        "shared_tier: expected files of weights on this machine, by whose content KV of this model "
        f"is known, found {found}. Serve the model from a folder with its weights, or leave "
        "shared_tier out."
    )


def _samples(path: str, size: int, file: BinaryIO) -> Iterator[tuple[int, int]]:
    """The first byte and the number of bytes of each part of a file that the digest hashes."""
    if not path.endswith(".safetensors"):
        step = max(_SAMPLE_BYTES, size // _SAMPLES_OF_FILE)
        yield from ((first, _SAMPLE_BYTES) for first in range(0, size, step))
        yield max(0, size - _READ_BYTES), _READ_BYTES
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
