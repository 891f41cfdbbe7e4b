# SPDX-License-Identifier: Apache-2.0
"""A shared tier in a folder: of one machine, or of a file system that several machines mount.

    <folder>/kvext1/<name space>/engine.json          what the engines have in common
    <folder>/kvext1/<name space>/r0/objects/<xx>/     objects of rank 0, one file each
    <folder>/kvext1/<name space>/r0/notes/<xx>/       notes: symbolic links to objects

No server, no lock, no index: the folder is all there is. A file is written under another name and
renamed, so it is there as a whole or not at all, whoever is killed meanwhile. It is not flushed to
the disk: what a crash of the machine leaves of it does not have the right checksum::

    file     bytes of the entry | its notes' names | trailer: magic, version, lengths, name, checksum

The checksum is BLAKE3 of everything before it. What was used longest ago gives way: a get sets the
time of the file. Each engine counts the folder when it has put a part of the capacity, and removes
the oldest files of all name spaces; that two do it at once removes a few more.
"""

from __future__ import annotations

import contextlib
import hashlib
import itertools
import os
import struct
import threading
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

from blake3 import blake3

from vllm_ascend_kvext.errors import SettingsError
from vllm_ascend_kvext.shared_tier.protocol import (
    FORMAT_VERSION,
    Answer,
    OnBytes,
    SharedObject,
)

VERSION_FOLDER = f"kvext{FORMAT_VERSION}"

_BLOCK_BYTES = 1 << 20
"""Read and hashed in blocks that stay in a CPU's cache between the two."""

_TRAILER = struct.Struct("<8sIIQ16s32s")
"""Magic, version, bytes of notes, bytes of the entry, hash of the name, checksum."""
_MAGIC = b"KVEXTOBJ"

_FULL_SHARE, _LEFT_SHARE = 15 / 16, 7 / 8
"""Of the capacity: beyond the first, files are removed until the second is left."""
_COUNTED_EVERY = 64
"""After a put of so small a part of the capacity the folder is counted again, ..."""
_COUNTED_EVERY_S = 10.0
"""... and at a put so long after it was counted: others put, too."""

_UNFINISHED_S = 600.0
"""A file that nobody has renamed for so long belongs to a writer that was killed."""


class _File(NamedTuple):
    """A file that takes room."""

    used_s: float
    num_bytes: int
    path: str


