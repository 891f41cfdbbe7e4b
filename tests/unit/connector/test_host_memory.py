# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vllm-ascend-kvext project
"""What is left on a host, read from files as the kernel writes them, and what workers take."""

from __future__ import annotations

import mmap
import random
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

import pytest

from vllm_ascend_kvext.connector.common.host_memory import (
    HostMemoryError,
    MemoryBound,
    MemoryNeed,
    commit_bound,
    require_left,
    smallest_limit,
    taken_bytes,
    tightest_bound,
)
from vllm_ascend_kvext.engine_configuration import HostReport, fitting_memory

GIB = 1 << 30
NO_LIMIT_OF_V1 = 0x7FFFFFFFFFFFF000
V1 = "31 25 0:32 {group} {mount} rw,relatime shared:9 - cgroup cgroup rw,memory"
V2 = "30 25 0:31 {group} {mount} rw,relatime - cgroup2 cgroup2 rw,nsdelegate"


class Host:
    """A file system of a host, below one folder.

    Args:
        root: The folder.
        group: The lines of ``/proc/self/cgroup``.
        mounts: Lines of ``/proc/self/mountinfo``.
    """

    def __init__(self, root: Path, group: str = "", mounts: str = "") -> None:
        self.root = root
        self.write("proc/meminfo", "MemTotal: 67108864 kB\nMemFree: 1024 kB\n", available_gib=60)
        self.write("proc/self/cgroup", group)
        # Mounts of other file systems stand between those of control groups.
        others = (
            "23 1 254:0 / / rw - ext4 /dev/root rw\n24 23 0:5 / /dev rw - tmpfs  rw\n\nnonsense\n"
        )
        self.write("proc/self/mountinfo", f"{others}{mounts}\n")

    def write(self, path: str, text: str, available_gib: float | None = None) -> None:
        file = self.root / path
        file.parent.mkdir(parents=True, exist_ok=True)
        if available_gib is not None:
            text += f"MemAvailable:   {int(available_gib * (1 << 20))} kB\n"
        file.write_text(text)

    def group_of_second(
        self, path: str, used_gib: float, stat: Mapping[str, float], **limits: str
    ) -> None:
        """A control group v2. ``limits`` are ``max`` and ``high``, in bytes or the word ``max``."""
        folder = f"sys/fs/cgroup/{path}"
        self.write(f"{folder}/memory.current", f"{int(used_gib * GIB)}\n")
        for name, value in ({"max": "max", "high": "max"} | limits).items():
            self.write(f"{folder}/memory.{name}", f"{value}\n")
        self._stat(folder, stat)

    def group_of_first(self, path: str, limit_bytes: int, used_gib: float, **stat: float) -> None:
        """A control group v1."""
        folder = f"sys/fs/cgroup/memory/{path}"
        self.write(f"{folder}/memory.limit_in_bytes", f"{limit_bytes}\n")
        self.write(f"{folder}/memory.usage_in_bytes", f"{int(used_gib * GIB)}\n")
        self.write(f"{folder}/memory.use_hierarchy", "1\n")
        self._stat(folder, stat)

    def _stat(self, folder: str, stat: Mapping[str, float]) -> None:
        lines = [f"{key} {int(value * GIB)}\n" for key, value in stat.items()]
        self.write(f"{folder}/memory.stat", "".join(lines))

    @property
    def bound(self) -> MemoryBound:
        found = tightest_bound(self.root)
        assert found is not None
        return found

    @property
    def left_gib(self) -> float:
        return self.bound.left_bytes / GIB


def in_second(root: Path, group: str = "/", mounted: str = "/") -> Host:
    mount = V2.format(group=mounted, mount="/sys/fs/cgroup")
    return Host(root, f"0::{group}\n", mount)


def in_first(root: Path, group: str, mounted: str = "/") -> Host:
    mount = V1.format(group=mounted, mount="/sys/fs/cgroup/memory")
    return Host(root, f"5:cpu:/\n4:hugetlb,memory:{group}\n0::/elsewhere\n", mount)


def test_without_groups_the_machine_counts(tmp_path: Path) -> None:
    host = Host(tmp_path)
    assert host.left_gib == 60
    assert host.bound.where.endswith("proc/meminfo")
    assert host.bound.limit_bytes == 64 * GIB


