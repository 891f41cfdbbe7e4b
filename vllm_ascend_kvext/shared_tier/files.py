# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vllm-ascend-kvext project
"""A shared tier in a folder of one machine, or of a file system that several machines mount.

    <folder>/kvext3/<name space>/engine.json          what its engines have in common
    <folder>/kvext3/<name space>/r0/objects/<xx>/     objects of rank 0, one file each
    <folder>/kvext3/<name space>/r0/notes/<xx>/       notes: symbolic links, <object>.<seal>

There is no server, no lock and no index. A file is written under another name and then renamed. So
a file exists as a whole or not at all, even if its writer is killed. Files are not flushed, so a
machine that crashes may leave any content. Therefore each file ends with a seal. A note has another
seal, made from its name and its target. If the folder is full, the tier removes the files that were
used longest ago, in all name spaces. A get, a put and a touch count as use. Every engine measures
the folder from time to time. If two engines do so at once, they remove a few files more than
necessary.
"""

from __future__ import annotations

import contextlib
import errno
import glob
import json
import os
import stat
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from uuid import uuid4

from xxhash import xxh3_128

from vllm_ascend_kvext.errors import SettingsError
from vllm_ascend_kvext.shared_tier.backend import (
    Answer,
    SharedObject,
    SharedTier,
    logger,
    seal_of,
    seal_with,
)
from vllm_ascend_kvext.shared_tier.names import (
    FORMAT_VERSION,
    Identity,
    is_note,
    is_rows_name,
    parse_identity,
    piece_of,
)

_ENGINE_FILE = "engine.json"
VERSION_FOLDER = f"kvext{FORMAT_VERSION}"

_BLOCK_BYTES = 1 << 20
"""Files are moved and hashed in blocks of this size, which fit into a CPU's cache."""

_BLOCK_OF_DISK_BYTES = 1 << 12
"""The disk space of a file may exceed its size by about this much."""

_NOTE_SEAL_DIGITS = 16
"""The length of a note's seal. Most file systems store such a short link without a block."""

_MAX_GET_THREADS = 4
"""The most threads that get objects. One thread reads 2 to 6 GB/s from a disk."""

_FULL_SHARE = 15 / 16
"""If the files take more than this share of the capacity, some are removed."""

_LEFT_SHARE = 7 / 8
"""Files are removed until the rest takes at most this share of the capacity."""

_COUNTED_EVERY = 64
"""The folder is measured again when puts have written the capacity divided by this number."""

_MAX_ENGINE_FILE_BYTES = 16 << 20
"""A larger file is no identity of an engine."""

_ABSENT = (FileNotFoundError, NotADirectoryError)
"""The errors of a call for an object that does not exist."""

_NO_LINK = (errno.ENOENT, errno.ENOTDIR, errno.EINVAL)
"""The errors of a call for a note that does not exist. EINVAL means that the file is no link."""

_UNFINISHED_S = 600.0
"""An unfinished file of this age belongs to a writer that was killed."""


