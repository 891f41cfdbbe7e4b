# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vllm-ascend-kvext project
"""Measures the memory that workers really take for the host memory that they were asked to have.

    python benchmarks/host_memory_taken.py [--device npu] [--gib 1 3 5 9] [--workers 1 2 4]

Each worker is a process of its own, without an engine around it. ``taken`` is the proportional
share (Pss) of all workers together with their page tables, by what was asked for. Files, such as
libraries, are left out: their share changes with every process that starts or ends beside. It needs
Linux 5.4. ``left`` is the same after the end.

``Shmem`` and ``group`` say by how much the machine's shared memory has grown, and what is counted
for the control group of this process; whatever else runs there disturbs them.

``apart`` is memory of each worker, ``shared`` is one memory for all of them. ``torch`` is memory of
each worker that torch pins; beside a CPU it pins none. ``--device npu`` needs an NPU, or the
environment of the emulated one (``tests/emulated_npu``).
"""

from __future__ import annotations

import gc
import multiprocessing
import re
from collections.abc import Sequence
from dataclasses import dataclass
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

from common import report

from vllm_ascend_kvext.connector.common.host_memory import tightest_bound

GIB = 1 << 30
_QUICK_GIB = 0.1
_PROCESS_FILES = ("smaps_rollup", "Pss_Anon"), ("smaps_rollup", "Pss_Shmem"), ("status", "VmPTE")
_TABLE = report.Table(
    "device:<7", "kind:<7", "GiB:>5", "workers:>8", "taken:>7", "Shmem:>7", "group:>7", "left:>7"
)


@dataclass(frozen=True)
class Taken:
    """What the workers of one engine take, by what was asked for; see the module.

    Attributes:
        group: None if this process has no control group that counts memory.
    """

    device: str
    kind: str
    gib: float
    num_workers: int
    taken: float
    shmem: float
    group: float | None
    left: float


def measure(device: str, kind: str, num_bytes: int, num_workers: int) -> Taken:
    """Measure workers that have ``num_bytes`` of host memory together."""
    context = multiprocessing.get_context("spawn")
    own_bytes = num_bytes if kind == "shared" else num_bytes // num_workers
    pipes, processes = [], []
    with context.Manager() as manager:
        meeting = _Meeting(manager.list([None] * num_workers), context.Barrier(num_workers))
        for rank in range(num_workers):
            ours, theirs = context.Pipe()
            arguments = rank, theirs, meeting, device, kind, own_bytes
            processes.append(context.Process(target=_work, args=arguments, daemon=True))
            processes[-1].start()
            theirs.close()  # A worker that fails closes its end.
            pipes.append(ours)
        try:
            before, during, after = (_measured(pipes) for _ in range(3))
        finally:
            for process in processes:
                process.kill()
                process.join()
    taken, shmem, group = (_ratio(*each, num_bytes) for each in zip(before, during, strict=True))
    left = _ratio(before[0], after[0], num_bytes)
    assert taken is not None and shmem is not None and left is not None
    return Taken(device, kind, num_bytes / GIB, num_workers, taken, shmem, group, left)


@dataclass(frozen=True)
class _Meeting:
    """Where workers exchange values, see ``HostPeers``."""

    values: Any
    barrier: Any

    def exchange(self, rank: int, value: Any) -> list[Any]:
        self.values[rank] = value
        self.barrier.wait()
        found = list(self.values)
        self.barrier.wait()
        return found