class FilesTier:
    """The objects of one rank; see `SharedTier`, whose calls these are.

    Args:
        folder: Is made where its parent exists, for its owner only.
        capacity_bytes: Of the folder, all name spaces together. None: half of the file system.

    Raises:
        SettingsError: If the folder cannot be used, or others could write to it.

    Attributes:
        last_error: The last one of the system, for the log.
    """

    def __init__(
        self, folder: str | Path, capacity_bytes: int | None, namespace: str, rank: int
    ) -> None:
        self._folder = str(folder)
        self._root = os.path.join(folder, VERSION_FOLDER)
        self._own = os.path.join(self._root, namespace, f"r{rank}")
        self._name_key = f"{namespace}/r{rank}/"
        try:
            self._make_folders(self._own)
            mode = os.stat(self._root).st_mode
            if not os.access(self._own, os.R_OK | os.W_OK | os.X_OK):
                raise PermissionError("the folder cannot be read and written by this user")
            space = os.statvfs(self._root)
        except OSError as error:
            raise SettingsError(
                f"shared_tier: expected a folder {folder} of this user, or one that can be made, "
                f"found: {error}. Make it, with mode 0700, or leave shared_tier out."
            ) from error
        if mode & 0o022:
            raise SettingsError(
                f"shared_tier: expected a folder {self._root} that its owner alone can write to, "
                f"found mode {mode & 0o777:03o}: others could put KV there that no model has "
                "computed. chmod go-w, or choose another folder."
            )
        self.capacity_bytes = capacity_bytes or space.f_blocks * space.f_frsize // 2
        self.last_error: OSError | None = None
        self._memory = memoryview(b"")
        self._numbers = itertools.count()
        self._counting = threading.Lock()
        self._put_bytes, self._counted_s = self.capacity_bytes, 0.0

    def register(self, memory: memoryview) -> None:
        self._memory = memory

    def close(self) -> None:
        self._memory = memoryview(b"")

    def exist(self, names: Sequence[str]) -> list[str]:
        return [self._target(name) for name in names]

    def _target(self, name: str) -> str:
        path = self._path(name)
        try:
            if not name.startswith("N"):
                return name if os.path.exists(path) else ""
            target = os.readlink(path)
            if os.path.exists(path):
                return os.path.basename(target)
            os.unlink(path)  # What it led to is gone.
        except OSError as error:
            self._note(error)
        return ""

    def forget(self, names: Sequence[str]) -> None:
        for name in names:
            self._remove(self._path(name))

    # Putting.

    def put(self, objects: Sequence[SharedObject]) -> list[Answer]:
        return [self._put(each) for each in objects]

    def _put(self, each: SharedObject) -> Answer:
        path = self._path(each.name)
        if os.path.exists(path):
            return Answer.WHOLE
        unfinished = f"{path}.{os.getpid()}.{threading.get_ident()}.{next(self._numbers)}"
        try:
            if not self._make_room(each.num_bytes):
                return Answer.UNREACHABLE
            self._make_folders(os.path.dirname(path))
            try:
                self._write(unfinished, each)
                os.rename(unfinished, path)
            except BaseException:
                with contextlib.suppress(OSError):
                    os.unlink(unfinished)
                raise
            for note in each.notes:
                self._link(note, each.name)
        except OSError as error:
            self._note(error)
            return Answer.UNREACHABLE
        return Answer.WHOLE

    def _write(self, path: str, each: SharedObject) -> None:
        file = os.open(path, os.O_CREAT | os.O_EXCL | os.O_WRONLY | os.O_CLOEXEC, 0o600)
        try:
            checksum = blake3()
            for block in self._blocks(each):
                checksum.update(block)
                _write_all(file, block)
            notes = "\n".join(each.notes).encode()
            sizes = (_MAGIC, FORMAT_VERSION, len(notes), each.num_bytes, self._name_hash(each.name))
            end = notes + _TRAILER.pack(*sizes, b"")[:-32]
            checksum.update(end)
            _write_all(file, end + checksum.digest())
        finally:
            os.close(file)

    def _link(self, note: str, name: str) -> None:
        """Let a note lead to an object, unless it leads to one that begins no later."""
        path = self._path(note)
        target = os.path.join("..", "..", "objects", _shard(name), name)
        self._make_folders(os.path.dirname(path))
        try:
            os.symlink(target, path)
        except FileExistsError:
            known = self._target(note)
            if known and _first_tokens(known) <= _first_tokens(name):
                return
            unfinished = f"{path}.{os.getpid()}.{next(self._numbers)}"
            os.symlink(target, unfinished)
            os.replace(unfinished, path)

    # Getting.

    def get_into(self, objects: Sequence[SharedObject], on_bytes: OnBytes) -> list[Answer]:
        answers = []
        for each in objects:
            answer = self._get(each, on_bytes)
            if answer is Answer.BROKEN:
                self.forget([each.name])
            answers.append(answer)
        return answers

    def _get(self, each: SharedObject, on_bytes: OnBytes) -> Answer:
        try:
            file = os.open(self._path(each.name), os.O_RDONLY | os.O_CLOEXEC)
        except FileNotFoundError:
            return Answer.ABSENT
        except OSError as error:
            self._note(error)
            return Answer.UNREACHABLE
        try:
            end_bytes = os.fstat(file).st_size - each.num_bytes
            checksum = blake3()
            # A file that is too short has no room for the trailer, and none is read.
            for block in self._blocks(each) if end_bytes >= _TRAILER.size else ():
                if not _read_all(file, block):
                    return Answer.BROKEN
                checksum.update(block)
                on_bytes(len(block))
            end = os.read(file, max(0, end_bytes))
            if len(end) != end_bytes or not self._is_whole(each, end, checksum):
                return Answer.BROKEN
            with contextlib.suppress(OSError):
                os.utime(file)
            return Answer.WHOLE
        except OSError as error:
            self._note(error)
            return Answer.UNREACHABLE
        finally:
            os.close(file)

    def _is_whole(self, each: SharedObject, end: bytes, checksum: blake3) -> bool:
        if len(end) < _TRAILER.size:
            return False
        checksum.update(end[:-32])
        sizes = (_MAGIC, FORMAT_VERSION, len(end) - _TRAILER.size, each.num_bytes)
        trailer = (*sizes, self._name_hash(each.name), checksum.digest())
        return end[-_TRAILER.size :] == _TRAILER.pack(*trailer)

    def _blocks(self, each: SharedObject) -> Iterator[memoryview]:
        end_bytes = each.offset_bytes + each.num_bytes
        for first in range(each.offset_bytes, end_bytes, _BLOCK_BYTES):
            yield self._memory[first : min(first + _BLOCK_BYTES, end_bytes)]

    # Room.

    def _make_room(self, num_bytes: int) -> bool:
        """Whether so many bytes may be put; the oldest files are removed where room is short."""
        if num_bytes > self.capacity_bytes * _LEFT_SHARE:
            return False
        with self._counting:
            self._put_bytes += num_bytes
            is_due = self._put_bytes * _COUNTED_EVERY >= self.capacity_bytes
            if is_due or time.monotonic() - self._counted_s > _COUNTED_EVERY_S:
                self._put_bytes, self._counted_s = num_bytes, time.monotonic()
                self._evict(num_bytes)
        return True

    def _evict(self, num_bytes: int) -> None:
        files = sorted(files_below(self._root))
        total_bytes = num_bytes + sum(each.num_bytes for each in files)
        killed_s = time.time() - _UNFINISHED_S
        is_full = total_bytes > self.capacity_bytes * _FULL_SHARE
        for each in files:
            is_unfinished = "." in os.path.basename(each.path)
            is_surplus = is_full and total_bytes > self.capacity_bytes * _LEFT_SHARE
            if each.used_s < killed_s if is_unfinished else is_surplus:
                self._remove(each.path)
                total_bytes -= each.num_bytes

    def _remove(self, path: str) -> None:
        """Remove a file and its notes, in whichever name space."""
        with contextlib.suppress(OSError):
            notes = _notes_of(path)
            os.unlink(path)
            folder = os.path.join(os.path.dirname(path), "..", "..", "notes")
            for note in notes:
                with contextlib.suppress(OSError):
                    link = os.path.join(folder, _shard(note), note)
                    if os.path.basename(os.readlink(link)) == os.path.basename(path):
                        os.unlink(link)

    # Names.

    def _make_folders(self, path: str) -> None:
        """Make a folder, and those before it up to that of the tier; all for their owner only."""
        if os.path.isdir(path):
            return
        if path != self._folder:
            self._make_folders(os.path.dirname(path))
        with contextlib.suppress(FileExistsError):
            os.mkdir(path, 0o700)

    def _path(self, name: str) -> str:
        kind = "notes" if name.startswith("N") else "objects"
        return os.path.join(self._own, kind, _shard(name), name)

    def _name_hash(self, name: str) -> bytes:
        return hashlib.blake2b((self._name_key + name).encode(), digest_size=16).digest()

    def _note(self, error: OSError) -> None:
        if not isinstance(error, FileNotFoundError):
            self.last_error = error


