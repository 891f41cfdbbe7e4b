# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vllm-ascend-kvext project
"""vLLM-Ascend binds the CPUs of its workers on a modelled ARM host; copies keep to what it leaves.

The code that binds is vLLM-Ascend's own. The commands that it runs answer for the model.
"""

from __future__ import annotations

import inspect
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from support.transfer.host_model import ALL_CPUS, MAIN_THREAD, TOPOLOGY, HostModel
from vllm.platforms import current_platform
from vllm_ascend import ascend_config, cpu_binding

from vllm_ascend_kvext.connector.ascend_binding import planned_cpus
from vllm_ascend_kvext.transfer.placement import PlacementChoice

NUM_NPUS = 8
ACL_THREAD, RELEASE_THREAD, TRANSFER_THREAD = "1001", "1002", "1003"


class Worker:
    """A worker on one NPU: what the commands of vLLM-Ascend say of it and do to it."""

    def __init__(self) -> None:
        self.host = HostModel([ACL_THREAD, RELEASE_THREAD, TRANSFER_THREAD])
        self.commands: list[str] = []
        self.irq_cpus: set[int] = set()

    def answer(self, command: list[str]) -> tuple[str, int]:
        """The output and the exit code of a command."""
        text = " ".join(command)
        self.commands.append(text)
        if command[0] == "taskset":
            self._bind(*command[1:])
            return "", 0
        answers = {
            "npu-smi info -m": _table("NPU ID  Chip ID  Chip Logic ID", "{npu}  0  {npu}"),
            "npu-smi info": _table("| NPU  Chip | Process id |", "| {npu}  0 | 1 |"),
            "npu-smi info -t topo": _table("   CPU Affinity", "NPU{npu}  X  {cpus}"),
            "lscpu -e=CPU,NODE": "\n".join(
                f"{cpu} {node}" for node, cpus in TOPOLOGY.nodes.items() for cpu in sorted(cpus)
            ),
            "ps -Te": "\n".join(
                f"{MAIN_THREAD} {number} ? 00:00:00 {name}"
                for number, name in ((ACL_THREAD, "acl_thread"), (RELEASE_THREAD, "release_thread"))
            ),
        }
        return answers.get(text, ""), 0

    def _bind(self, flags: str, cpus: str, thread: str) -> None:
        bound = frozenset(map(int, cpus.split(",")))
        if "a" in flags:
            assert thread == MAIN_THREAD
            self.host.bind_all(bound)
        else:
            self.host.threads[thread] = bound


def _table(header: str, row: str) -> str:
    """One row for each NPU. Two NPUs are near to each memory node."""
    rows = (
        row.format(npu=npu, cpus=f"{npu // 2 * 48}-{npu // 2 * 48 + 47}") for npu in range(NUM_NPUS)
    )
    return "\n".join((header, *rows))


