# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vllm-ascend-kvext project
"""The CPUs that copies get by default, next to a worker's threads of vLLM's CPU platform."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from support import emulator
from support.transfer import host_model
from support.transfer.host_model import HostModel

from vllm_ascend_kvext.transfer.cpus import CpuTopology, ModelCpus, model_cpus
from vllm_ascend_kvext.transfer.errors import PlacementError
from vllm_ascend_kvext.transfer.host_cpus import HostCpus
from vllm_ascend_kvext.transfer.placement import CopyPlacement, PlacementChoice, choose_cpus

# Two sockets of two cores with two threads each: CPU n and n + 4 share a core.
TWO_SOCKETS = CpuTopology(
    cores=tuple(frozenset({core, core + 4}) for core in range(4)),
    nodes={0: frozenset({0, 1, 4, 5}), 1: frozenset({2, 3, 6, 7})},
)
ALL = frozenset(range(8))
not_emulated = emulator.not_emulated("hides the CPU of a thread, and has a thread of its own")
BINDING = {"OMP_PROC_BIND": "true"}
BOUND_TO_TWO = {"OMP_PLACES": "{0,1}", **BINDING}


@pytest.mark.parametrize(
    ("environ", "cpus", "has_all_workers"),
    [
        ({}, set(), False),
        ({"VLLM_CPU_OMP_THREADS_BIND": "nobind"}, set(), False),
        ({"OMP_PROC_BIND": "false", "OMP_PLACES": "{1}"}, set(), False),
        ({"KMP_AFFINITY": "granularity=fine,explicit,proclist=[4,5]"}, {4, 5}, False),
        ({"GOMP_CPU_AFFINITY": "4 5-6"}, {4, 5, 6}, False),
        ({"GOMP_CPU_AFFINITY": "0-6:3,7"}, {0, 3, 6, 7}, False),
        ({"OMP_PLACES": "{4,5}", **BINDING}, {4, 5}, False),
        ({"OMP_PLACES": "{4},{5}"}, {4, 5}, False),
        # These values are not read, so the CPUs of the process are taken.
        (BINDING, {2}, False),
        ({"OMP_PLACES": "cores"}, {2}, False),
        ({"OMP_PLACES": "{0:4}", "OMP_PROC_BIND": "close"}, {2}, False),
        ({"KMP_AFFINITY": "compact"}, {2}, False),
        # The other worker's CPUs are known if the user has chosen them.
        (BOUND_TO_TWO | {"VLLM_CPU_OMP_THREADS_BIND": "0-1|2"}, {0, 1, 2}, True),
        (BOUND_TO_TWO | {"VLLM_CPU_OMP_THREADS_BIND": "auto"}, {0, 1}, False),
    ],
)
def test_the_models_cpus_are_read_from_openmps_variables(
    environ: dict[str, str], cpus: set[int], has_all_workers: bool
) -> None:
    assert model_cpus(environ, {2}) == ModelCpus(frozenset(cpus), has_all_workers)


@pytest.mark.parametrize(
    ("process", "model", "has_all_workers", "expected"),
    [
        # Nothing binds the worker. It runs on CPU 6.
        (ALL, set(), False, {2, 3, 6, 7}),
        # Most of its CPUs are on the first node.
        ({1, 4, 5, 6}, set(), False, {1, 4, 5}),
        # The model has a CPU on one core of the first socket. Both threads of the socket's other
        # core come first.
        (ALL, {4}, False, {1, 5}),
        # No core is free, but one thread of each core is.
        (ALL, {4, 5}, False, {0, 1}),
        # The CPUs of the other socket may belong to another worker.
        (ALL, {0, 1, 4, 5}, False, set()),
        (ALL, {0, 1, 4, 5}, True, {2, 3, 6, 7}),
        ({0, 1}, {0, 1}, True, set()),
        ({0, 1}, {0}, True, {1}),
    ],
)
def test_copies_get_what_the_model_leaves_free(process, model, has_all_workers, expected) -> None:
    model_cpus = ModelCpus(frozenset(model), has_all_workers)
    assert choose_cpus(frozenset(process), model_cpus, TWO_SOCKETS, 6) == frozenset(expected)
    # If memory nodes are not known, all CPUs count as one node.
    assert choose_cpus(frozenset(process), model_cpus, CpuTopology(), 6) == process - model


def test_a_choice_follows_the_main_thread(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level("INFO", logger="vllm.ascend_kvext.transfer")
    host = HostModel(runs_on=100)
    choose = PlacementChoice({}, host)
    # Nothing has bound the worker. It is on the third node, and other workers are elsewhere.
    assert choose() == CopyPlacement(tuple(range(96, 144)), 4)
    host.runs_on = 0  # A thread that nothing binds moves between CPUs.
    assert choose() == CopyPlacement(tuple(range(96, 144)), 4)
    host.bind_all(range(2, 22))
    assert choose() == CopyPlacement(tuple(range(2, 22)), 4)
    # The node of most CPUs is the worker's.
    host.bind_all(range(40, 70))
    assert choose() == CopyPlacement(tuple(range(48, 70)), 4)
    host.bind_all([0, *range(48, 70)])
    assert choose() == CopyPlacement(tuple(range(48, 70)), 4)
    assert caplog.text.count("Copies between pages and host memory run on CPUs") == 3
    host.bind_all([7])
    assert choose() == CopyPlacement((7,), 1, 10)
    assert "Every CPU of this process (7) runs the model" in caplog.text


def test_a_cpu_that_was_just_taken_is_asked_for_again(monkeypatch: pytest.MonkeyPatch) -> None:
    host = HostModel()
    host.bind_all(range(4))
    choose = PlacementChoice({}, host)
    monkeypatch.setattr(host_model, "ALL_CPUS", frozenset(range(3)))
    monkeypatch.setattr(host, "given", lambda wanted: wanted)
    with pytest.raises(PlacementError, match="found"):
        choose()
    monkeypatch.undo()
    assert choose() == CopyPlacement((0, 1, 2, 3), 4)


def test_cpus_that_the_kernel_no_longer_grants_are_left_out(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A cpuset was made smaller after the process had started."""
    host = HostModel()
    host.bind_all(range(4))
    monkeypatch.setattr(host_model, "ALL_CPUS", frozenset(range(3)))
    assert PlacementChoice({}, host)() == CopyPlacement((0, 1, 2), 3)


