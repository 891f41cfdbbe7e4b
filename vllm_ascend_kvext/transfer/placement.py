# SPDX-License-Identifier: Apache-2.0
"""Which CPUs copies in host memory run on, and how many threads.

A worker of vLLM's CPU platform runs the model on CPUs that OpenMP binds it to, its main thread
among them. A thread that is started there inherits that one CPU, so a copy would take the model's
time. Copies therefore run on CPUs that are named: by the caller, or by `default_placement`.

The default never leaves the CPUs that the process was started with. Linux does not keep that set
once OpenMP has bound the main thread: a worker's is its parent's, unless a command such as
``numactl`` stands between the two; of other processes it is what threads still have, or what the
process had when this module was imported.
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

# What a set of CPUs of the C library can hold.
_ANY_CPU = frozenset(range(1024))
# Two threads come close to what one socket's memory gives to copies.
_MAX_DEFAULT_THREADS = 4
# Where the model has every CPU: a tenth of the time of a thread that never sleeps.
_NICENESS_BESIDE_MODEL = 10


class CopyPlacement(NamedTuple):
    """Where copies run; made by `on`, which has asked the kernel for the CPUs.

    CPUs ascend. A niceness of 0 is the default, one of 19 gives way to everything.
    """

    cpus: tuple[int, ...]
    num_threads: int
    niceness: int = 0

    @classmethod
    def on(
        cls, cpus: Iterable[int], *, num_threads: int | None = None, niceness: int = 0
    ) -> CopyPlacement:
        """Copies on these CPUs; as many threads as CPUs, four at most, where none are named.

        Raises:
            PlacementError: There is no CPU among them, or one that the kernel does not give to
                this process; or a number is out of range.
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
"""Copies on whatever CPU the caller has."""


def default_placement(environ: Mapping[str, str]) -> CopyPlacement:
    """CPUs of the process that the model does not run on; logs what it decides.

    Where the model has every CPU, one thread of low priority runs beside it.
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
    """The CPUs of a process that its model leaves free; empty where there is none.

    Where only this worker's CPUs are known, other workers have those of other memory nodes. CPUs
    that share no core with the model come before those that do.
    """
    free = process_cpus - model.cpus
    if model.cpus and not model.has_all_workers:
        free &= topology.same_node(model.cpus)
    return (free - topology.same_core(model.cpus)) or free


def _process_cpus(environ: Mapping[str, str]) -> frozenset[int]:
    """What the process was started with, or the part of it that is known."""
    if not is_main_thread_bound(environ):
        return frozenset(os.sched_getaffinity(os.getpid()))
    cpus = _cpus_of_threads()
    if os.getpid() == _IMPORTED_IN:  # Else what a fork has copied from its parent.
        cpus |= _CPUS_AT_IMPORT
    # A shell's mask says nothing of the command that it has started: `taskset` changes it between
    # the two. And when a parent has ended, `getppid` names another process.
    parent = multiprocessing.parent_process()
    if parent is not None and parent.is_alive():
        with contextlib.suppress(OSError):
            cpus |= os.sched_getaffinity(os.getppid())
    return cpus


def _cpus_of_threads() -> frozenset[int]:
    """OpenMP binds each of its threads within what the process was started with."""
    cpus = frozenset(os.sched_getaffinity(os.getpid()))
    for thread_id in os.listdir("/proc/self/task"):
        with contextlib.suppress(OSError):  # It may have ended.
            cpus |= os.sched_getaffinity(int(thread_id))
    return cpus


def given_cpus(wanted: frozenset[int] = _ANY_CPU) -> frozenset[int]:
    """Those of the CPUs that the kernel gives to a thread of this process."""
    given = frozenset(os.sched_getaffinity(0))

    def ask() -> None:
        nonlocal given
        os.sched_setaffinity(0, wanted)  # Of this thread alone.
        given = frozenset(os.sched_getaffinity(0))

    asking = threading.Thread(target=ask)
    asking.start()
    asking.join()
    return given


def _in_words(cpus: Iterable[int]) -> str:
    return ", ".join(map(str, sorted(cpus))) or "none to itself"
