# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vllm-ascend-kvext project
"""One stretch of memory for all workers of a host.

The memory is an anonymous file (``memfd_create(2)``). It has no name in any file system, so no
other engine can meet it, and no limit of ``/dev/shm`` holds for it. The kernel frees it when the
last worker ends, also by SIGKILL. Only processes of the same user can open it, by ``/proc``.
"""

from __future__ import annotations

import contextlib
import ctypes
import errno
import mmap
import os
from collections.abc import Callable, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any

from vllm_ascend_kvext.connector.common.host_memory import HostMemoryError

_NAME = "kvext host memory"
"""The name of the memory in ``/proc/PID/maps``."""

_MFD_CLOEXEC = 1
"""See ``linux/memfd.h``; Python has it only if it has ``os.memfd_create``."""


class HostPeers:
    """The workers of an engine, and which of them are on the host of this one.

    All workers of the engine take the same steps together, because each step waits for all. A
    worker that fails between two steps takes part in the next one nevertheless, by the end of its
    ``with`` block. That step then raises `HostMemoryError` on the others, so that no worker waits
    for it in a later step.

    Args:
        rank: The tensor-parallel rank of this worker.
        exchange: Gives a value to all workers of the engine, and returns the values of all, by
            rank.
        host: Equal for workers that can map each other's memory, see `host_id`; None if this
            worker cannot know them.

    Attributes:
        knows_host: Whether this worker can know which workers are on its host.
        num_ranks: The ranks of the engine.
        ranks_of_host: The ranks on this host, in rising order.
    """

    def __init__(self, rank: int, exchange: Callable[[Any], list[Any]], host: str | None) -> None:
        self.rank = rank
        self.knows_host = host is not None
        self._exchange = exchange
        self._is_over = False
        hosts = exchange(host)
        self.num_ranks = len(hosts)
        self.ranks_of_host = tuple(
            each
            for each, other in enumerate(hosts)
            if each == rank or (self.knows_host and other == host)
        )

    def __enter__(self) -> HostPeers:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if error is not None and not self._is_over:
            self._step(None, repr(error), has_left=True)

    def are_equal(self, value: Any) -> bool:
        """Whether all workers of the engine have an equal value. A step; the last one if not."""
        values, errors = self._step(value)
        is_equal = not errors and all(each == value for each in values)
        self._is_over |= not is_equal
        return is_equal

    def share(self, value: Any) -> Any:
        """The value of the first rank of this host. A step."""
        values, _ = self._step(value)
        return values[self.ranks_of_host[0]]

    def agree(self, error: str | None) -> Sequence[str]:
        """What has failed on any worker. A step; the last one if something has."""
        _, errors = self._step(None, error)
        return errors

    def wait(self) -> None:
        """Wait until all workers have come here. A step."""
        self._step(None)

    def end(self) -> None:
        """No step follows."""
        self._is_over = True

    def _step(
        self, value: Any, error: str | None = None, has_left: bool = False
    ) -> tuple[list[Any], list[str]]:
        given = self._exchange((value, error, has_left))
        errors = [each for _, each, _ in given if each is not None]
        self._is_over |= bool(errors)
        left = [each for _, each, has_other_left in given if has_other_left]
        if left and not has_left:
            raise HostMemoryError(f"host memory: another worker of the engine failed: {left[0]}")
        return [each for each, _, _ in given], errors


def host_id() -> str | None:
    """The same for processes that can open each other's files, and different on other hosts.

    Returns:
        None if the kernel does not tell it. Sandboxes may leave files of ``/proc`` out.
    """
    try:
        namespace = os.stat("/proc/self/ns/pid").st_ino
        boot = Path("/proc/sys/kernel/random/boot_id").read_text("ascii").strip()
    except OSError:
        return None
    return f"{boot}/{namespace}"


def map_together(peers: HostPeers, num_bytes: int) -> mmap.mmap | str:
    """Map one anonymous file in all workers of each host. Two steps of `HostPeers`.

    Either all workers of the engine get the memory, or none does. Its pages are not taken yet.

    Returns:
        The memory; or why there is none.
    """
    file: int | None = None
    memory: mmap.mmap | None = None
    error: str | None = None
    place: tuple[str, tuple[int, int]] | None = None
    try:
        if peers.rank == peers.ranks_of_host[0]:
            try:
                file = _anonymous_file()
                os.fchmod(file, 0o600)
                os.ftruncate(file, num_bytes)
                # A process may have another number in /proc than in its own namespace.
                place = f"/proc/{os.readlink('/proc/self')}/fd/{file}", _identity(file)
            except OSError as failure:
                error = f"rank {peers.rank} cannot make a file of {num_bytes} bytes ({failure})"
        place = peers.share(place)
        try:
            if place is not None:
                path, identity = place
                if file is None:
                    file = os.open(path, os.O_RDWR | os.O_CLOEXEC)
                if _identity(file) != identity:
                    raise OSError(errno.ENXIO, f"{path} is another file")
                memory = mmap.mmap(file, num_bytes, flags=mmap.MAP_SHARED)
                memory.madvise(mmap.MADV_DONTFORK)
        except OSError as failure:
            error = f"rank {peers.rank} cannot map the memory of its host ({failure})"
        # The first rank keeps its file open until the others have opened it.
        errors = peers.agree(error)
    finally:
        if file is not None:
            os.close(file)
    if errors or memory is None:
        if memory is not None:
            memory.close()
        return errors[0] if errors else "the first rank of the host has no memory"
    with contextlib.suppress(OSError):  # The kernel may have no huge pages for shared memory.
        memory.madvise(mmap.MADV_HUGEPAGE)
    return memory


def _anonymous_file() -> int:
    """Make an anonymous file.

    Python lacks ``os.memfd_create`` if it was built with a C library older than glibc 2.27. Builds
    by uv and conda are such. The C library of the machine is newer in general.

    Raises:
        OSError: The kernel refuses, or the C library is too old.
    """
    if hasattr(os, "memfd_create"):
        return os.memfd_create(_NAME, _MFD_CLOEXEC)
    create = getattr(ctypes.CDLL(None, use_errno=True), "memfd_create", None)
    if create is None:
        raise OSError(errno.ENOSYS, "the C library has no memfd_create")
    file = int(create(_NAME.encode(), ctypes.c_uint(_MFD_CLOEXEC)))
    if file < 0:
        code = ctypes.get_errno()
        raise OSError(code, os.strerror(code))
    return file


def _identity(file: int) -> tuple[int, int]:
    """The same for two descriptors of one file only."""
    found = os.fstat(file)
    return found.st_dev, found.st_ino


def own_part(peers: HostPeers, num_bytes: int) -> tuple[int, int]:
    """The first and the end byte of the memory that this worker takes from the kernel."""
    position = peers.ranks_of_host.index(peers.rank)
    num_parts = len(peers.ranks_of_host)
    bounds = (num_bytes * number // num_parts for number in (position, position + 1))
    first, end = (bound - bound % mmap.PAGESIZE for bound in bounds)
    return first, num_bytes if position == num_parts - 1 else end
