# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vllm-ascend-kvext project
"""A model of a machine with many CPUs and memory nodes, and of one process on it."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from vllm_ascend_kvext.transfer.cpus import CpuTopology
from vllm_ascend_kvext.transfer.host_cpus import HostCpus

CPUS_PER_NODE = 48
NUM_NODES = 4
ALL_CPUS = frozenset(range(NUM_NODES * CPUS_PER_NODE))

TOPOLOGY = CpuTopology(
    cores=tuple(frozenset({cpu}) for cpu in sorted(ALL_CPUS)),
    nodes={
        node: frozenset(range(node * CPUS_PER_NODE, (node + 1) * CPUS_PER_NODE))
        for node in range(NUM_NODES)
    },
)
"""Two Kunpeng 920, as a server with eight NPUs has them: one thread per core, four nodes."""

MAIN_THREAD = "1000"


class HostModel(HostCpus):
    """A process that nothing has bound yet. Its main thread runs on ``runs_on``.

    Attributes:
        threads: The CPUs of each thread, by its number.
    """

    def __init__(self, other_threads: Iterable[str] = (), runs_on: int = 100) -> None:
        self.threads = dict.fromkeys((MAIN_THREAD, *other_threads), ALL_CPUS)
        self.runs_on = runs_on

    def bind_all(self, cpus: Iterable[int]) -> None:
        """Bind all threads, as ``taskset --all-tasks`` does."""
        self.threads = dict.fromkeys(self.threads, frozenset(cpus))

    def topology(self) -> CpuTopology:
        return TOPOLOGY

    def of_main_thread(self) -> frozenset[int]:
        return self.threads[MAIN_THREAD]

    def main_thread_is_on(self) -> int | None:
        return self.runs_on

    def of_process(self, environ: Mapping[str, str]) -> frozenset[int]:
        assert not environ, "the model knows nothing of OpenMP"
        return self.of_main_thread()

    def given(self, wanted: frozenset[int] = ALL_CPUS) -> frozenset[int]:
        return wanted & ALL_CPUS

    def require(self, cpus: tuple[int, ...], niceness: int) -> None:
        if not ALL_CPUS.issuperset(cpus):
            raise ValueError(f"cpus: found {cpus}")
