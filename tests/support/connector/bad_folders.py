# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vllm-ascend-kvext project
"""Mounts broken file systems over a folder. This needs root, on Linux."""

from __future__ import annotations

import ctypes
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

_MNT_DETACH = 2
_NOBODY = 65534


def _mount(kind: str, folder: Path, options: str) -> None:
    """Mount a file system. Raises OSError if the process is not allowed to."""
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.mount(b"test", os.fsencode(folder), kind.encode(), 0, options.encode()):
        raise OSError(ctypes.get_errno(), f"{kind} cannot be mounted over {folder}")


def _unmount(folder: Path) -> None:
    ctypes.CDLL(None).umount2(os.fsencode(folder), _MNT_DETACH)


class Hanging:
    """A FUSE file system without a server. From `begin` to `end`, every access waits."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._file: int | None = None

    def begin(self) -> None:
        if self._file is None:
            self._file = os.open("/dev/fuse", os.O_RDWR)
            _mount("fuse", self._folder, f"fd={self._file},rootmode=40000,user_id=0,group_id=0")

    def end(self) -> None:
        """End the mount. Waiting accesses get an error."""
        if self._file is not None:
            _unmount(self._folder)
            os.close(self._file)
            self._file = None


@contextmanager
def hanging(folder: Path) -> Iterator[None]:
    found = Hanging(folder)
    found.begin()
    try:
        yield
    finally:
        found.end()


@contextmanager
def full(folder: Path, num_bytes: int) -> Iterator[None]:
    """Mount an empty disk of this size."""
    _mount("tmpfs", folder, f"size={num_bytes},mode=700")
    try:
        yield
    finally:
        _unmount(folder)


@contextmanager
def forbidden(folder: Path) -> Iterator[None]:
    """Make a folder unusable for this process. A root process changes its user inside the block."""
    mode = folder.stat().st_mode
    user_id = os.geteuid()
    folder.chmod(0)
    if not user_id:
        os.seteuid(_NOBODY)
    try:
        yield
    finally:
        os.seteuid(user_id)
        folder.chmod(mode)


def can_mount(folder: Path) -> bool:
    try:
        with hanging(folder), full(folder, 1 << 20):
            return True
    except OSError:
        return False