def _work(
    rank: int, pipe: Connection, meeting: _Meeting, device_type: str, kind: str, num_bytes: int
) -> None:
    """A worker. Between two steps, it says what it takes, and waits to be told to go on."""
    import torch

    from vllm_ascend_kvext.connector.worker.host_buffer import HostBuffer
    from vllm_ascend_kvext.connector.worker.shared_arena import HostPeers, host_id

    device = torch.device(device_type)
    torch.empty(1, device=device)
    HostBuffer.allocate(1 << 20, device).unmap()  # What the first allocation needs stays.
    _tell(pipe, meeting)
    buffer: HostBuffer | str | None
    if kind == "shared":
        with HostPeers(rank, lambda value: meeting.exchange(rank, value), host_id()) as peers:
            buffer = HostBuffer.share(num_bytes, device, peers)
            peers.end()
    else:
        reason = "it is measured" if kind == "torch" else None
        buffer = HostBuffer.allocate(num_bytes, device, why_torch=reason)
    assert isinstance(buffer, HostBuffer), buffer
    assert not buffer.tensor[::4096].any()  # A load has read all of it.
    _tell(pipe, meeting)
    buffer.unmap()
    buffer = None
    gc.collect()
    _tell(pipe, meeting)


def _tell(pipe: Connection, meeting: _Meeting) -> None:
    meeting.barrier.wait()  # The share of a page depends on who maps it.
    pipe.send(sum(_kib(f"/proc/self/{file}", name) for file, name in _PROCESS_FILES) * 1024)
    pipe.recv()


def _measured(pipes: Sequence[Connection]) -> tuple[int, int, int | None]:
    """What all workers take after a step, Shmem, and the group's memory; bytes. Goes on then."""
    taken = sum(pipe.recv() for pipe in pipes)
    found = taken, _kib("/proc/meminfo", "Shmem") * 1024, _group_bytes()
    for pipe in pipes:
        pipe.send(None)
    return found


def _ratio(before: int | None, after: int | None, num_bytes: int) -> float | None:
    return None if before is None or after is None else (after - before) / num_bytes


def _kib(file: str, name: str) -> int:
    found = re.search(rf"^{name}:\s+(\d+) kB$", Path(file).read_text("ascii"), re.MULTILINE)
    return 0 if found is None else int(found[1])


def _group_bytes() -> int | None:
    """What the control group of this process uses, of either version."""
    for line in Path("/proc/self/cgroup").read_text("ascii").splitlines():
        number, controllers, group = line.split(":", 2)
        place = "memory" if "memory" in controllers.split(",") else "" if number == "0" else None
        name = "memory.usage_in_bytes" if place else "memory.current"
        if place is not None:
            file = Path("/sys/fs/cgroup", place, group.lstrip("/"), name)
            if file.exists():
                return int(file.read_text("ascii"))
    return None


def main() -> None:
    parser = report.parser(__doc__, "bench-host-memory")
    parser.add_argument("--device", choices=("cpu", "npu"), default="cpu")
    parser.add_argument("--gib", type=float, nargs="+", default=(1, 3, 5, 9))
    parser.add_argument("--workers", type=int, nargs="+", default=(1, 2, 4))
    parser.add_argument("--kind", nargs="+", default=("apart", "shared", "torch"))
    options = parser.parse_args()
    sizes, workers = options.gib, options.workers
    if options.quick:
        sizes, workers = (_QUICK_GIB,), (1, 2)
    lines, rows = [_TABLE.head], []
    print(_TABLE.head)
    for kind in options.kind:
        for num_workers in workers:
            is_left_out = (kind, options.device) == ("torch", "cpu") or (
                kind == "shared" and num_workers == 1
            )
            for gib in () if is_left_out else sizes:
                left = tightest_bound()
                if left is not None and 2 * gib * GIB > left.left_bytes:
                    print(f"{gib:g} GiB: left out, because less than twice as much is left")
                    continue
                row = measure(options.device, kind, int(gib * GIB), num_workers)
                rows.append(row)
                ratios = (row.taken, row.shmem, row.group, row.left)
                cells = [None if ratio is None else f"{ratio:.3f}" for ratio in ratios]
                lines.append(_TABLE.line(row.device, kind, f"{gib:g}", num_workers, *cells))
                print(lines[-1], flush=True)
    report.write(options.out, lines, rows, options.device)


if __name__ == "__main__":
    main()