def test_threads_that_share_a_choice_make_it_once(monkeypatch: pytest.MonkeyPatch) -> None:
    host = HostModel()
    may_go_on = threading.Event()
    asked: list[tuple[int, ...]] = []

    def require(cpus: tuple[int, ...], niceness: int) -> None:
        asked.append(cpus)
        may_go_on.wait()

    monkeypatch.setattr(host, "require", require)
    choose = PlacementChoice({}, host)
    found: list[CopyPlacement] = []
    threads = [threading.Thread(target=lambda: found.append(choose())) for _ in range(2)]
    for thread in threads:
        thread.start()
        thread.join(0.05)  # Both come to the choice before the first has made it.
    may_go_on.set()
    for thread in threads:
        thread.join()
    assert len(asked) == 1 and len(set(found)) == 1 and len(found) == 2


@not_emulated
def test_the_cpu_of_the_main_thread_is_read() -> None:
    """Another thread asks, which has all CPUs."""
    host = HostCpus()
    before = os.sched_getaffinity(0)
    with ThreadPoolExecutor(1) as asking:
        asking.submit(os.getpid).result()
        try:
            for cpu in sorted(before):
                os.sched_setaffinity(0, {cpu})
                assert asking.submit(host.main_thread_is_on).result() == cpu
                assert asking.submit(host.of_main_thread).result() == {cpu}
        finally:
            os.sched_setaffinity(0, before)


def test_the_topology_is_read_from_sys(tmp_path: Path) -> None:
    files = {
        "cpu/cpu0/topology/thread_siblings_list": "0,2\n",
        "cpu/cpu1/topology/thread_siblings_list": "1,3\n",
        "cpu/cpu2/topology/thread_siblings_list": "0,2\n",
        "cpu/cpu3/topology/thread_siblings_list": "nonsense\n",
        "node/node0/cpulist": "0-3\n",
        "node/node1/cpulist": "\n",
    }
    for name, text in files.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(text)
    topology = CpuTopology.of_this_machine(tmp_path)
    assert topology.same_core(frozenset({0})) == {0, 2}
    assert topology.same_node(frozenset({1})) == {0, 1, 2, 3}
    assert topology.nodes == {0: {0, 1, 2, 3}}


DECIDE = """
import logging, multiprocessing, os, sys
bound_cpu = int(sys.argv[1])

def decide():
    os.sched_setaffinity(0, {bound_cpu})
    from vllm_ascend_kvext.transfer.placement import PlacementChoice
    logging.basicConfig(format="%(levelname)s %(message)s", level="INFO", stream=sys.stdout)
    placement = PlacementChoice(os.environ)()
    print(*placement.cpus, "|", placement.num_threads, placement.niceness, flush=True)
    assert os.sched_getaffinity(0) == {bound_cpu}
"""
IN_A_WORKER = f"""{DECIDE}
worker = multiprocessing.get_context("fork").Process(target=decide)
worker.start()
worker.join()
sys.exit(worker.exitcode)
"""
IN_THE_USERS_PROCESS = f"""{DECIDE}
decide()
"""
IN_A_PROCESS_BOUND_LATER = f"""
import vllm_ascend_kvext.transfer.placement
{DECIDE}
decide()
"""
IN_AN_ORPHAN = f"""{DECIDE}
import time
end, other_end = os.pipe()

def decide_once_the_parent_has_ended():
    os.close(other_end)
    os.read(end, 1)
    decide()

multiprocessing.get_context("fork").Process(target=decide_once_the_parent_has_ended).start()
os._exit(0)
"""
IN_A_FORK = f"""
import vllm_ascend_kvext.transfer.placement
{DECIDE}
child = os.fork()
if not child:
    decide()
    os._exit(0)
sys.exit(os.waitpid(child, 0)[1])
"""
IN_A_PROCESS_WITH_THREADS = f"""{DECIDE}
import threading
threading.Thread(target=threading.Event().wait, daemon=True).start()
decide()
"""
CPUS = sorted(os.sched_getaffinity(0))


