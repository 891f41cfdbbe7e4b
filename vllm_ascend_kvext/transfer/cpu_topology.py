# SPDX-License-Identifier: Apache-2.0
"""Which CPUs share a core or a memory node, as Linux says below ``/sys``."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True, slots=True)
class CpuTopology:
    """Sets of CPUs that share a core, and sets that share a memory node.

    A CPU that is in no set shares with none. Where nothing is known about memory nodes, every CPU
    is on the same one.
    """

    cores: tuple[frozenset[int], ...] = ()
    nodes: tuple[frozenset[int], ...] = ()

    @classmethod
    def of_this_machine(cls, root: Path = Path("/sys/devices/system")) -> CpuTopology:
        """Read it; what cannot be read is left out."""
        cores = {_read(path) for path in root.glob("cpu/cpu[0-9]*/topology/thread_siblings_list")}
        nodes = {_read(path) for path in root.glob("node/node[0-9]*/cpulist")}
        return cls(tuple(cores - {frozenset()}), tuple(nodes - {frozenset()}))

    def same_core(self, cpus: Iterable[int]) -> frozenset[int]:
        """The CPUs themselves, and those on the same cores."""
        return _union_of(self.cores, cpus) | frozenset(cpus)

    def same_node(self, cpus: Iterable[int]) -> frozenset[int]:
        """The CPUs on the same memory nodes."""
        if not self.nodes:
            return frozenset(range(1 << 16))
        return _union_of(self.nodes, cpus) | frozenset(cpus)


def _union_of(sets: Iterable[frozenset[int]], cpus: Iterable[int]) -> frozenset[int]:
    wanted = frozenset(cpus)
    return frozenset().union(*(found for found in sets if found & wanted))


def _read(path: Path) -> frozenset[int]:
    """A list such as ``0-3,8``."""
    cpus: set[int] = set()
    try:
        for part in path.read_text().strip().split(","):
            first, _, last = part.partition("-")
            cpus.update(range(int(first), int(last or first) + 1))
    except (OSError, ValueError):
        return frozenset()
    return frozenset(cpus)
