# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vllm-ascend-kvext project
"""The memory that all workers of a host map: who gets it, what failures leave, and when it is gone.

Some tests have workers in threads, others in processes of their own.
"""

from __future__ import annotations

import gc
import mmap
import multiprocessing
import os
import resource
import shutil
import subprocess
from collections.abc import Callable, Iterator
from functools import partial
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import pytest
from support.connector.meetings import Meeting, in_threads

from vllm_ascend_kvext.connector.common.host_memory import HostMemoryError, MemoryBound
from vllm_ascend_kvext.connector.worker import host_buffer, mapped_memory, shared_arena
from vllm_ascend_kvext.connector.worker.shared_arena import (
    HostPeers,
    host_id,
    map_together,
    own_part,
)
from vllm_ascend_kvext.transfer.errors import BackendError

NUM_BYTES = 1 << 20


def peers(meeting: Meeting, rank: int, host: str = "here") -> HostPeers:
    return HostPeers(rank, lambda value: meeting.exchange(rank, value), host)


def map_in_threads(hosts: list[str]) -> list[Any]:
    meeting = Meeting(len(hosts))
    return in_threads(
        lambda rank: map_together(peers(meeting, rank, hosts[rank]), NUM_BYTES), len(hosts)
    )


def test_workers_of_a_host_see_the_same_bytes_and_others_do_not() -> None:
    first, second, third = map_in_threads(["a", "a", "b"])
    first[5] = 7
    assert (second[5], third[5]) == (7, 0)


def test_parts_are_all_of_the_memory_and_no_byte_twice() -> None:
    meeting = Meeting(3)
    parts = in_threads(lambda rank: own_part(peers(meeting, rank), NUM_BYTES + 64), 3)
    assert [first for first, _ in parts] == [0, *(end for _, end in parts[:-1])]
    assert parts[-1][1] == NUM_BYTES + 64
    assert all(first % 4096 == 0 for first, _ in parts)


