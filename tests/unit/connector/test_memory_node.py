# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vllm-ascend-kvext project
"""The memory node from which the kernel takes memory, as ``/proc`` shows it."""

from __future__ import annotations

import ctypes
import errno
import logging
import mmap
import re
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from vllm_ascend_kvext.connector.worker import host_buffer, memory_node
from vllm_ascend_kvext.connector.worker.host_buffer import HostBuffer
from vllm_ascend_kvext.connector.worker.memory_node import memory_of, prefer_node

MAPS = Path("/proc/self/numa_maps")
pytestmark = pytest.mark.skipif(not MAPS.exists(), reason="the kernel knows no memory nodes")


def has_calls() -> bool:
    """Whether the calls for memory nodes are there. An emulator of programs has none of them."""
    mode = ctypes.c_int()
    try:
        memory_node._call("get_mempolicy", ctypes.byref(mode), None, 0, 0, 0)
    except OSError as error:
        return error.errno != errno.ENOSYS
    return True


needs_calls = pytest.mark.skipif(not has_calls(), reason="no calls for memory nodes (emulator)")

NUM_BYTES = 1 << 20
# No machine has so many nodes.
NO_NODE = 1000


@pytest.fixture(autouse=True)
def no_node_is_logged_yet(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(memory_node, "_LOGGED_NODES", set())


def mapped() -> tuple[mmap.mmap, int]:
    """Memory that nothing has written to, and its address."""
    memory = mmap.mmap(-1, NUM_BYTES, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    memory.madvise(mmap.MADV_DONTFORK)  # The kernel joins mappings that are alike.
    return memory, ctypes.addressof(ctypes.c_char.from_buffer(memory))


def policy_of(address: int) -> str:
    """The kernel's policy for the mapping at an address, such as ``prefer:0``."""
    found = ""
    for line in MAPS.read_text().splitlines():
        start, policy = line.split()[:2]
        if int(start, 16) <= address:
            found = policy
    return re.sub(r"prefer \(many\)", "prefer", found)


@needs_calls
def test_a_mapping_is_taken_from_the_node() -> None:
    memory, address = mapped()
    assert policy_of(address) == "default"
    prefer_node(address, NUM_BYTES, 0)
    assert policy_of(address) == "prefer:0"
    memory[:4] = b"some"


@needs_calls
def test_what_a_thread_takes_is_of_the_node_only_within() -> None:
    _, address = mapped()
    with memory_of(0):
        assert policy_of(address) == "prefer:0"
    assert policy_of(address) == "default"


@needs_calls
def test_the_policy_of_the_thread_is_restored() -> None:
    """vLLM's CPU platform and ``numactl`` have set one."""
    bind = 2
    _, address = mapped()
    memory_node._call("set_mempolicy", bind, memory_node._only(0), memory_node._NUM_NODES + 1)
    try:
        with memory_of(0):
            assert policy_of(address) == "prefer:0"
        assert policy_of(address) == "bind:0"
    finally:
        memory_node._call("set_mempolicy", 0, None, 0)


def test_without_a_node_the_kernel_is_not_asked(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(memory_node, "_call", None)
    prefer_node(0, NUM_BYTES, None)
    with memory_of(None):
        pass


def test_a_refusal_is_logged_once_and_changes_nothing(caplog: pytest.LogCaptureFixture) -> None:
    memory, address = mapped()
    caplog.set_level(logging.WARNING, logger="vllm.ascend_kvext.connector")
    for _ in range(2):
        prefer_node(address, NUM_BYTES, NO_NODE)
        with memory_of(NO_NODE):
            memory[:4] = b"some"
    (record,) = caplog.records
    assert "not taken from memory node 1000, the node of this worker: " in record.getMessage()
    assert policy_of(address) == "default"


@needs_calls
def test_a_policy_that_is_not_restored_ends_nothing(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    call = memory_node._call
    calls: list[str] = []

    def refuse_the_second(name: str, *arguments: object) -> None:
        calls.append(name)
        if calls.count("set_mempolicy") == 2:
            raise OSError(1, "refused")
        call(name, *arguments)

    monkeypatch.setattr(memory_node, "_call", refuse_the_second)
    with memory_of(0):
        pass
    monkeypatch.undo()
    memory_node._call("set_mempolicy", 0, None, 0)
    (record,) = caplog.records
    assert "is not restored: [Errno 1] refused" in record.getMessage()


def test_a_machine_whose_calls_are_not_known_is_told_so(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(memory_node.platform, "machine", lambda: "riscv64")
    prefer_node(0, NUM_BYTES, 0)
    assert "not known for riscv64" in caplog.text


@needs_calls
@pytest.mark.parametrize("node", [None, 0, NO_NODE])
def test_host_memory_is_taken_from_the_node(node: int | None) -> None:
    torch = pytest.importorskip("torch")
    buffer = HostBuffer.allocate(NUM_BYTES, torch.device("cpu"), node)
    assert policy_of(buffer.tensor.data_ptr()) == ("prefer:0" if node == 0 else "default")
    assert not buffer.tensor.any()


@needs_calls
def test_what_an_npu_pins_is_taken_from_the_node(monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("torch")
    policies: list[str] = []

    class Device:
        @staticmethod
        def pin_host(host: Any) -> Any:
            policies.append(policy_of(host.data_ptr()))
            return lambda: None

    monkeypatch.setattr(host_buffer, "transfers_on", lambda _: Device)
    HostBuffer.allocate(NUM_BYTES, SimpleNamespace(type="npu"), 0)
    assert policies == ["default", "prefer:0"], "a page that is only tried, and the memory"


@needs_calls
def test_memory_that_torch_pins_is_taken_from_the_node(monkeypatch: pytest.MonkeyPatch) -> None:
    torch = pytest.importorskip("torch")
    _, address = mapped()
    policies: list[str] = []
    plain_memory = torch.empty

    def pin(*size: int, dtype: Any, pin_memory: bool) -> Any:
        assert pin_memory
        policies.append(policy_of(address))
        return plain_memory(*size, dtype=dtype)

    monkeypatch.setattr(torch, "empty", pin)
    HostBuffer.allocate(NUM_BYTES, SimpleNamespace(type="cuda"), 0)
    assert policies == ["prefer:0"]
    assert policy_of(address) == "default"
