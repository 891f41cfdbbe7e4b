# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vllm-ascend-kvext project
"""Decides on which CPUs and in how many threads copies in host memory run.

On vLLM's CPU platform, OpenMP binds the threads of a worker to CPUs, also its main thread. A thread
that the main thread starts inherits its one CPU, so a copy there would take time from the model.
Copies therefore run on CPUs that the caller names, or that `PlacementChoice` chooses.

On ARM hosts, vLLM-Ascend binds all threads of a worker to some CPUs after the KV caches are
registered. The other CPUs are for other workers, for interrupts of the NPU, and for threads of its
runtime. Copies must not run there. So the choice is made when the first copy begins, and again when
the CPUs of the main thread have changed.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Iterable, Mapping
from typing import NamedTuple

from vllm_ascend_kvext.transfer.cpus import CpuTopology, ModelCpus, model_cpus
from vllm_ascend_kvext.transfer.errors import PlacementError
from vllm_ascend_kvext.transfer.host_cpus import HostCpus

logger = logging.getLogger("vllm.ascend_kvext.transfer")

# Two threads already copy nearly as fast as the memory of one socket allows.
_MAX_DEFAULT_THREADS = 4
# The niceness of copies if the model uses every CPU. Beside a thread that never sleeps, they get a
# tenth of its time.
_NICENESS_BESIDE_MODEL = 10


class CopyPlacement(NamedTuple):
    """Where copies run. `CopyPlacement.on` makes one, and checks that the kernel grants the CPUs.

    Attributes:
        cpus: The CPUs, ascending; empty for the CPUs of the calling thread.
        niceness: The niceness of the threads: 0 is the default, 19 yields to everything.
    """

    cpus: tuple[int, ...]
    num_threads: int
    niceness: int = 0

    @classmethod
    def on(
        cls, cpus: Iterable[int], *, num_threads: int | None = None, niceness: int = 0
    ) -> CopyPlacement:
        """Copies on some CPUs.

        Args:
            num_threads: The number of threads; None for one thread per CPU, four at most.

        Raises:
            PlacementError: The list is empty, the kernel does not grant one of the CPUs to this
                process, or a number is out of range.
        """
        placement = cls.of(cpus, num_threads, niceness)
        if not placement.cpus:
            raise PlacementError(
                "cpus: expected at least one CPU for copies, found none. Name CPUs that the "
                "process may use, or none at all."
            )
        try:
            HostCpus().require(placement.cpus, niceness)
        except (ValueError, TypeError) as error:
            raise PlacementError(str(error)) from error
        return placement

    @classmethod
    def of(
        cls, cpus: Iterable[int], num_threads: int | None = None, niceness: int = 0
    ) -> CopyPlacement:
        """The same as `on`, without asking the kernel."""
        ascending = tuple(sorted(set(cpus)))
        if num_threads is None:
            num_threads = min(_MAX_DEFAULT_THREADS, len(ascending))
        return cls(ascending, num_threads, niceness)


CALLING_THREAD = CopyPlacement((), 1)
"""Copies in the calling thread, on the CPUs of that thread."""


Placer = Callable[[], CopyPlacement]
"""Says where the next copy runs."""


def in_calling_thread() -> CopyPlacement:
    """A `Placer` of copies that run in the calling thread."""
    return CALLING_THREAD


class PlacementChoice:
    """Chooses CPUs of the process on which the model does not run, and logs each choice.

    Threads may share it. A call takes a few microseconds, unless the CPUs of the main thread have
    changed since the last one.

    Args:
        environ: The variables of this process, which say to which CPUs OpenMP binds the model.
            Empty for a model on a device.
        host: The machine and the process; None for this one.
    """

    def __init__(self, environ: Mapping[str, str], host: HostCpus | None = None) -> None:
        self._environ = environ
        self._host = host or HostCpus()
        self._lock = threading.Lock()  # Guards the rest.
        self._cpus_of_main_thread: frozenset[int] | None = None
        self._placement = CALLING_THREAD

    def __call__(self) -> CopyPlacement:
        """Where the next copy runs.

        Raises:
            PlacementError: The kernel has just taken a CPU from this process. A later call may
                succeed.
        """
        cpus_of_main_thread = self._host.of_main_thread()
        with self._lock:
            if cpus_of_main_thread != self._cpus_of_main_thread:
                self._choose()
                self._cpus_of_main_thread = cpus_of_main_thread
            return self._placement

    def _choose(self) -> None:
        """If the model uses every CPU, copies run in one thread of low priority beside it."""
        process_cpus = self._host.given(self._host.of_process(self._environ))
        model = model_cpus(self._environ, process_cpus)
        free_cpus = choose_cpus(
            process_cpus, model, self._host.topology(), self._host.main_thread_is_on()
        )
        # A process with one CPU computes there, whether it is bound or not.
        is_beside_model = not free_cpus or len(process_cpus) == 1
        if is_beside_model:
            placement = CopyPlacement.of(process_cpus, 1, _NICENESS_BESIDE_MODEL)
        else:
            placement = CopyPlacement.of(free_cpus)
        try:
            self._host.require(placement.cpus, placement.niceness)
        except ValueError as error:
            raise PlacementError(str(error)) from error
        if placement == self._placement:
            return
        self._placement = placement
        if is_beside_model:
            logger.warning(
                "Every CPU of this process (%s) runs the model: copies between pages and host "
                "memory run there too, in one thread of low priority. Leave a CPU free with "
                "VLLM_CPU_NUM_OF_RESERVED_CPU or VLLM_CPU_OMP_THREADS_BIND, or name CPUs for "
                "copies in copy_cpus.",
                _in_words(process_cpus),
            )
        else:
            logger.info(
                "Copies between pages and host memory run on CPUs %s; the model has %s.",
                _in_words(free_cpus),
                _in_words(model.cpus),
            )


def choose_cpus(
    process_cpus: frozenset[int],
    model: ModelCpus,
    topology: CpuTopology,
    running_on: int | None = None,
) -> frozenset[int]:
    """The CPUs of a process that its model leaves free; empty if there are none.

    If only this worker's CPUs are known, the CPUs of other memory nodes are left to other workers.
    CPUs that share no core with the model are preferred to CPUs that share one.

    Args:
        running_on: The CPU on which the main thread runs. Its memory node is chosen where the
            CPUs of the process do not tell that of the worker.
    """
    free = process_cpus - model.cpus
    if not model.cpus:
        return topology.on_one_node(free, running_on)
    if not model.has_all_workers:
        free &= topology.same_node(model.cpus)
    return (free - topology.same_core(model.cpus)) or free


def _in_words(cpus: Iterable[int]) -> str:
    return ", ".join(map(str, sorted(cpus))) or "none to itself"
