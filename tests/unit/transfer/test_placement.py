# SPDX-License-Identifier: Apache-2.0
"""Which CPUs copies get by default, from what vLLM's CPU platform leaves in a worker."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from vllm_ascend_kvext.transfer.cpu_topology import CpuTopology
from vllm_ascend_kvext.transfer.openmp import ModelCpus, is_main_thread_bound, model_cpus
from vllm_ascend_kvext.transfer.placement import choose_cpus

# Two sockets of two cores with two threads each: CPU n and n + 4 share a core.
TWO_SOCKETS = CpuTopology(
    cores=tuple(frozenset({core, core + 4}) for core in range(4)),
    nodes=(frozenset({0, 1, 4, 5}), frozenset({2, 3, 6, 7})),
)
ALL = frozenset(range(8))


@pytest.mark.parametrize(
    ("environ", "expected"),
    [
        ({}, ModelCpus(frozenset(), False)),
        ({"VLLM_CPU_OMP_THREADS_BIND": "nobind"}, ModelCpus(frozenset(), False)),
        ({"OMP_PROC_BIND": "false", "OMP_PLACES": "{1}"}, ModelCpus(frozenset(), False)),
        (
            {"KMP_AFFINITY": "granularity=fine,explicit,proclist=[4,5]"},
            ModelCpus(frozenset({4, 5}), False),
        ),
        ({"GOMP_CPU_AFFINITY": "4 5-6"}, ModelCpus(frozenset({4, 5, 6}), False)),
        ({"GOMP_CPU_AFFINITY": "0-6:3,7"}, ModelCpus(frozenset({0, 3, 6, 7}), False)),
        (
            {"OMP_PLACES": "{4,5}", "OMP_PROC_BIND": "true"},
            ModelCpus(frozenset({4, 5}), False),
        ),
        ({"OMP_PLACES": "{4},{5}"}, ModelCpus(frozenset({4, 5}), False)),
        # In words that are not read here: what the process has.
        ({"OMP_PROC_BIND": "true"}, ModelCpus(frozenset({2}), False)),
        ({"OMP_PLACES": "cores"}, ModelCpus(frozenset({2}), False)),
        ({"OMP_PLACES": "{0:4}", "OMP_PROC_BIND": "close"}, ModelCpus(frozenset({2}), False)),
        ({"KMP_AFFINITY": "compact"}, ModelCpus(frozenset({2}), False)),
        # The other worker's CPUs are known where the user has chosen them.
        (
            {"OMP_PLACES": "{0,1}", "OMP_PROC_BIND": "true", "VLLM_CPU_OMP_THREADS_BIND": "0-1|2"},
            ModelCpus(frozenset({0, 1, 2}), True),
        ),
        (
            {"OMP_PLACES": "{0,1}", "OMP_PROC_BIND": "true", "VLLM_CPU_OMP_THREADS_BIND": "auto"},
            ModelCpus(frozenset({0, 1}), False),
        ),
    ],
)
def test_the_models_cpus_are_read_from_openmps_variables(
    environ: dict[str, str], expected: ModelCpus
) -> None:
    assert model_cpus(environ, {2}) == expected


@pytest.mark.parametrize(
    ("process", "model", "has_all_workers", "expected"),
    [
        (ALL, set(), False, ALL),
        # One CPU of each of the first socket's cores but one: that core comes first, both threads.
        (ALL, {4}, False, {1, 5}),
        # No core is free, threads of cores are.
        (ALL, {4, 5}, False, {0, 1}),
        # The other socket's may be another worker's.
        (ALL, {0, 1, 4, 5}, False, set()),
        (ALL, {0, 1, 4, 5}, True, {2, 3, 6, 7}),
        ({0, 1}, {0, 1}, True, set()),
        ({0, 1}, {0}, True, {1}),
    ],
)
def test_copies_get_what_the_model_leaves_free(process, model, has_all_workers, expected) -> None:
    found = choose_cpus(
        frozenset(process), ModelCpus(frozenset(model), has_all_workers), TWO_SOCKETS
    )
    assert found == frozenset(expected)


def test_where_no_memory_node_is_known_every_cpu_is_on_one() -> None:
    assert choose_cpus(ALL, ModelCpus(frozenset({0}), False), CpuTopology()) == ALL - {0}


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
    assert topology.same_core({0}) == {0, 2}
    assert topology.same_node({1}) == {0, 1, 2, 3}


DECIDE = """
import logging, multiprocessing, os, sys
bound_cpu = int(sys.argv[1])

