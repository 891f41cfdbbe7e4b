# SPDX-License-Identifier: Apache-2.0
"""Decides on which CPUs and in how many threads copies in host memory run.

On vLLM's CPU platform, OpenMP binds the threads of a worker to CPUs, also its main thread. A thread
that the main thread starts inherits its one CPU, so a copy there would take time from the model.
Copies therefore run on CPUs that the caller or `default_placement` names.

The default uses only CPUs that the process was started with. Linux does not keep that set once
OpenMP has bound the main thread. The set of a worker is taken from its parent process, unless a
command such as ``numactl`` was started between the two. The set of any other process is what its
threads still have, or what the process had when this module was imported.
"""

from __future__ import annotations

import contextlib
import logging
import multiprocessing
import os
import threading
from collections.abc import Iterable, Mapping
from typing import NamedTuple

from vllm_ascend_kvext.native import native
from vllm_ascend_kvext.transfer.cpus import CpuTopology, ModelCpus, is_main_thread_bound, model_cpus
from vllm_ascend_kvext.transfer.errors import PlacementError

logger = logging.getLogger("vllm.ascend_kvext.transfer")

_IMPORTED_IN = os.getpid()
_CPUS_AT_IMPORT = frozenset(os.sched_getaffinity(_IMPORTED_IN))

# The CPUs that a CPU set of the C library can hold.
_ANY_CPU = frozenset(range(1024))
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
        ascending = tuple(sorted(set(cpus)))
        if not ascending:
            raise PlacementError(
                "cpus: expected at least one CPU for copies, found none. Name CPUs that the "
                "process may use, or none at all."
            )
        if num_threads is None:
            num_threads = min(_MAX_DEFAULT_THREADS, len(ascending))
        try:
            native().require_cpus(ascending, niceness)
        except (ValueError, TypeError) as error:
            raise PlacementError(str(error)) from error
        return cls(ascending, num_threads, niceness)


CALLING_THREAD = CopyPlacement((), 1)
"""Copies in the calling thread, on the CPUs of that thread."""


def default_placement(environ: Mapping[str, str]) -> CopyPlacement:
    """Choose CPUs of the process on which the model does not run, and log the choice.

    If the model uses every CPU, copies run in one thread of low priority beside it.
    """
    process_cpus = given_cpus(_process_cpus(environ))
    model = model_cpus(environ, process_cpus)
    free_cpus = choose_cpus(process_cpus, model, CpuTopology.of_this_machine())
    if free_cpus:
        placement = CopyPlacement.on(free_cpus)
        logger.info(
            "Copies between pages and host memory run on CPUs %s; the model has %s.",
            _in_words(free_cpus),
            _in_words(model.cpus),
        )
        return placement
    logger.warning(
        "Every CPU of this process (%s) runs the model: copies between pages and host memory run "
        "there too, in one thread of low priority. Leave a CPU free with "
        "VLLM_CPU_NUM_OF_RESERVED_CPU or VLLM_CPU_OMP_THREADS_BIND.",
        _in_words(process_cpus),
    )
    return CopyPlacement.on(process_cpus, num_threads=1, niceness=_NICENESS_BESIDE_MODEL)


def choose_cpus(
    process_cpus: frozenset[int], model: ModelCpus, topology: CpuTopology
) -> frozenset[int]:
    """The CPUs of a process that its model leaves free; empty if there are none.

    If only this worker's CPUs are known, the CPUs of other memory nodes are left to other workers.
    CPUs that share no core with the model are preferred to CPUs that share one.
    """
    free = process_cpus - model.cpus
    if model.cpus and not model.has_all_workers:
        free &= topology.same_node(model.cpus)
    return (free - topology.same_core(model.cpus)) or free


def _process_cpus(environ: Mapping[str, str]) -> frozenset[int]:
    """The CPUs that the process was started with, as far as they can be found out."""
    if not is_main_thread_bound(environ):
        return frozenset(os.sched_getaffinity(os.getpid()))
    cpus = _cpus_of_threads()
    if os.getpid() == _IMPORTED_IN:  # A fork has the value of its parent, which may be wrong.
        cpus |= _CPUS_AT_IMPORT
    # The CPUs of a shell say nothing about its command, because `taskset` may run between the two.
    # Only a parent that started this process with multiprocessing counts. It must be alive: once it
    # has ended, `getppid` names another process.
    parent = multiprocessing.parent_process()
    if parent is not None and parent.is_alive():
        with contextlib.suppress(OSError):
            cpus |= os.sched_getaffinity(os.getppid())
    return cpus


def _cpus_of_threads() -> frozenset[int]:
    """The CPUs of all threads. OpenMP binds threads to CPUs that the process was started with."""
    cpus = frozenset(os.sched_getaffinity(os.getpid()))
    for thread_id in os.listdir("/proc/self/task"):
        with contextlib.suppress(OSError):  # The thread may have ended.
            cpus |= os.sched_getaffinity(int(thread_id))
    return cpus


def given_cpus(wanted: frozenset[int] = _ANY_CPU) -> frozenset[int]:
    """The part of some CPUs that the kernel grants to a thread of this process."""
    given = frozenset(os.sched_getaffinity(0))

    def ask() -> None:
        nonlocal given
        os.sched_setaffinity(0, wanted)  # This changes the calling thread only.
        given = frozenset(os.sched_getaffinity(0))

    asking = threading.Thread(target=ask)
    asking.start()
    asking.join()
    return given


def _in_words(cpus: Iterable[int]) -> str:
    return ", ".join(map(str, sorted(cpus))) or "none to itself"