@pytest.fixture
def bind(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Any:
    """A function that lets vLLM-Ascend bind the worker of an NPU."""
    status = tmp_path / "status"
    status.write_text(f"Cpus_allowed_list:\t0-{max(ALL_CPUS)}\n")
    monkeypatch.setattr(cpu_binding, "ALLOWED_CPUS_PATH", str(status))
    monkeypatch.setattr(cpu_binding, "platform", SimpleNamespace(machine=lambda: "aarch64"))
    monkeypatch.setattr(cpu_binding, "shutil", SimpleNamespace(which=lambda name: name))
    main_thread = SimpleNamespace(Process=lambda: SimpleNamespace(pid=int(MAIN_THREAD)))
    monkeypatch.setattr(cpu_binding, "psutil", main_thread)

    def bind_worker(npu: int) -> Worker:
        worker = Worker()

        def note_irq_cpus(binder: Any) -> None:
            worker.irq_cpus = set(binder.npu_cpu_pool[npu][:2])

        monkeypatch.setattr(cpu_binding, "execute_command", worker.answer)
        monkeypatch.setattr(cpu_binding.CpuAlloc, "bind_npu_irq", note_irq_cpus)
        takes_npu = "npu_id" in inspect.signature(cpu_binding.bind_cpus).parameters
        cpu_binding.bind_cpus(npu, **({"npu_id": npu} if takes_npu else {}))
        return worker

    return bind_worker


@pytest.fixture
def enabled(monkeypatch: pytest.MonkeyPatch) -> SimpleNamespace:
    """The part of vLLM-Ascend's configuration that is about CPUs, with its default."""
    config = SimpleNamespace(enable_cpu_binding=True)
    monkeypatch.setattr(ascend_config, "get_ascend_config", lambda: config)
    monkeypatch.setattr(
        type(current_platform),
        "device_id_to_physical_device_id",
        classmethod(lambda _, device: device),
    )
    return config


@pytest.mark.parametrize("mode", ["topo_affinity", "global_slice"])
def test_copies_run_where_the_worker_is_bound(
    mode: str, bind: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(cpu_binding.CpuAlloc, "_binding_mode", staticmethod(lambda: mode))
    workers = [bind(npu) for npu in range(NUM_NPUS)]
    reserved = set().union(*(worker.irq_cpus for worker in workers))
    for worker in workers:
        reserved |= worker.host.threads[ACL_THREAD] | worker.host.threads[RELEASE_THREAD]
    assert len(reserved) >= 4 * len({worker.host.of_main_thread() for worker in workers})
    for worker in workers:
        placement = PlacementChoice({}, worker.host)()
        cpus = frozenset(placement.cpus)
        assert cpus and cpus <= worker.host.of_main_thread()
        assert TOPOLOGY.node_of(cpus) is not None
        assert not cpus & reserved
        assert (placement.num_threads, placement.niceness) == (4, 0)
        for other in workers:
            # For two NPUs near one node, vLLM-Ascend gives some workers the same CPUs.
            if other.host.of_main_thread() != worker.host.of_main_thread():
                assert not cpus & other.host.of_main_thread()


def test_what_was_chosen_before_is_chosen_again(bind: Any) -> None:
    """Blending on an NPU rotates keys on the host. What a warm-up does comes before the binding."""
    unbound = HostModel(runs_on=100)
    choice = PlacementChoice({}, unbound)
    assert frozenset(choice().cpus) == TOPOLOGY.nodes[2]
    unbound.threads = bind(0).host.threads
    assert frozenset(choice().cpus) == unbound.of_main_thread() < TOPOLOGY.nodes[0]


@pytest.mark.parametrize("mode", ["topo_affinity", "global_slice"])
def test_the_plan_is_known_before_it_is_carried_out(
    mode: str, bind: Any, enabled: SimpleNamespace, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Host memory is pinned before, on the node of the worker."""
    monkeypatch.setattr(cpu_binding.CpuAlloc, "_binding_mode", staticmethod(lambda: mode))
    nodes = set()
    for npu in range(NUM_NPUS):
        planning = Worker()
        monkeypatch.setattr(cpu_binding, "execute_command", planning.answer)
        planned = planned_cpus(npu)
        assert planned == bind(npu).host.of_main_thread()
        assert not [each for each in planning.commands if not each.startswith(("npu-smi", "lscpu"))]
        nodes.add(TOPOLOGY.node_of(planned))
    assert nodes >= {0, 1, 2} and None not in nodes
    enabled.enable_cpu_binding = False
    assert planned_cpus(0) == frozenset()


def test_no_plan_is_made_where_none_can_be(
    bind: Any,
    enabled: SimpleNamespace,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    caplog.set_level("INFO", logger="vllm.ascend_kvext.connector")
    monkeypatch.setattr(cpu_binding, "execute_command", Worker().answer)
    name = next(
        name
        for name in ("_uses_cluster_cpu_topology", "_is_ascend_950")
        if hasattr(cpu_binding.CpuAlloc, name)
    )
    with monkeypatch.context() as patched:
        patched.setattr(cpu_binding.CpuAlloc, name, staticmethod(lambda: True))
        assert planned_cpus(0) == frozenset()
    assert "cannot be found out" not in caplog.text
    assert planned_cpus(NUM_NPUS + 1) == frozenset()
    assert "will bind worker 9: " in caplog.text
    monkeypatch.setattr(cpu_binding, "platform", SimpleNamespace(machine=lambda: "x86_64"))
    assert planned_cpus(0) == frozenset()


def test_vllm_ascend_migrates_the_memory_of_the_process(bind: Any) -> None:
    """docs/offload.md says what that means for pinned memory."""
    assert [each for each in bind(5).commands if each.startswith("migratepages")] == [
        f"migratepages {MAIN_THREAD} 0,1,2,3 {min(bind(5).irq_cpus) // 48}"
    ]