def decide():
    os.sched_setaffinity(0, {bound_cpu})
    from vllm_ascend_kvext.transfer.placement import default_placement
    logging.basicConfig(format="%(levelname)s %(message)s", level="INFO", stream=sys.stdout)
    for _ in range(2):
        placement = default_placement()
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
CPUS = sorted(os.sched_getaffinity(0))


def default_in_bound_process(script: str = IN_A_WORKER, **variables: str) -> list[str]:
    """What a process prints whose main thread is bound to the first CPU."""
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


@pytest.mark.skipif(len(CPUS) < 2, reason="needs two CPUs")
def test_a_worker_that_openmp_has_bound_copies_elsewhere() -> None:
    logged, placed = default_in_bound_process(
        OMP_PLACES=f"{{{CPUS[0]}}}", OMP_PROC_BIND="true", VLLM_CPU_OMP_THREADS_BIND=str(CPUS[0])
    )
    assert str(CPUS[0]) not in placed.split(" |")[0].split()
    assert placed.endswith(f"| {min(4, len(CPUS) - 1)} 0") or len(CPUS) > 2
    assert logged.startswith("INFO Copies between pages and host memory run on CPUs ")


@pytest.mark.skipif(len(CPUS) < 2, reason="needs two CPUs")
@pytest.mark.parametrize(
    "variables",
    [{"OMP_PROC_BIND": "true"}, {"OMP_PLACES": "cores"}, {"KMP_AFFINITY": "compact,1,0"}],
)
def test_a_model_that_is_bound_in_words_has_every_cpu(variables: dict[str, str]) -> None:
    """OpenMP binds the main thread to the first place, and the model's other threads behind it."""
    logged, placed = default_in_bound_process(**variables)
    assert placed == f"{' '.join(map(str, CPUS))} | 1 10"
    assert logged.startswith("WARNING Every CPU of this process ")


@pytest.mark.skipif(len(CPUS) < 2, reason="needs two CPUs")
def test_what_a_process_had_before_it_was_bound_is_its_own() -> None:
    bound = str(CPUS[0])
    _, placed = default_in_bound_process(
        IN_A_PROCESS_BOUND_LATER, GOMP_CPU_AFFINITY=bound, VLLM_CPU_OMP_THREADS_BIND=bound
    )
    assert bound not in placed.split(" |")[0].split()


@pytest.mark.skipif(len(CPUS) < 2, reason="needs two CPUs")
@pytest.mark.parametrize("script", [IN_THE_USERS_PROCESS, IN_AN_ORPHAN], ids=["user", "orphan"])
def test_where_the_first_mask_is_not_known_copies_leave_no_threads_cpus(script: str) -> None:
    """The mask may be ``taskset``'s: that of the shell, which is the parent, says nothing."""
    logged, placed = default_in_bound_process(script, OMP_PROC_BIND="true")
    assert placed == f"{CPUS[0]} | 1 10"
    assert logged.startswith(f"WARNING Every CPU of this process ({CPUS[0]}) ")


@pytest.mark.parametrize(
    ("variables", "is_bound"),
    [
        ({}, False),
        ({"OMP_PROC_BIND": "false", "OMP_PLACES": "cores"}, False),
        ({"OMP_PROC_BIND": "close"}, True),
        ({"OMP_PLACES": "cores"}, True),
        ({"GOMP_CPU_AFFINITY": "0"}, True),
        ({"KMP_AFFINITY": "compact"}, True),
    ],
)
def test_openmps_variables_say_whether_it_binds(variables: dict[str, str], is_bound: bool) -> None:
    assert is_main_thread_bound(variables) is is_bound


def test_beside_a_model_that_has_every_cpu_one_thread_gives_way() -> None:
    every_cpu = ",".join(map(str, CPUS))
    logged, placed = default_in_bound_process(
        OMP_PLACES=f"{{{every_cpu}}}", OMP_PROC_BIND="true", VLLM_CPU_OMP_THREADS_BIND=every_cpu
    )
    assert placed == f"{' '.join(map(str, CPUS))} | 1 10"
    assert logged.startswith(f"WARNING Every CPU of this process ({', '.join(map(str, CPUS))}) ")
