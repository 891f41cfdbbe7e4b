# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vllm-ascend-kvext project
"""Finds the CPUs to which vLLM's CPU platform binds a model, and CPUs that share a core or node.

vLLM starts each worker with variables of its OpenMP runtime, which bind the worker's threads
(``vllm/utils/ompmultiprocessing.py``): ``KMP_AFFINITY`` (Intel), ``GOMP_CPU_AFFINITY`` (GNU) or
``OMP_PLACES``. They name the CPUs of this worker. A user may choose the CPUs of all workers with
``VLLM_CPU_OMP_THREADS_BIND``. Linux says below ``/sys`` which CPUs share a core or a memory node.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path

_ITEM = re.compile(r"(\d+)(?:-(\d+)(?::(\d+))?)?")
_PLACE = re.compile(r"\{([^{}]*)\}")


@dataclass(frozen=True, slots=True)
class ModelCpus:
    """The CPUs on which the model runs.

    Attributes:
        cpus: The CPUs; empty if nothing binds the model.
        has_all_workers: Whether the CPUs of all workers on this machine are among them.
    """

    cpus: frozenset[int]
    has_all_workers: bool


def model_cpus(environ: Mapping[str, str], process_cpus: Iterable[int]) -> ModelCpus:
    """Read the variables of this process.

    A value without numbers, such as ``OMP_PLACES=cores``, is not understood here. The model is then
    assumed to use every CPU of the process: the main thread one, its other threads the rest.
    """
    chosen = environ.get("VLLM_CPU_OMP_THREADS_BIND", "auto").strip()
    of_all_workers: frozenset[int] = frozenset()
    if chosen not in ("", "auto", "nobind"):
        of_all_workers = frozenset().union(*(_numbers(part) or () for part in chosen.split("|")))
    is_bound = is_main_thread_bound(environ)
    of_worker = cpus_of_worker(environ) if is_bound else frozenset()
    if is_bound and not of_worker and not of_all_workers:
        of_worker = frozenset(process_cpus)
    return ModelCpus(of_all_workers | of_worker, bool(of_all_workers))


def is_main_thread_bound(environ: Mapping[str, str]) -> bool:
    """Whether OpenMP has reduced, or will reduce, the CPUs of the main thread."""
    if environ.get("GOMP_CPU_AFFINITY") or environ.get("KMP_AFFINITY"):
        return True
    binding = environ.get("OMP_PROC_BIND", "").strip().lower()
    return binding not in ("", "false") or bool(environ.get("OMP_PLACES") and binding != "false")


def cpus_of_worker(environ: Mapping[str, str]) -> frozenset[int]:
    """The CPUs to which OpenMP binds this worker; empty if the variables have no numbers."""
    intel = re.search(r"proclist=\[([^\]]*)\]", environ.get("KMP_AFFINITY", ""))
    if intel:
        return _numbers(intel.group(1).replace("{", "").replace("}", "")) or frozenset()
    gnu = environ.get("GOMP_CPU_AFFINITY", "")
    if gnu:
        return _numbers(gnu) or frozenset()
    places = [_numbers(place) for place in _PLACE.findall(environ.get("OMP_PLACES", ""))]
    return frozenset().union(*(place or () for place in places)) if all(places) else frozenset()


@dataclass(frozen=True, slots=True)
class CpuTopology:
    """Sets of CPUs that share a core, and sets that share a memory node.

    A CPU that is in no set shares with no other CPU. If nothing is known about memory nodes, all
    CPUs count as being on the same node.

    Attributes:
        nodes: The CPUs of each memory node that has some, by its number.
    """

    cores: tuple[frozenset[int], ...] = ()
    nodes: Mapping[int, frozenset[int]] = field(default_factory=dict)

    @classmethod
    def of_this_machine(cls, root: Path = Path("/sys/devices/system")) -> CpuTopology:
        """Read the topology of this machine. Files that cannot be read are left out."""
        cores = {_read(path) for path in root.glob("cpu/cpu[0-9]*/topology/thread_siblings_list")}
        nodes = {
            int(path.parent.name.removeprefix("node")): _read(path)
            for path in root.glob("node/node[0-9]*/cpulist")
        }
        with_cpus = {number: cpus for number, cpus in nodes.items() if cpus}
        return cls(tuple(cores - {frozenset()}), with_cpus)

    def same_core(self, cpus: frozenset[int]) -> frozenset[int]:
        """The given CPUs, and all CPUs on the same cores."""
        return cpus.union(*(core for core in self.cores if core & cpus))

    def same_node(self, cpus: frozenset[int]) -> frozenset[int]:
        """The given CPUs, and all CPUs on the same memory nodes."""
        if not self.nodes:
            return frozenset(range(1 << 16))
        return cpus.union(*(node for node in self.nodes.values() if node & cpus))

    def node_of(self, cpus: frozenset[int]) -> int | None:
        """The memory node on which all the given CPUs are; None if they are on several or none."""
        numbers = [number for number, node in self.nodes.items() if node & cpus]
        return numbers[0] if len(numbers) == 1 else None

    def on_one_node(self, cpus: frozenset[int], preferred: int | None = None) -> frozenset[int]:
        """The given CPUs on the memory node that has most of them; all if no node has any.

        Args:
            preferred: Of nodes that have as many, the node of this CPU is taken, or else the first.
        """
        parts = [self.nodes[number] & cpus for number in sorted(self.nodes)]
        largest = max(parts, key=lambda part: (len(part), preferred in part), default=cpus)
        return largest or cpus


def as_ranges(cpus: Iterable[int]) -> str:
    """The CPUs as an ascending list such as ``0-3,8``."""
    runs: list[list[int]] = []
    for cpu in sorted(cpus):
        if runs and cpu == runs[-1][-1] + 1:
            runs[-1][1:] = [cpu]
        else:
            runs.append([cpu])
    return ",".join("-".join(map(str, run)) for run in runs)


def _read(path: Path) -> frozenset[int]:
    try:
        return _numbers(path.read_text()) or frozenset()
    except OSError:
        return frozenset()


def _numbers(text: str) -> frozenset[int] | None:
    """The numbers in a list such as ``0,2-4`` or ``0 2-8:2``; None for any other text."""
    numbers: set[int] = set()
    for item in text.replace(",", " ").split():
        found = _ITEM.fullmatch(item)
        if found is None:
            return None
        first, last, step = (int(part) if part else None for part in found.groups())
        assert first is not None  # The pattern requires the first number.
        numbers.update(range(first, (first if last is None else last) + 1, step or 1))
    return frozenset(numbers)