def default_in_bound_process(script: str = IN_A_WORKER, **variables: str) -> list[str]:
    """The output of a process whose main thread is bound to the first CPU."""
    environ = {
        name: value
        for name, value in os.environ.items()
        if not name.startswith(("OMP_", "GOMP_", "KMP_", "VLLM_"))
    }
    finished = subprocess.run(
        [sys.executable, "-c", script, str(CPUS[0])],
        env={**environ, **variables},
        capture_output=True,
        text=True,
        check=False,
    )
    assert finished.returncode == 0, finished.stderr
    return finished.stdout.splitlines()


FIRST = str(CPUS[0])
EVERY = " ".join(map(str, CPUS))


@pytest.mark.skipif(len(CPUS) < 2, reason="needs two CPUs")
@pytest.mark.parametrize(
    ("script", "variables"),
    [
        (
            IN_A_WORKER,
            {**BINDING, "OMP_PLACES": f"{{{FIRST}}}", "VLLM_CPU_OMP_THREADS_BIND": FIRST},
        ),
        # The CPUs that a process had before it was bound are its own CPUs.
        (
            IN_A_PROCESS_BOUND_LATER,
            {"GOMP_CPU_AFFINITY": FIRST, "VLLM_CPU_OMP_THREADS_BIND": FIRST},
        ),
        # So are those that its other threads still have.
        (
            IN_A_PROCESS_WITH_THREADS,
            {"GOMP_CPU_AFFINITY": FIRST, "VLLM_CPU_OMP_THREADS_BIND": FIRST},
        ),
    ],
    ids=["worker", "bound later", "threads"],
)
def test_copies_run_where_the_model_does_not(script: str, variables: dict[str, str]) -> None:
    logged, placed = default_in_bound_process(script, **variables)
    cpus, _, options = placed.partition(" | ")
    assert FIRST not in cpus.split() and set(cpus.split()) <= set(EVERY.split())
    assert options == f"{min(4, len(cpus.split()))} 0"
    assert logged.startswith("INFO Copies between pages and host memory run on CPUs ")


ALL_CPUS = ",".join(map(str, CPUS))


@pytest.mark.parametrize(
    ("script", "variables", "cpus"),
    [
        # OpenMP binds the main thread to the first place, and the model's other threads to the
        # following places.
        (IN_A_WORKER, BINDING, EVERY),
        (IN_A_WORKER, {"OMP_PLACES": "cores"}, EVERY),
        (IN_A_WORKER, {"KMP_AFFINITY": "compact,1,0"}, EVERY),
        (
            IN_A_WORKER,
            {**BINDING, "OMP_PLACES": f"{{{ALL_CPUS}}}", "VLLM_CPU_OMP_THREADS_BIND": ALL_CPUS},
            EVERY,
        ),
        # If the first mask is not known, it may come from ``taskset``. The shell's mask does not
        # show this.
        pytest.param(IN_THE_USERS_PROCESS, BINDING, FIRST, marks=not_emulated),
        pytest.param(IN_AN_ORPHAN, BINDING, FIRST, marks=not_emulated),
        # What a parent had at its import says nothing about a child that it has forked.
        pytest.param(IN_A_FORK, BINDING, FIRST, marks=not_emulated),
    ],
    ids=["bound", "places", "Intel", "all named", "user", "orphan", "fork"],
)
def test_beside_a_model_that_has_every_cpu_one_thread_gives_way(
    script: str, variables: dict[str, str], cpus: str
) -> None:
    logged, placed = default_in_bound_process(script, **variables)
    assert placed == f"{cpus} | 1 10"
    assert logged.startswith(f"WARNING Every CPU of this process ({', '.join(cpus.split())}) ")


def test_cpus_that_are_on_no_known_node_are_all_taken() -> None:
    cpus = frozenset({1000, 1001})
    assert TWO_SOCKETS.on_one_node(cpus) == cpus
    assert choose_cpus(cpus, ModelCpus(frozenset(), False), TWO_SOCKETS) == cpus