class FilesTier(SharedTier):
    """The objects of one rank; see `SharedTier`.

    Args:
        url: ``file:///path`` of a folder. If its parent exists, the folder is made for its owner
            only.
        capacity_bytes: The most bytes in the folder; None for half of the file system.
        rank: The rank of the engine's worker.
        makes_folder: Whether a missing folder is made.

    Raises:
        SettingsError: If the folder cannot be used, or if other users could write to it.
    """

    def __init__(
        self, url: str, capacity_bytes: int | None, rank: int, makes_folder: bool = True
    ) -> None:
        if not url.startswith("file:///"):
            raise SettingsError(f"shared_tier: expected file:///path of a folder, found {url!r}.")
        self._folder = os.path.normpath(url.removeprefix("file://"))
        super().__init__(self._folder)
        self.root = os.path.join(self._folder, VERSION_FOLDER)
        self._rank = f"r{rank}"
        try:
            if makes_folder:
                self._make_folders(self.root)
            above = os.stat(self._folder).st_mode
            found = os.stat(self.root)
            is_replaceable = above & 0o022 and not above & stat.S_ISVTX
            if found.st_mode & 0o022 or found.st_uid != os.geteuid() or is_replaceable:
                raise PermissionError(
                    f"mode {found.st_mode & 0o777:03o} and owner {found.st_uid}, in a folder of "
                    f"mode {above & 0o7777:04o}: others could put KV there that no model has "
                    "computed. Use chmod go-w and chown for both"
                )
            if not os.access(self.root, os.R_OK | os.W_OK | os.X_OK):
                raise PermissionError("one that this user cannot read and write")
            space = os.statvfs(self.root)
        except OSError as error:
            raise SettingsError(
                f"shared_tier: expected a folder {self.root} that only this user, {os.geteuid()}, "
                f"owns and can write to, or that can be made, found {error}. Make one with mode "
                "0700, or leave shared_tier out."
            ) from error
        self.capacity_bytes = capacity_bytes or space.f_blocks * space.f_frsize // 2
        self.num_get_threads = min(_MAX_GET_THREADS, len(os.sched_getaffinity(0)))
        self._counting = threading.Lock()
        self._put_bytes = self.capacity_bytes  # The first put measures the folder.

    def exist(self, names: Sequence[str]) -> list[str]:
        return [self._existing(name) for name in names]

    def _existing(self, name: str) -> str:
        with contextlib.suppress(OSError):
            object_name = self._leads_to(name)
            if object_name and _is_file(self._path(object_name)):
                return os.path.basename(object_name)
        return ""

    def _leads_to(self, name: str) -> str:
        """The object to which a name leads: itself, or the target of a note; empty if none."""
        namespace, _, own = name.rpartition("/")
        if not is_note(own):
            return name
        try:
            found, _, seal = os.readlink(self._path(name)).rpartition(".")
        except OSError as error:
            if error.errno in _NO_LINK:
                return ""
            raise
        is_right = is_rows_name(found) and seal == self._note_seal(name, found)
        return f"{namespace}/{found}" if is_right else ""

    def _note_seal(self, note: str, name: str) -> str:
        return seal_of(f"{self._rank}/{note}", name.encode()).hex()[:_NOTE_SEAL_DIGITS]

    def forget(self, name: str) -> None:
        with contextlib.suppress(OSError):
            os.unlink(self._path(name))

    def _touch(self, names: Sequence[str]) -> list[bool]:
        return [self._is_touched(name) for name in names]

    def _is_touched(self, name: str) -> bool:
        try:
            object_name = self._leads_to(name)
            path = self._path(object_name)
            if not object_name or not _is_file(path):
                return False
            os.utime(path)
        except _ABSENT:
            return False
        return True

    def _put(self, what: SharedObject) -> None:
        path = self._path(what.name)
        if not self._is_touched(what.name):
            self._make_room(what.num_bytes + _BLOCK_OF_DISK_BYTES)
            checksum = xxh3_128()
            opener = partial(os.open, mode=0o600)
            with self._renamed_to(path) as new, open(new, "xb", 0, opener=opener) as file:
                for block in self._blocks(what):
                    checksum.update(block)
                    _write_all(file.fileno(), block)
                _write_all(file.fileno(), memoryview(self._seal(what, checksum)))
        for note in what.notes:
            self._link(f"{os.path.dirname(what.name)}/{note}", os.path.basename(path))

    @contextlib.contextmanager
    def _renamed_to(self, path: str) -> Iterator[str]:
        """Yield the path of an unfinished file, which is renamed to ``path`` at the end."""
        self._make_folders(os.path.dirname(path))
        unfinished = f"{path}.{uuid4().hex}"
        try:
            yield unfinished
            try:
                os.replace(unfinished, path)
            except IsADirectoryError:  # Another program has made a folder of that name.
                self._move_aside(path)
                os.replace(unfinished, path)
        except BaseException:
            with contextlib.suppress(OSError):
                os.unlink(unfinished)
            raise

    def _move_aside(self, path: str) -> None:
        aside = f"{path}.{uuid4().hex}"
        os.rename(path, aside)
        logger.warning(
            "Shared tier %s: expected a file at %s, found a folder. It is %s now, and nothing of "
            "the tier is in it: delete it.",
            self._url,
            path,
            aside,
        )

    def _link(self, note: str, name: str) -> None:
        """Let a note lead to an object, unless its old object begins as early or earlier."""
        link = self._path(note)
        target = f"{name}.{self._note_seal(note, name)}"
        try:
            self._make_folders(os.path.dirname(link))
            os.symlink(target, link)
        except FileExistsError:
            known = self._existing(note)
            if not known or piece_of(known).first_tokens > piece_of(name).first_tokens:
                # Meanwhile another engine may remove the object and the links that lead to it.
                with contextlib.suppress(FileNotFoundError), self._renamed_to(link) as unfinished:
                    os.symlink(target, unfinished)

    def _get(self, what: SharedObject, on_bytes: Callable[[int], None]) -> Answer:
        path = self._path(what.name)
        try:
            if not _is_file(path):
                # `exist` answers the same. An open of a pipe would wait for a writer.
                return Answer.ABSENT
            file = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
        except _ABSENT:
            return Answer.ABSENT
        try:
            return self._read(file, what, on_bytes)
        finally:
            os.close(file)

    def _read(self, file: int, what: SharedObject, on_bytes: Callable[[int], None]) -> Answer:
        # With this advice, the kernel reads ahead twice as far.
        os.posix_fadvise(file, 0, 0, os.POSIX_FADV_SEQUENTIAL)
        checksum = xxh3_128()
        for block in self._blocks(what):
            left = block
            while left:
                num_bytes = os.readv(file, [left])
                if not num_bytes:
                    return Answer.BROKEN
                left = left[num_bytes:]
            checksum.update(block)
            on_bytes(len(block))
        seal = self._seal(what, checksum)
        if os.read(file, len(seal) + 1) != seal:
            return Answer.BROKEN
        with contextlib.suppress(OSError):
            os.utime(file)
        return Answer.WHOLE

    def _seal(self, what: SharedObject, checksum: xxh3_128) -> bytes:
        return seal_with(checksum, f"{self._rank}/{what.name}", what.num_bytes)

    def _blocks(self, what: SharedObject) -> Iterator[memoryview]:
        end_bytes = what.offset_bytes + what.num_bytes
        for first in range(what.offset_bytes, end_bytes, _BLOCK_BYTES):
            yield self._memory[first : min(first + _BLOCK_BYTES, end_bytes)]

    def engines(self) -> dict[str, Identity]:
        found: dict[str, Identity] = {}
        for path in sorted(Path(self.root).glob(f"*/{_ENGINE_FILE}")):
            try:
                namespace, identity = parse_identity(_small_file(path))
                if namespace != path.parent.name:
                    raise ValueError(f"the identity of another name space, {namespace}")
            except FileNotFoundError:
                continue  # The file was removed meanwhile.
            except (OSError, ValueError) as error:
                logger.warning(
                    "Shared tier %s: expected in %s what engines of its name space have in common, "
                    "found %s. It is left out; objects are not concerned. Delete it: such an "
                    "engine writes it again when it starts.",
                    self._url,
                    path,
                    error,
                )
                continue
            found[namespace] = identity
        return found

    def introduce(self, namespace: str, identity: Identity) -> None:
        path = os.path.join(self.root, namespace, _ENGINE_FILE)
        text = json.dumps(identity, indent=1, sort_keys=True)
        with contextlib.suppress(OSError), self._renamed_to(path) as unfinished:
            Path(unfinished).touch(0o600)
            Path(unfinished).write_text(text, encoding="utf-8")

    def describe(self) -> tuple[str, Mapping[str, str]]:
        sizes: Counter[str] = Counter()
        counts: Counter[str] = Counter()
        for _, taken_bytes, path in files_below(self.root):
            namespace = os.path.relpath(path, self.root).partition(os.sep)[0]
            sizes[namespace] += taken_bytes
            counts[namespace] += 1
        space = os.statvfs(self.root)
        free_gb = space.f_bavail * space.f_frsize / 1e9
        summary = f"holds {sizes.total() / 1e9:.3f} GB; the file system has {free_gb:.3f} GB left"
        found = ((name, counts[name], size / 1e9) for name, size in sizes.most_common())
        return summary, {name: f"{count} objects, {gb:.3f} GB" for name, count, gb in found}

    def _make_room(self, num_bytes: int) -> None:
        """Make room for a put. If the folder is full, the files used longest ago are removed.

        Raises:
            OSError: If the capacity is too small for so many bytes.
        """
        if num_bytes > self.capacity_bytes * _LEFT_SHARE:
            raise OSError(f"{num_bytes} bytes are too many for {self.capacity_bytes} in all")
        with self._counting:
            self._put_bytes += num_bytes
            if self._put_bytes * _COUNTED_EVERY >= self.capacity_bytes:
                self._put_bytes = num_bytes
                self._evict(num_bytes)

    def _evict(self, num_bytes: int) -> None:
        files = sorted(files_below(self.root))
        total_bytes = num_bytes + sum(taken_bytes for _, taken_bytes, _ in files)
        killed_s = time.time() - _UNFINISHED_S
        is_full = total_bytes > self.capacity_bytes * _FULL_SHARE
        for used_s, taken_bytes, path in files:
            is_unfinished = "." in os.path.basename(path)
            if is_unfinished:
                is_removed = used_s < killed_s
            else:
                is_removed = is_full and total_bytes > self.capacity_bytes * _LEFT_SHARE
            if is_removed:
                with contextlib.suppress(OSError):
                    os.unlink(path)
                total_bytes -= taken_bytes
        if is_full:
            self._remove_notes_of_nothing()

    def _remove_notes_of_nothing(self) -> None:
        """Remove the notes whose object does not exist any more."""
        for link in _paths_below(self.root, "notes"):
            with contextlib.suppress(OSError):
                name = os.readlink(link).rpartition(".")[0]
                if not os.path.exists(_path_of(link, name)):
                    os.unlink(link)

    def _make_folders(self, path: str) -> None:
        """Make a folder and its parents below the tier's folder. Only their owner can use them."""
        if not os.path.isdir(path):
            if path != self._folder:
                self._make_folders(os.path.dirname(path))
            with contextlib.suppress(FileExistsError):
                os.mkdir(path, 0o700)

    def _path(self, name: str) -> str:
        namespace, _, own = name.rpartition("/")
        kind = "notes" if is_note(own) else "objects"
        return os.path.join(self.root, namespace, self._rank, kind, own[-2:], own)


