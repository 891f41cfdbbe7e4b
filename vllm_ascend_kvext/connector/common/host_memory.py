# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vllm-ascend-kvext project
"""How much memory a host has left for its workers, and how much they are going to take.

The machine has a bound, and so has each control group (cgroup) that this process is in: a container
is one, and groups may be nested. The least of them counts. The kernel kills a process that goes
beyond the bound of a group, and says nothing to it. The module imports neither torch nor vLLM.
"""

from __future__ import annotations

import mmap
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path, PurePosixPath

from vllm_ascend_kvext.errors import ConnectorError

_GIB = 1 << 30
# A line of `proc_pid_mountinfo(5)` that mounts control groups. The source, before the last field,
# may be empty.
_MOUNT = re.compile(r"\S+ \S+ \S+ (\S+) (\S+) .*- (cgroup2?) \S* (\S+)")
_PAGE_TABLE_ENTRY_BYTES = 8
"""The kernel's own need for each page of memory. A group is charged for it, too."""
_STRICT_OVERCOMMIT = 2
"""The value of ``vm.overcommit_memory`` with which the kernel promises no more than it has."""


class HostMemoryError(ConnectorError, MemoryError):
    """The host memory of a worker cannot be allocated."""


@dataclass(frozen=True, slots=True)
class MemoryBound:
    """What the machine, or one control group, has of memory.

    Attributes:
        where: The file that says so.
        limit_bytes: The most that all its processes may use together.
        used_bytes: What is in use, without what the kernel can take back, such as file cache.
    """

    where: str
    limit_bytes: int
    used_bytes: int

    @property
    def left_bytes(self) -> int:
        return max(0, self.limit_bytes - self.used_bytes)

    def __str__(self) -> str:
        return (
            f"{self.where} allows {in_words(self.limit_bytes)}, of which "
            f"{in_words(self.used_bytes)} are in use and cannot be taken back"
        )


@dataclass(frozen=True, slots=True)
class MemoryNeed:
    """What the workers of one host are going to take together.

    Attributes:
        buffer_bytes: The size of each worker's host buffer.
        num_workers: The workers of the host.
        is_pinned: Whether torch pins the buffers.
        page_bytes: The size of each worker's KV cache, if it is in host memory, and not yet taken.
        num_maps: The processes that map each buffer. Each of them has page tables of its own.
    """

    buffer_bytes: int
    num_workers: int
    is_pinned: bool
    page_bytes: int = 0
    num_maps: int = 1

    @property
    def total_bytes(self) -> int:
        """What all workers take, page tables included."""
        each_bytes = taken_bytes(self.buffer_bytes, is_pinned=self.is_pinned) + self.page_bytes
        return self.num_workers * _with_page_tables(each_bytes, self.num_maps)

    def largest_buffer_bytes(self, left_bytes: int) -> int:
        """The largest buffers that so many workers can have; 0 if there are none."""
        with_entry_bytes = mmap.PAGESIZE + _PAGE_TABLE_ENTRY_BYTES
        each = left_bytes // self.num_workers // with_entry_bytes * mmap.PAGESIZE
        each = max(0, each - self.page_bytes)
        if self.is_pinned and each:
            return 1 << (each.bit_length() - 1)
        return each

    def __str__(self) -> str:
        parts = [in_words(self.buffer_bytes)]
        taken = taken_bytes(self.buffer_bytes, is_pinned=self.is_pinned)
        if taken != self.buffer_bytes:
            parts.append(f"for which torch pins {in_words(taken)}, a power of two")
        if self.page_bytes:
            parts.append(f"{in_words(self.page_bytes)} of KV cache")
        each = ", ".join([*parts, "and page tables"])
        total = in_words(self.total_bytes)
        if self.num_maps > 1:
            return f"{total} for {self.num_maps} workers of this host together ({each})"
        if self.num_workers == 1:
            return f"{total} for 1 worker of this host ({each})"
        return f"{total} for {self.num_workers} workers of this host (each {each})"


def taken_bytes(num_bytes: int, *, is_pinned: bool) -> int:
    """What an allocation takes, without page tables.

    torch's ``CachingHostAllocator``, also with torch_npu, pins powers of two.
    """
    return 1 << (num_bytes - 1).bit_length() if is_pinned else num_bytes