def test_a_host_that_says_nothing_has_no_bound(tmp_path: Path) -> None:
    assert tightest_bound(tmp_path) is None
    assert smallest_limit(tmp_path) is None
    Host(tmp_path).write("proc/meminfo", "MemTotal: 67108864 kB\n")
    assert tightest_bound(tmp_path) is None


@pytest.mark.parametrize(("overcommit", "left_gib"), [("0", None), ("1", None), ("2", 20)])
def test_what_the_kernel_promises_is_a_bound_if_it_is_strict(
    tmp_path: Path, overcommit: str, left_gib: int | None
) -> None:
    host = Host(tmp_path)
    assert commit_bound(tmp_path) is None
    host.write("proc/sys/vm/overcommit_memory", f"{overcommit}\n")
    assert commit_bound(tmp_path) is None
    promised = f"CommitLimit: {32 << 20} kB\nCommitted_AS:   {12 << 20} kB\n"
    host.write("proc/meminfo", promised)
    bound = commit_bound(tmp_path)
    assert (bound and bound.left_bytes) == (left_gib and left_gib * GIB)


def test_this_host_says_something() -> None:
    bound = tightest_bound()
    assert bound is not None and 0 < bound.left_bytes <= bound.limit_bytes
    assert HostReport.of_this_process("cpu").host


def test_a_container_of_v2_is_a_bound(tmp_path: Path) -> None:
    host = in_second(tmp_path)
    host.group_of_second("", 3, {}, max=str(8 * GIB))
    assert host.left_gib == 5
    assert host.bound.where.endswith("sys/fs/cgroup/memory.max")


@pytest.mark.parametrize(
    ("stat", "left_gib"),
    [
        # The kernel takes file cache back before it kills.
        ({"file": 2, "active_file": 0.5, "inactive_file": 1.5}, 7),
        ({"slab_reclaimable": 1, "slab_unreclaimable": 1}, 6),
        # Shared memory is among the file cache, but can only go to swap.
        ({"file": 2, "shmem": 2, "inactive_anon": 2, "active_file": 0, "inactive_file": 0}, 5),
        ({"anon": 3, "unevictable": 1}, 5),
    ],
)
def test_what_the_kernel_can_take_back_is_left(
    tmp_path: Path, stat: Mapping[str, float], left_gib: float
) -> None:
    host = in_second(tmp_path)
    host.group_of_second("", 3, stat, max=str(8 * GIB))
    assert host.left_gib == left_gib


@pytest.mark.parametrize(
    ("limits", "left_gib", "where"),
    [
        ({"max": str(8 * GIB), "high": str(6 * GIB)}, 3, "memory.high"),
        ({"max": str(8 * GIB), "high": "max"}, 5, "memory.max"),
        ({"max": str(2 * GIB), "high": "max"}, 0, "memory.max"),
        ({"max": "max", "high": "max"}, 60, "meminfo"),
    ],
)
def test_both_limits_of_v2_count(
    tmp_path: Path, limits: dict[str, str], left_gib: float, where: str
) -> None:
    host = in_second(tmp_path)
    host.group_of_second("", 3, {}, **limits)
    assert host.left_gib == left_gib
    assert host.bound.where.endswith(where)


@pytest.mark.parametrize("tightest", ["pod", "pod/engine", "pod/engine/worker"])
def test_every_group_around_the_process_counts(tmp_path: Path, tightest: str) -> None:
    host = in_second(tmp_path, "/pod/engine/worker")
    host.group_of_second("pod", 30, {}, max=str(50 * GIB))
    host.group_of_second("pod/engine", 20, {}, max=str(40 * GIB))
    host.group_of_second("pod/engine/worker", 10, {}, max="max")
    used_gib = {"pod": 30, "pod/engine": 20, "pod/engine/worker": 10}[tightest]
    host.group_of_second(tightest, used_gib, {}, max=str((used_gib + 1) * GIB))
    assert host.left_gib == 1
    assert host.bound.where.endswith(f"sys/fs/cgroup/{tightest}/memory.max")


def test_a_group_without_a_memory_controller_is_no_bound(tmp_path: Path) -> None:
    """As in the hybrid mode of systemd, and for a group whose parent does not delegate memory."""
    host = in_second(tmp_path, "/pod/engine")
    host.write("sys/fs/cgroup/pod/engine/cgroup.procs", "1\n")
    assert host.left_gib == 60
    host.group_of_second("pod", 3, {}, max=str(8 * GIB))
    assert host.left_gib == 5