def files_below(root: str) -> Iterator[tuple[float, int, str]]:
    """The files of all objects, unfinished ones included.

    Yields:
        When the file was used last, in seconds of the clock; the bytes that it takes; its path.
    """
    for path in _paths_below(root, "objects"):
        with contextlib.suppress(OSError):
            found = os.lstat(path)
            if stat.S_ISDIR(found.st_mode):
                continue  # The tier has made no folder here.
            yield found.st_mtime, max(found.st_size, found.st_blocks * 512), path


def _paths_below(root: str, kind: str) -> Iterator[str]:
    """The paths in all name spaces, ranks and shards. Files that vanish meanwhile are left out."""
    return glob.iglob(f"{glob.escape(root)}/*/*/{kind}/*/*")


def _is_file(path: str) -> bool:
    """Whether a path is a file, and no link, folder or pipe; raises OSError if nothing is there."""
    return stat.S_ISREG(os.lstat(path).st_mode)


def _path_of(link: str, name: str) -> str:
    """The path of the object to which a note leads. Both belong to the same rank."""
    rank_folder = os.path.dirname(os.path.dirname(os.path.dirname(link)))
    return os.path.join(rank_folder, "objects", name[-2:], name)


def _small_file(path: Path) -> bytes:
    """The content of a small file that another program may have written.

    Raises:
        ValueError: If the path is no file, or if the file is large.
    """
    # O_NONBLOCK keeps the open of a pipe from waiting for a writer.
    file = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
    try:
        found = os.fstat(file)
        if not stat.S_ISREG(found.st_mode):
            raise ValueError("what is no file")
        if found.st_size > _MAX_ENGINE_FILE_BYTES:
            raise ValueError(f"{found.st_size} bytes, more than {_MAX_ENGINE_FILE_BYTES}")
    except BaseException:
        os.close(file)
        raise
    with open(file, "rb") as content:
        return content.read(_MAX_ENGINE_FILE_BYTES)


def _write_all(file: int, left: memoryview) -> None:
    while left:
        left = left[os.write(file, left) :]
