# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vllm-ascend-kvext project
"""Finds the CPUs of this process, as the kernel knows them.

OpenMP may have bound the main thread to one CPU. Linux does not keep the set that the process was
started with. The set of a worker is taken from its parent process, unless a command such as
``numactl`` was started between the two. The set of any other process is what its threads still
have, or what the process had when this module was imported.
"""

from __future__ import annotations

import contextlib
import multiprocessing
import os
import threading
from collections.abc import Mapping
from pathlib import Path

from vllm_ascend_kvext.native import native
from vllm_ascend_kvext.transfer.cpus import CpuTopology, is_main_thread_bound

_IMPORTED_IN = os.getpid()
_CPUS_AT_IMPORT = frozenset(os.sched_getaffinity(_IMPORTED_IN))

# The CPUs that a CPU set of the C library can hold.
_ANY_CPU = frozenset(range(1024))
# The field "processor" of /proc/PID/stat (proc_pid_stat(5)), counted behind the command's ")".
_FIELD_OF_CPU = 36


class HostCpus:
    """The CPUs of this machine and of this process. Tests pass a model of another machine."""

    def topology(self) -> CpuTopology:
        """Which CPUs share a core or a memory node."""
        return CpuTopology.of_this_machine()

    def of_main_thread(self) -> frozenset[int]:
        """The CPUs on which the main thread may run now."""
        return frozenset(os.sched_getaffinity(os.getpid()))

    def main_thread_is_on(self) -> int | None:
        """The CPU on which the main thread has run last; None if the kernel does not say."""
        with contextlib.suppress(OSError, IndexError, ValueError):
            _, _, fields = Path(f"/proc/{os.getpid()}/stat").read_text().rpartition(")")
            return int(fields.split()[_FIELD_OF_CPU])
        return None

    def of_process(self, environ: Mapping[str, str]) -> frozenset[int]:
        """The CPUs that the process may use, as far as they can be found out.

        Where OpenMP binds the main thread, they are the CPUs that the process was started with.
        """
        if not is_main_thread_bound(environ):
            return self.of_main_thread()
        cpus = _cpus_of_threads()
        if os.getpid() == _IMPORTED_IN:  # A fork has the value of its parent, which may be wrong.
            cpus |= _CPUS_AT_IMPORT
        # The CPUs of a shell say nothing about its command, because `taskset` may run between the
        # two. Only a parent that started this process with multiprocessing counts. It must be
        # alive: once it has ended, `getppid` names another process.
        parent = multiprocessing.parent_process()
        if parent is not None and parent.is_alive():
            with contextlib.suppress(OSError):
                cpus |= os.sched_getaffinity(os.getppid())
        return cpus

    def given(self, wanted: frozenset[int] = _ANY_CPU) -> frozenset[int]:
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

    def require(self, cpus: tuple[int, ...], niceness: int) -> None:
        """Raise `ValueError` if the kernel does not grant some CPUs to threads of this process."""
        native().require_cpus(cpus, niceness)


def bind_thread(cpus: frozenset[int]) -> None:
    """Bind the calling thread to some CPUs, unless it is bound to just these.

    Raises:
        OSError: The kernel grants none of them.
    """
    if os.sched_getaffinity(0) != cpus:
        os.sched_setaffinity(0, cpus)


def _cpus_of_threads() -> frozenset[int]:
    """The CPUs of all threads. OpenMP binds threads to CPUs that the process was started with."""
    cpus = frozenset(os.sched_getaffinity(os.getpid()))
    for thread_id in os.listdir("/proc/self/task"):
        with contextlib.suppress(OSError):  # The thread may have ended.
            cpus |= os.sched_getaffinity(int(thread_id))
    return cpus