@pytest.mark.parametrize("rank", [0, 1])
def test_a_worker_that_cannot_map_it_leaves_all_without(
    rank: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    map_file = shared_arena.mmap.mmap
    count = iter(range(2))

    def refuse(*arguments: Any, **named: Any) -> Any:
        if next(count) == rank:
            raise OSError("not permitted")
        return map_file(*arguments, **named)

    monkeypatch.setattr(shared_arena.mmap, "mmap", refuse)
    found = map_in_threads(["here", "here"])
    assert all("cannot map the memory of its host (not permitted)" in each for each in found)
    assert found[0] == found[1]


def test_a_worker_that_fails_in_between_fails_the_others_at_their_next_step() -> None:
    meeting = Meeting(2)

    def work(rank: int) -> Any:
        with peers(meeting, rank) as them:
            if rank == 1:
                raise ValueError("no such layer")
            return them.agree(None)

    other, failure = in_threads(work, 2)
    assert isinstance(other, HostMemoryError)
    assert "another worker of the engine failed: ValueError('no such layer')" in str(other)
    assert isinstance(failure, ValueError)


@pytest.mark.parametrize("rank", [0, 1])
def test_a_worker_that_fails_while_it_maps_leaves_no_other_waiting(
    rank: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*_: Any) -> Any:
        raise ValueError("no such file")

    # The first worker makes the file, and the second one opens it.
    module, name = (shared_arena, "_anonymous_file") if rank == 0 else (shared_arena.os, "open")
    monkeypatch.setattr(module, name, fail)
    meeting = Meeting(2)

    def work(number: int) -> Any:
        with peers(meeting, number) as them:
            return map_together(them, NUM_BYTES)

    found = in_threads(work, 2)
    assert isinstance(found[rank], ValueError)
    assert "another worker of the engine failed: ValueError" in str(found[1 - rank])


def test_a_python_without_memfd_create_shares_nevertheless(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.delattr(os, "memfd_create")
    monkeypatch.delattr(os, "MFD_CLOEXEC")
    first, second = map_in_threads(["a", "a"])
    first[5] = 7
    assert second[5] == 7
    assert "kvext host memory" in Path("/proc/self/maps").read_text()


def test_a_machine_without_memfd_create_shares_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delattr(os, "memfd_create")
    monkeypatch.setattr(shared_arena.ctypes, "CDLL", lambda *each, **named: object())
    found = map_in_threads(["a", "a"])
    assert all("the C library has no memfd_create" in each for each in found)


def test_another_file_with_the_same_path_is_not_written_to(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    other = tmp_path / "other"
    other.write_bytes(b"kept" * (NUM_BYTES // 4))
    open_file = os.open
    monkeypatch.setattr(shared_arena.os, "open", lambda _, flags: open_file(other, flags))
    found = map_in_threads(["a", "a"])
    assert all("is another file" in each for each in found)
    assert other.read_bytes() == b"kept" * (NUM_BYTES // 4)


def test_a_worker_that_cannot_know_its_host_is_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shared_arena, "Path", lambda _: Path("/proc/no such file"))
    assert host_id() is None
    meeting = Meeting(2)
    found = in_threads(lambda rank: HostPeers(rank, partial(meeting.exchange, rank), None), 2)
    assert [each.ranks_of_host for each in found] == [(0,), (1,)]


# Host buffers.


@pytest.fixture
def torch() -> Any:
    return pytest.importorskip("torch")


def share(torch: Any, num_ranks: int, num_bytes: int = NUM_BYTES, device: str = "cpu") -> list[Any]:
    meeting = Meeting(num_ranks)
    kind: Any = type("Device", (), {"type": device})
    return in_threads(
        lambda rank: host_buffer.HostBuffer.share(num_bytes, kind, peers(meeting, rank)), num_ranks
    )


@pytest.mark.parametrize("name", ["tightest_bound", "commit_bound"])
def test_too_little_memory_is_an_error_before_anything_is_taken(
    torch: Any, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    bound = MemoryBound("/sys/fs/cgroup/memory.max", 1 << 30, (1 << 30) - NUM_BYTES // 2)
    taken: list[Any] = []
    module = mapped_memory if name == "tightest_bound" else host_buffer
    monkeypatch.setattr(module, name, lambda: bound)
    monkeypatch.setattr(host_buffer, "map_together", lambda *each: taken.append(each))
    first, second = share(torch, 2)
    assert isinstance(first, HostMemoryError) and isinstance(second, HostMemoryError)
    # 256 pages, and two page tables with an entry of 8 bytes for each.
    assert f"expected {NUM_BYTES + 2 * 256 * 8} bytes" in str(first)
    assert "for 2 workers of this host together" in str(first)
    assert f"found {NUM_BYTES // 2} bytes" in str(first)
    assert "memory.max" in str(first) and "Set host_memory_gib to less" in str(first)
    assert "another worker of the engine failed" in str(second)
    assert not taken


def one_worker_cannot_pin(monkeypatch: pytest.MonkeyPatch, error: Exception) -> list[int]:
    """Let the second of two workers fail when it pins what they share.

    Returns:
        The sizes of what is unpinned.
    """
    unpinned: list[int] = []
    count = iter(range(2))

    class Transfers:
        @staticmethod
        def pin_host(host: Any) -> Any:
            if host.numel() == NUM_BYTES and next(count) == 1:
                raise error
            return lambda: unpinned.append(host.numel())

    monkeypatch.setattr(host_buffer, "transfers_on", lambda _: Transfers)
    return unpinned


def test_memory_that_one_worker_cannot_pin_is_shared_by_none(
    torch: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    unpinned = one_worker_cannot_pin(monkeypatch, BackendError("error code 107000"))
    found = share(torch, 2, device="npu")
    assert found[0] == found[1]
    assert "cannot pin the memory of its host (error code 107000)" in found[0]
    assert unpinned == [mmap.PAGESIZE, mmap.PAGESIZE, NUM_BYTES]


def test_memory_is_unpinned_if_another_worker_fails_meanwhile(
    torch: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    unpinned = one_worker_cannot_pin(monkeypatch, ValueError("no such flags"))
    kind: Any = type("Device", (), {"type": "npu"})
    meeting = Meeting(2)

    def work(rank: int) -> Any:
        with peers(meeting, rank) as them:
            return host_buffer.HostBuffer.share(NUM_BYTES, kind, them)

    found = in_threads(work, 2)
    assert {type(each) for each in found} == {HostMemoryError, ValueError}
    assert unpinned == [mmap.PAGESIZE, mmap.PAGESIZE, NUM_BYTES]


def test_memory_that_cannot_be_pinned_is_not_taken_before(
    torch: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    taken: list[Any] = []

    class Transfers:
        @staticmethod
        def pin_host(host: Any) -> Any:
            raise BackendError("expected linux 5.11 or later")

    monkeypatch.setattr(host_buffer, "transfers_on", lambda _: Transfers)
    monkeypatch.setattr(host_buffer, "take_memory", taken.append)
    found = share(torch, 2, device="npu")
    assert all("expected linux 5.11 or later" in each for each in found)
    assert not taken


def test_memory_that_runs_out_while_it_is_taken_leaves_nothing(
    torch: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Another process takes memory after the check of what is left."""
    count = iter(range(2))

    def bound() -> MemoryBound | None:
        # The first rank asks once before anything is taken.
        return None if next(count, None) == 0 else MemoryBound("memory.max", 1 << 30, 1 << 30)

    monkeypatch.setattr(mapped_memory, "tightest_bound", bound)
    monkeypatch.setattr(host_buffer, "commit_bound", lambda: None)
    found = share(torch, 2)
    assert all(isinstance(each, HostMemoryError) for each in found)
    assert any("found 0 bytes" in str(each) and "memory.max" in str(each) for each in found)
    found.clear()
    gc.collect()
    assert "kvext host memory" not in Path("/proc/self/maps").read_text()


def test_pinned_memory_is_unpinned_once(torch: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[tuple[str, int]] = []

    class Transfers:
        @staticmethod
        def pin_host(host: Any) -> Any:
            calls.append(("pin", host.numel()))
            return lambda: calls.append(("unpin", host.numel()))

    monkeypatch.setattr(host_buffer, "transfers_on", lambda _: Transfers)
    (buffer,) = share(torch, 1, device="npu")
    buffer.unmap()
    buffer.unmap()
    sizes = mmap.PAGESIZE, NUM_BYTES
    assert calls == [(what, size) for size in sizes for what in ("pin", "unpin")]


# Processes.


def serve(rank: int, pipe: Connection, num_bytes: int, prepare: Callable[[int], None]) -> None:
    """A worker: maps memory together, writes to its part, and then does as it is told."""

    def exchange(value: Any) -> list[Any]:
        pipe.send(value)
        return pipe.recv()  # type: ignore[no-any-return]

    host = host_id()
    prepare(rank)
    them = HostPeers(rank, exchange, host)
    memory = map_together(them, num_bytes)
    if isinstance(memory, str):
        pipe.send(memory)
        return
    first, end = own_part(them, num_bytes)
    memory[first:end] = bytes([rank + 1]) * (end - first)
    pipe.send("ready")
    while True:
        offset = pipe.recv()
        pipe.send(memory[offset])


def nothing(_: int) -> None:
    pass


def become_another_user(rank: int) -> None:
    """The second worker is another user's."""
    if rank == 1:
        os.setresgid(65534, 65534, 65534)
        os.setresuid(65534, 65534, 65534)


def limit_files(_: int) -> None:
    """No file may have as many bytes as the memory. Python ignores the signal of the limit."""
    resource.setrlimit(resource.RLIMIT_FSIZE, (NUM_BYTES // 2, NUM_BYTES // 2))


class Processes:
    """Two workers of an engine, in processes of their own.

    Args:
        prepare: Called in each worker with its rank, before it meets the other.

    Attributes:
        found: "ready" for each worker that has the memory, or why it has none.
    """

    def __init__(
        self, num_bytes: int = NUM_BYTES, prepare: Callable[[int], None] = nothing
    ) -> None:
        context = multiprocessing.get_context("spawn")
        self.pipes = []
        self.processes = []
        for rank in range(2):
            ours, theirs = context.Pipe()
            process = context.Process(
                target=serve, args=(rank, theirs, num_bytes, prepare), daemon=True
            )
            process.start()
            self.pipes.append(ours)
            self.processes.append(process)
        for _ in range(3):  # The meeting, and the two steps of `map_together`.
            self._exchange()
        self.found = [pipe.recv() for pipe in self.pipes]

    def _exchange(self) -> None:
        values = [pipe.recv() for pipe in self.pipes]
        for pipe in self.pipes:
            pipe.send(values)

    def byte(self, rank: int, offset: int) -> int:
        self.pipes[rank].send(offset)
        return int(self.pipes[rank].recv())

    def kill(self, rank: int) -> None:
        self.processes[rank].kill()
        self.processes[rank].join()

    def end(self) -> None:
        for rank in range(2):
            self.kill(rank)


@pytest.fixture
def two() -> Iterator[Processes]:
    made = Processes()
    assert made.found == ["ready", "ready"]
    yield made
    made.end()


def test_processes_see_each_others_bytes(two: Processes) -> None:
    assert [two.byte(rank, NUM_BYTES - 1) for rank in range(2)] == [2, 2]
    assert [two.byte(rank, 0) for rank in range(2)] == [1, 1]


@pytest.mark.parametrize("rank", [0, 1])
def test_a_killed_worker_takes_nothing_from_the_other(two: Processes, rank: int) -> None:
    two.kill(rank)
    assert [two.byte(1 - rank, offset) for offset in (0, NUM_BYTES - 1)] == [1, 2]


def test_two_engines_of_one_user_do_not_meet(two: Processes) -> None:
    other = Processes()
    maps = [Path(f"/proc/{each.pid}/maps").read_text() for each in two.processes]
    others = [Path(f"/proc/{each.pid}/maps").read_text() for each in other.processes]
    assert inodes(maps[0]) == inodes(maps[1]) != inodes(others[0]) == inodes(others[1])
    other.end()


def inodes(maps: str) -> set[str]:
    found = {line.split()[4] for line in maps.splitlines() if "kvext host memory" in line}
    assert len(found) == 1
    return found


def test_nothing_is_left_of_an_engine_that_is_killed() -> None:
    made = Processes()
    (inode,) = inodes(Path(f"/proc/{made.processes[0].pid}/maps").read_text())
    assert has_mapped(inode)
    made.end()
    assert not has_mapped(inode)
    assert not [name for name in os.listdir("/dev/shm") if "kvext host memory" in name]


def has_mapped(inode: str) -> bool:
    """Whether some process maps the memory, which has no name in a file system."""
    for process in Path("/proc").glob("[0-9]*"):
        try:
            maps = (process / "maps").read_text()
        except OSError:  # The process has ended, or is another user's.
            continue
        if any(line.split()[4] == inode for line in maps.splitlines() if "kvext" in line):
            return True
    return False


def test_only_processes_of_the_user_can_open_it(two: Processes) -> None:
    if os.geteuid() != 0 or shutil.which("setpriv") is None:
        pytest.skip("only root can become another user, with setpriv")
    (folder,) = (
        each
        for each in Path(f"/proc/{two.processes[0].pid}/fd").iterdir()
        if "kvext host memory" in os.readlink(each)
    )
    as_nobody = ["setpriv", "--reuid=65534", "--regid=65534", "--clear-groups", "cat", str(folder)]
    finished = subprocess.run(as_nobody, capture_output=True, text=True, check=False)
    assert finished.returncode != 0 and "Permission denied" in finished.stderr


def test_a_worker_of_another_user_leaves_all_without() -> None:
    if os.geteuid() != 0:
        pytest.skip("only root can become another user")
    made = Processes(prepare=become_another_user)
    assert made.found[0] == made.found[1]
    assert "rank 1 cannot map the memory of its host" in made.found[0]
    assert "Permission denied" in made.found[0]
    made.end()


def test_a_file_that_the_kernel_refuses_leaves_all_without() -> None:
    made = Processes(prepare=limit_files)
    assert made.found[0] == made.found[1]
    assert f"rank 0 cannot make a file of {NUM_BYTES} bytes" in made.found[0]
    made.end()


def test_nobody_can_unlink_it(two: Processes) -> None:
    """The file has no name, from its first moment on."""
    for process in two.processes:
        files = [each for each in Path(f"/proc/{process.pid}/fd").iterdir()]
        (file,) = (each for each in files if "kvext host memory" in os.readlink(each))
        assert os.readlink(file) == "/memfd:kvext host memory (deleted)"
        assert os.stat(file).st_nlink == 0
        with pytest.raises(OSError):
            os.unlink(file)
    assert [two.byte(rank, 0) for rank in range(2)] == [1, 1]