def _with_page_tables(num_bytes: int, num_maps: int) -> int:
    num_pages = -(-num_bytes // mmap.PAGESIZE)
    return num_bytes + num_maps * num_pages * _PAGE_TABLE_ENTRY_BYTES


def in_words(num_bytes: int) -> str:
    """A size for a message: exact, and in GiB."""
    return f"{num_bytes} bytes ({num_bytes / _GIB:.2f} GiB)"


def require_left(need: MemoryNeed, bound: MemoryBound | None, remedy: str) -> None:
    """Refuse to take more than is left.

    Args:
        bound: The tightest bound; None if nothing is known.
        remedy: A sentence for the message.

    Raises:
        HostMemoryError: If more is needed than is left.
    """
    if bound is not None and need.total_bytes > bound.left_bytes:
        raise HostMemoryError(
            f"host memory: expected {need}, found {in_words(bound.left_bytes)} left: {bound}. "
            f"{remedy}"
        )


def tightest_bound(root: Path = Path("/")) -> MemoryBound | None:
    """The bound that leaves the least; None if the host says nothing.

    Args:
        root: The root of the file system.
    """
    return min(_bounds(root), key=lambda bound: bound.left_bytes, default=None)


def commit_bound(root: Path = Path("/")) -> MemoryBound | None:
    """What the kernel promises at most; None if it promises more than it has, as by default.

    A private mapping that is refused is an error of ``mmap``. A page of a shared file is promised
    when it is written to, and the process that writes to one page too many is killed.
    """
    if _number(root / "proc/sys/vm/overcommit_memory") != _STRICT_OVERCOMMIT:
        return None
    machine = root / "proc/meminfo"
    numbers = _numbers(machine)
    if "CommitLimit" not in numbers or "Committed_AS" not in numbers:
        return None
    limit_bytes, used_bytes = numbers["CommitLimit"] * 1024, numbers["Committed_AS"] * 1024
    return MemoryBound(f"CommitLimit of {machine}", limit_bytes, used_bytes)


def smallest_limit(root: Path = Path("/")) -> MemoryBound | None:
    """The bound with the smallest limit, whatever is in use; None if the host says nothing."""
    return min(_bounds(root), key=lambda bound: bound.limit_bytes, default=None)


def _bounds(root: Path) -> list[MemoryBound]:
    bounds = list(_bounds_of_groups(root))
    machine = root / "proc/meminfo"
    numbers = _numbers(machine)
    if "MemTotal" in numbers and "MemAvailable" in numbers:
        total_bytes = numbers["MemTotal"] * 1024
        used_bytes = total_bytes - numbers["MemAvailable"] * 1024
        bounds.append(MemoryBound(str(machine), total_bytes, used_bytes))
    return bounds


def _bounds_of_groups(root: Path) -> Iterator[MemoryBound]:
    """The bounds of this process's group and of all groups around it that can be seen."""
    paths = _paths_of_groups(root)
    for line in _lines(root / "proc/self/mountinfo"):
        found = _MOUNT.fullmatch(line)
        if found is None:
            continue
        mounted_group, mount_point, kind, options = found.groups()
        controller = "memory" if kind == "cgroup" else ""
        if controller not in paths or (controller and controller not in options.split(",")):
            continue
        mount = root / _unescaped(mount_point).lstrip("/")
        inner = _path_below(paths[controller], _unescaped(mounted_group))
        folders = [mount / part for part in (inner, *inner.parents)]
        yield from _bounds_of_first(folders) if controller else _bounds_of_second(folders)


def _paths_of_groups(root: Path) -> dict[str, str]:
    """The groups of this process: the group that bounds memory in v1, and (``""``) that of v2."""
    paths = {}
    for line in _lines(root / "proc/self/cgroup"):
        number, _, rest = line.partition(":")
        controllers, _, path = rest.partition(":")
        if "memory" in controllers.split(","):
            paths["memory"] = path
        elif number == "0" and not controllers:
            paths[""] = path
    return paths


def _path_below(group: str, mounted_group: str) -> PurePosixPath:
    """The path of a group below the mount point.

    A container may see only its own group, at the mount point. The path of its group is then
    outside of the mount, or begins with ``/..``.
    """
    path = PurePosixPath(group)
    if ".." in path.parts or not path.is_relative_to(mounted_group):
        return PurePosixPath(".")
    return path.relative_to(mounted_group)


def _bounds_of_second(folders: list[Path]) -> Iterator[MemoryBound]:
    """Bounds of control groups v2: ``memory.max`` kills, and ``memory.high`` makes wait."""
    for folder in folders:
        used_bytes = _number(folder / "memory.current")
        if used_bytes is None:
            continue
        stat = _numbers(folder / "memory.stat")
        used_bytes -= sum(
            stat.get(key, 0) for key in ("active_file", "inactive_file", "slab_reclaimable")
        )
        for name in ("memory.max", "memory.high"):
            limit_bytes = _number(folder / name)  # None for "max".
            if limit_bytes is not None:
                yield MemoryBound(str(folder / name), limit_bytes, max(0, used_bytes))


def _bounds_of_first(folders: list[Path]) -> Iterator[MemoryBound]:
    """Bounds of control groups v1."""
    for folder in folders:
        file = folder / "memory.limit_in_bytes"
        limit_bytes = _number(file)
        used_bytes = _number(folder / "memory.usage_in_bytes")
        if limit_bytes is None or used_bytes is None:
            continue
        if folder is not folders[0] and _number(folder / "memory.use_hierarchy") == 0:
            return  # This group does not count what the groups below it use.
        stat = _numbers(folder / "memory.stat")
        used_bytes -= stat.get("total_active_file", 0) + stat.get("total_inactive_file", 0)
        yield MemoryBound(str(file), limit_bytes, max(0, used_bytes))
        around_bytes = stat.get("hierarchical_memory_limit", limit_bytes)
        if around_bytes < limit_bytes:
            # A group around this one, which a container may not see.
            where = f"hierarchical_memory_limit of {folder / 'memory.stat'}"
            yield MemoryBound(where, around_bytes, max(0, used_bytes))


def _numbers(file: Path) -> Mapping[str, int]:
    """The numbers of a file with lines such as ``active_file 12`` or ``MemTotal:  12 kB``."""
    found = {}
    for line in _lines(file):
        words = line.split()
        if len(words) >= 2 and words[1].isdecimal():
            found[words[0].rstrip(":")] = int(words[1])
    return found


def _number(file: Path) -> int | None:
    """The number that is all of a file; None if there is no such file or number."""
    text = " ".join(_lines(file)).strip()
    return int(text) if text.isdecimal() else None


def _lines(file: Path) -> list[str]:
    try:
        return file.read_text(encoding="utf-8", errors="surrogateescape").splitlines()
    except OSError:
        return []


def _unescaped(field: str) -> str:
    """A field of ``mountinfo``, in which characters such as blanks are written as ``\\040``."""
    return re.sub(r"\\([0-7]{3})", lambda found: chr(int(found[1], 8)), field)