@pytest.mark.parametrize(
    ("group", "mounted"),
    [
        ("/docker/12ab", "/docker/12ab"),  # Docker without a namespace of groups.
        ("/", "/"),
        ("/../../kubepods/pod7", "/"),  # The process has been moved out of its namespace.
        ("/kubepods/pod7", "/docker/12ab"),
    ],
)
def test_the_group_at_the_mount_point_is_found(tmp_path: Path, group: str, mounted: str) -> None:
    first = in_first(tmp_path / "1", group, mounted)
    first.group_of_first("", 8 * GIB, 3)
    assert first.left_gib == 5
    second = in_second(tmp_path / "2", group, mounted)
    second.group_of_second("", 3, {}, max=str(8 * GIB))
    assert second.left_gib == 5


def test_a_group_that_begins_like_the_mounted_one_is_another(tmp_path: Path) -> None:
    host = in_first(tmp_path, "/docker/12abc", "/docker/12ab")
    host.group_of_first("", 8 * GIB, 3)
    host.group_of_first("c", 4 * GIB, 3)
    assert host.left_gib == 5


def test_a_group_inside_a_container_is_found(tmp_path: Path) -> None:
    first = in_first(tmp_path / "1", "/docker/12ab/engine", "/docker/12ab")
    first.group_of_first("", 8 * GIB, 3)
    first.group_of_first("engine", 3 * GIB, 2)
    assert first.left_gib == 1
    second = in_second(tmp_path / "2", "/docker/12ab/engine", "/docker/12ab")
    second.group_of_second("", 3, {}, max=str(8 * GIB))
    second.group_of_second("engine", 2, {}, max=str(3 * GIB))
    assert second.left_gib == 1


def test_a_mount_point_may_have_blanks(tmp_path: Path) -> None:
    mount = V2.format(group="/", mount="/sys/fs\\040of\\134us/cgroup")
    host = Host(tmp_path, "0::/\n", mount)
    host.write("sys/fs of\\us/cgroup/memory.max", f"{8 * GIB}\n")
    host.write("sys/fs of\\us/cgroup/memory.current", f"{3 * GIB}\n")
    assert host.left_gib == 5


def test_groups_of_v1_count(tmp_path: Path) -> None:
    host = in_first(tmp_path, "/pod/engine")
    host.group_of_first("", NO_LIMIT_OF_V1, 50)
    host.group_of_first("pod", 10 * GIB, 6, total_active_file=1, total_inactive_file=1)
    host.group_of_first("pod/engine", NO_LIMIT_OF_V1, 5)
    assert host.left_gib == 6
    assert host.bound.where.endswith("memory/pod/memory.limit_in_bytes")


def test_cache_of_v1_is_that_of_all_groups_below(tmp_path: Path) -> None:
    host = in_first(tmp_path, "/pod")
    host.group_of_first(
        "pod", 10 * GIB, 6, inactive_file=0.5, total_inactive_file=2, total_shmem=1, total_cache=3
    )
    assert host.left_gib == 6


def test_a_group_of_v1_that_does_not_count_others_is_no_bound(tmp_path: Path) -> None:
    host = in_first(tmp_path, "/pod/engine")
    host.group_of_first("pod/engine", 20 * GIB, 5)
    host.group_of_first("pod", 1 * GIB, 0)
    host.write("sys/fs/cgroup/memory/pod/memory.use_hierarchy", "0\n")
    assert host.left_gib == 15


def test_a_limit_around_a_container_of_v1_counts(tmp_path: Path) -> None:
    """The group around it cannot be seen, but its limit is in the statistics."""
    host = in_first(tmp_path, "/pod/engine", "/pod/engine")
    host.group_of_first("", NO_LIMIT_OF_V1, 5, hierarchical_memory_limit=12)
    assert host.left_gib == 7
    assert "hierarchical_memory_limit" in host.bound.where


def test_a_limit_is_the_smallest_whatever_is_in_use(tmp_path: Path) -> None:
    host = in_second(tmp_path)
    host.group_of_second("", 3, {}, max=str(50 * GIB))
    host.write("proc/meminfo", "MemTotal: 67108864 kB\n", available_gib=1)
    assert host.left_gib == 1
    limit = smallest_limit(tmp_path)
    assert limit is not None and limit.limit_bytes == 50 * GIB