def files_below(root: str) -> Iterator[_File]:
    """Every file of objects, unfinished ones included; what vanishes meanwhile is left out."""
    for namespace in _folders(root):
        for rank in _folders(namespace):
            for shard in _folders(os.path.join(rank, "objects")):
                with contextlib.suppress(OSError), os.scandir(shard) as entries:
                    for entry in entries:
                        with contextlib.suppress(OSError):
                            found = entry.stat(follow_symlinks=False)
                            taken_bytes = max(found.st_size, found.st_blocks * 512)
                            yield _File(found.st_mtime, taken_bytes, entry.path)


def _folders(path: str) -> list[str]:
    try:
        with os.scandir(path) as entries:
            return [entry.path for entry in entries if entry.is_dir(follow_symlinks=False)]
    except OSError:
        return []


def _notes_of(path: str) -> list[str]:
    """The notes that a file names, if its end is there."""
    with open(path, "rb") as file:
        end = file.seek(0, os.SEEK_END)
        file.seek(max(0, end - _TRAILER.size))
        trailer = file.read()
        if len(trailer) != _TRAILER.size or not trailer.startswith(_MAGIC):
            return []
        notes_bytes = min(_TRAILER.unpack(trailer)[2], end - _TRAILER.size, _BLOCK_BYTES)
        file.seek(end - _TRAILER.size - notes_bytes)
        names = file.read(notes_bytes).decode(errors="replace").split("\n")
    return [name for name in names if name.startswith("N") and "/" not in name]


def _shard(name: str) -> str:
    """Two digits of the key."""
    return name[-2:]


def _first_tokens(name: str) -> int:
    return int(name[1:].partition("-")[0])


def _write_all(file: int, data: bytes | memoryview) -> None:
    left = memoryview(data)
    while left:
        left = left[os.write(file, left) :]


def _read_all(file: int, block: memoryview) -> bool:
    left = block
    while left:
        num_bytes = os.readv(file, [left])
        if not num_bytes:
            return False
        left = left[num_bytes:]
    return True