def test_page_tables_are_taken_too() -> None:
    pages = 5
    need = MemoryNeed(pages * mmap.PAGESIZE, 3, is_pinned=False)
    assert need.total_bytes == 3 * pages * (mmap.PAGESIZE + 8)
    assert MemoryNeed(64, 1, is_pinned=False).total_bytes == 64 + 8


def test_pages_in_host_memory_are_taken_too() -> None:
    need = MemoryNeed(GIB, 2, is_pinned=False, page_bytes=3 * GIB)
    assert need.total_bytes == MemoryNeed(4 * GIB, 2, is_pinned=False).total_bytes
    assert "each 1073741824 bytes (1.00 GiB), 3221225472 bytes (3.00 GiB) of KV cache" in str(need)
    assert need.largest_buffer_bytes(need.total_bytes) == GIB
    assert need.largest_buffer_bytes(2 * GIB) == 0


@pytest.mark.parametrize(
    ("gib", "pinned_gib"), [(1, 1), (5, 8), (9, 16), (16, 16), (16.01, 32), (0.75, 1)]
)
def test_pinned_memory_is_a_power_of_two(gib: float, pinned_gib: int) -> None:
    num_bytes = int(gib * GIB)
    assert taken_bytes(num_bytes, is_pinned=True) == pinned_gib * GIB
    assert taken_bytes(num_bytes, is_pinned=False) == num_bytes
    need = MemoryNeed(num_bytes, 2, is_pinned=True)
    assert need.total_bytes == MemoryNeed(pinned_gib * GIB, 2, is_pinned=False).total_bytes


@pytest.mark.parametrize("is_pinned", [False, True])
def test_all_that_is_left_may_be_taken_and_no_byte_more(is_pinned: bool) -> None:
    need = MemoryNeed(3 * GIB, 2, is_pinned)
    exact = MemoryBound("here", need.total_bytes + 100, 100)
    require_left(need, exact, "")
    require_left(need, None, "")
    with pytest.raises(HostMemoryError):
        require_left(need, MemoryBound("here", need.total_bytes + 99, 100), "")


def test_the_error_has_all_figures() -> None:
    need = MemoryNeed(9 * GIB, 2, is_pinned=True)
    bound = MemoryBound("/sys/fs/cgroup/memory.max", 32 * GIB, 2 * GIB)
    remedy = fitting_memory(need, bound.left_bytes, 4)
    with pytest.raises(HostMemoryError) as error:
        require_left(need, bound, remedy)
    assert str(error.value) == (
        "host memory: expected 34426847232 bytes (32.06 GiB) for 2 workers of this host "
        "(each 9663676416 bytes (9.00 GiB), for which torch pins 17179869184 bytes (16.00 GiB), a "
        "power of two, and page tables), found 32212254720 bytes (30.00 GiB) left: "
        "/sys/fs/cgroup/memory.max allows 34359738368 bytes (32.00 GiB), of which 2147483648 bytes "
        "(2.00 GiB) are in use and cannot be taken back. Set host_memory_gib to at most 32, or "
        "give the host more memory."
    )


def test_what_the_remedy_names_fits_and_is_the_most() -> None:
    rng = random.Random(0)
    for _ in range(2000):
        num_workers, num_hosts = rng.choice([1, 2, 3, 8, 16]), rng.choice([1, 2])
        page_bytes = rng.choice([0, rng.randrange(1 << 30)])
        need = MemoryNeed(1 << 60, num_workers, rng.random() < 0.5, page_bytes)
        left_bytes = rng.randrange(1 << 24, 1 << 40)
        num_workers_of_engine = num_workers * num_hosts
        remedy = fitting_memory(need, left_bytes, num_workers_of_engine)
        if "leave the connector out" in remedy:
            # A hundredth of a GiB, pinned as up to two, is more than is left.
            assert left_bytes < (GIB // 40) + num_workers * 1.01 * page_bytes
            continue
        gib = float(remedy.split()[5].rstrip(","))
        assert need_of(gib, need, num_workers_of_engine) <= left_bytes
        assert need_of(gib + 0.011, need, num_workers_of_engine) > left_bytes


def need_of(gib: float, need: MemoryNeed, num_workers_of_engine: int) -> int:
    """The bytes of ``need`` with so much memory for all workers of the engine."""
    each_bytes = int(gib * GIB) // num_workers_of_engine
    return replace(need, buffer_bytes=each_bytes - each_bytes % 64).total_bytes
