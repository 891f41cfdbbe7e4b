# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vllm-ascend-kvext project
"""Host memory of a worker: its size, its kind, and whether it is mapped.

torch is imported when a test runs, so the tests can be collected without torch.
"""

from __future__ import annotations

import gc
import logging
import mmap
import os
import re
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

import pytest
from pytest_mock import MockerFixture
from support.emulator import not_emulated

from vllm_ascend_kvext.connector.common.host_memory import (
    HostMemoryError,
    MemoryBound,
    MemoryNeed,
)
from vllm_ascend_kvext.connector.worker import host_buffer, mapped_memory
from vllm_ascend_kvext.connector.worker.host_buffer import HostBuffer
from vllm_ascend_kvext.errors import SettingsError
from vllm_ascend_kvext.settings import ASCEND_KERNEL_VARIABLE
from vllm_ascend_kvext.transfer.ascend import npu_transfers
from vllm_ascend_kvext.transfer.errors import BackendError

CPU, NPU, GPU = (SimpleNamespace(type=name) for name in ("cpu", "npu", "cuda"))


@pytest.fixture
def torch(monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.delenv(ASCEND_KERNEL_VARIABLE, raising=False)
    return pytest.importorskip("torch")


@pytest.fixture
def pinned(torch: Any, monkeypatch: pytest.MonkeyPatch) -> list[bool]:
    """For each buffer so far, whether pinned memory was asked for. A CPU cannot give any."""
    asked: list[bool] = []
    empty = torch.empty

    def plain_memory(*size: int, dtype: Any, pin_memory: bool) -> Any:
        asked.append(pin_memory)
        return empty(*size, dtype=dtype)

    monkeypatch.setattr(torch, "empty", plain_memory)
    return asked


class Device:
    """Pins mappings of the process in place of an NPU, or refuses to.

    Attributes:
        largest_bytes: The most that it pins at once.
        pinned: The sizes of what is pinned, by address.
    """

    def __init__(self, largest_bytes: int = 1 << 40) -> None:
        self.largest_bytes = largest_bytes
        self.pinned: dict[int, int] = {}

    def pin_host(self, host: Any) -> Any:
        address, num_bytes = host.data_ptr(), host.numel()
        assert not address % mmap.PAGESIZE and address not in self.pinned
        if num_bytes > self.largest_bytes:
            raise BackendError(f"error code 207001 for {num_bytes} bytes")
        self.pinned[address] = num_bytes
        return lambda: self.pinned.pop(address)


@pytest.fixture
def npu(torch: Any, monkeypatch: pytest.MonkeyPatch) -> Device:
    made = Device()
    transfers_on = host_buffer.transfers_on
    monkeypatch.setattr(
        host_buffer, "transfers_on", lambda kind: made if kind == "npu" else transfers_on(kind)
    )
    return made


def test_memory_beside_a_cpu_is_plain(torch: Any, pinned: list[bool]) -> None:
    buffer = HostBuffer.allocate(1000, CPU)
    assert not pinned
    assert (buffer.num_bytes, buffer.tensor.dtype, buffer.tensor.dim()) == (960, torch.uint8, 1)
    assert buffer.tensor.data_ptr() % 64 == 0


def test_memory_beside_a_cpu_is_taken_at_once(torch: Any) -> None:
    """Otherwise each page would cause a page fault, and the faults would slow the first stores."""
    before_bytes = resident_bytes()
    buffer = HostBuffer.allocate(64 << 20, CPU)
    assert resident_bytes() - before_bytes > 60 << 20
    assert not buffer.tensor.any()


needs_advice = not_emulated("passes on no advice about memory")


@needs_advice
@pytest.mark.skipif(
    "[never]" in Path("/sys/kernel/mm/transparent_hugepage/enabled").read_text(),
    reason="this kernel gives no huge pages",
)
def test_memory_beside_a_cpu_is_in_huge_pages(torch: Any) -> None:
    num_bytes = 64 << 20
    buffer = HostBuffer.allocate(num_bytes, CPU)
    # The kernel gives small pages where free memory is in pieces, and merges neighbouring mappings.
    assert mapping_at(buffer.tensor.data_ptr())["AnonHugePages"] >= num_bytes // 2


@needs_advice
def test_a_forked_process_does_not_get_the_memory(torch: Any) -> None:
    """Otherwise the kernel would copy what is written while the other process lives."""
    buffer = HostBuffer.allocate(8 << 20, CPU)
    address = buffer.tensor.data_ptr()
    assert mapping_at(address)
    child = os.fork()
    if not child:
        os._exit(1 if mapping_at(address) else 0)
    _, status = os.waitpid(child, 0)
    assert not status
    assert buffer.tensor.fill_(3).all()


NUM_BYTES = (12 << 20) + 64
"""Not a whole number of pages, and far from a power of two."""


def test_an_npu_pins_a_mapping_and_no_byte_more_is_taken(npu: Device, pinned: list[bool]) -> None:
    before_bytes = resident_bytes()
    buffer = HostBuffer.allocate(NUM_BYTES + 63, NPU)
    assert buffer.num_bytes == NUM_BYTES and not pinned
    address = buffer.tensor.data_ptr()
    assert npu.pinned == {address: NUM_BYTES}, "a page that was tried is pinned no more"
    assert 0.95 < (resident_bytes() - before_bytes) / NUM_BYTES < 1.05
    assert not buffer.tensor.any()
    buffer.unmap()
    buffer.unmap()
    assert not npu.pinned and mapping_at(address)
    del buffer
    gc.collect()
    assert not mapping_at(address)


@needs_advice
def test_a_forked_process_does_not_get_what_an_npu_pins(npu: Device) -> None:
    """Otherwise the device would go on with the page that the other process has."""
    buffer = HostBuffer.allocate(NUM_BYTES, NPU)
    address = buffer.tensor.data_ptr()
    child = os.fork()
    if not child:
        os._exit(1 if mapping_at(address) else 0)
    _, status = os.waitpid(child, 0)
    assert not status


@pytest.mark.parametrize("largest_bytes", [0, mmap.PAGESIZE])
def test_where_a_mapping_cannot_be_pinned_torch_allocates(
    largest_bytes: int,
    npu: Device,
    pinned: list[bool],
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    """The device refuses one page, or only all of the memory. Nothing of it is kept."""
    npu.largest_bytes = largest_bytes
    import torch

    before_bytes = resident_bytes()
    taken: list[int] = []
    plain_memory = torch.empty

    def allocate(*size: int, **how: Any) -> Any:
        taken.append(resident_bytes() - before_bytes)
        return plain_memory(*size, **how)

    monkeypatch.setattr(torch, "empty", allocate)
    buffer = HostBuffer.allocate(NUM_BYTES, NPU)
    assert pinned == [True] and buffer.num_bytes == NUM_BYTES and not npu.pinned
    assert taken[0] < NUM_BYTES // 2, "the mapping was not given back before torch allocates"
    refused_bytes = NUM_BYTES if largest_bytes else mmap.PAGESIZE
    (record,) = caplog.records
    assert f"torch may pin {16 << 20} bytes for the {NUM_BYTES}" in record.message
    assert f"Torch allocates it: error code 207001 for {refused_bytes} bytes" in record.message
    buffer.unmap()


def test_memory_that_another_library_reads_is_of_torch(
    npu: Device, pinned: list[bool], caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.INFO, logger="vllm.ascend_kvext.connector"):
        HostBuffer.allocate(4096, NPU, why_torch="the transport may refuse it.")
        HostBuffer.allocate(4096, CPU, why_torch="the transport may refuse it.")
    assert pinned == [True] and not npu.pinned
    (record,) = caplog.records
    assert record.levelno == logging.INFO, "nothing is lost"
    assert "Torch allocates it: the transport may refuse it." in record.message


def mapping_at(address: int) -> dict[str, int]:
    """The sizes, in bytes, of the mapping that has an address; empty if there is none."""
    found: dict[str, int] = {}
    is_found = False
    for line in Path("/proc/self/smaps").read_text().splitlines():
        header = re.match("([0-9a-f]+)-([0-9a-f]+) ", line)
        if header is not None:
            is_found = int(header[1], 16) <= address < int(header[2], 16)
        elif is_found and line.endswith(" kB"):
            name, size, _ = line.split()
            found[name.rstrip(":")] = int(size) * 1024
    return found


def resident_bytes() -> int:
    _, num_pages, *_ = Path("/proc/self/statm").read_text().split()
    return int(num_pages) * mmap.PAGESIZE


def leave(num_bytes: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Let the host have so many bytes left."""
    bound = MemoryBound("memory.max", num_bytes + 1000, 1000)
    monkeypatch.setattr(mapped_memory, "tightest_bound", lambda: bound)


@pytest.mark.parametrize("device", [CPU, NPU, GPU], ids=lambda device: device.type)
def test_more_memory_than_the_host_has_left_is_refused(
    device: Any, pinned: list[bool], monkeypatch: pytest.MonkeyPatch
) -> None:
    is_pinned = device is not CPU
    need_bytes = MemoryNeed(8192, 1, is_pinned).total_bytes
    leave(need_bytes, monkeypatch)
    HostBuffer.allocate(8192, device)
    leave(need_bytes - 1, monkeypatch)
    pinned.clear()
    with pytest.raises(
        HostMemoryError,
        match=rf"expected {need_bytes} bytes .* for 1 worker .* found {need_bytes - 1} bytes .* "
        rf"memory.max allows {need_bytes + 999} bytes .* Give the connector less memory",
    ):
        HostBuffer.allocate(8192, device)
    assert not pinned


def test_what_rounding_takes_is_counted(
    pinned: list[bool], monkeypatch: pytest.MonkeyPatch
) -> None:
    leave(MemoryNeed(8192, 1, is_pinned=False).total_bytes, monkeypatch)
    HostBuffer.allocate(8192, NPU)
    HostBuffer.allocate(4160, NPU)
    leave(MemoryNeed(8192, 1, is_pinned=False).total_bytes - 1, monkeypatch)
    HostBuffer.allocate(4160, CPU)
    with pytest.raises(
        HostMemoryError, match=r"torch pins 8192 bytes .* Torch allocates it: .* CANN's module acl"
    ):
        HostBuffer.allocate(4160, NPU)


def test_what_an_npu_pins_is_counted_without_rounding(
    npu: Device, pinned: list[bool], monkeypatch: pytest.MonkeyPatch
) -> None:
    need_bytes = MemoryNeed(NUM_BYTES, 1, is_pinned=False).total_bytes
    leave(need_bytes, monkeypatch)
    HostBuffer.allocate(NUM_BYTES, NPU)
    leave(need_bytes - 1, monkeypatch)
    with pytest.raises(HostMemoryError, match=rf"expected {need_bytes} bytes"):
        HostBuffer.allocate(NUM_BYTES, NPU)
    assert not pinned


def test_workers_that_take_memory_at_the_same_time_notice(
    torch: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Two workers want 96 MiB each of 160. The other one takes as much as this one."""
    before_bytes = resident_bytes()

    def shrinking() -> Iterator[MemoryBound]:
        while True:
            taken_bytes = max(0, resident_bytes() - before_bytes)
            yield MemoryBound("memory.max", 160 << 20, 2 * taken_bytes)

    bounds = shrinking()
    monkeypatch.setattr(mapped_memory, "tightest_bound", lambda: next(bounds))
    with pytest.raises(HostMemoryError, match=r"of 100663296 bytes .* were taken meanwhile"):
        HostBuffer.allocate(96 << 20, CPU)
    assert resident_bytes() - before_bytes < 16 << 20, "the memory was not given back"


def test_a_host_that_says_nothing_is_believed(
    pinned: list[bool], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(mapped_memory, "tightest_bound", lambda: None)
    assert not HostBuffer.allocate(1 << 20, CPU).tensor.any()
    assert HostBuffer.allocate(1 << 20, NPU).num_bytes == 1 << 20


@pytest.mark.parametrize(
    ("num_bytes", "message"),
    [
        (0, "expected at least 64 bytes"),
        (63, "expected at least 64 bytes"),
        (1 << 60, rf"expected \d+ bytes .* for 1 worker of this host \({1 << 60} bytes "),
    ],
)
def test_memory_that_cannot_be_had_is_refused(torch: Any, num_bytes: int, message: str) -> None:
    with pytest.raises(HostMemoryError, match=message):
        HostBuffer.allocate(num_bytes, CPU)


def test_memory_that_cannot_be_pinned_is_refused(
    torch: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*size: int, **_: object) -> None:
        raise RuntimeError("no accelerator")

    monkeypatch.setattr(torch, "empty", refuse)
    with pytest.raises(HostMemoryError, match=r"bytes that can be pinned.*no accelerator"):
        HostBuffer.allocate(4096, NPU)


@pytest.mark.parametrize("num_bytes, is_told", [(4096, False), (4032, False), (4096 + 64, True)])
def test_memory_that_rounding_loses_is_told(
    num_bytes: int, is_told: bool, pinned: list[bool], caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.WARNING, logger="vllm.ascend_kvext.connector"):
        HostBuffer.allocate(num_bytes, CPU)
        assert not caplog.records
        HostBuffer.allocate(num_bytes, NPU)
    assert ("torch may pin 8192 bytes for the 4160" in caplog.text) == is_told


@pytest.mark.parametrize("is_wanted", [False, True])
def test_memory_beside_an_npu_is_pinned_and_mapped_for_a_wanted_kernel(
    is_wanted: bool, pinned: list[bool], mocker: MockerFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    unpin = mocker.patch.object(npu_transfers, "pin_host").return_value
    kernel = mocker.patch.object(npu_transfers, "AscendKernelBackend").return_value
    if is_wanted:
        monkeypatch.setenv(ASCEND_KERNEL_VARIABLE, "1")
    buffer = HostBuffer.allocate(4096, NPU)
    HostBuffer.allocate(4096, CPU)
    assert pinned == [True] * is_wanted and unpin.call_count == 1
    once = [mock.call(buffer.tensor)] * is_wanted
    assert kernel.map_host.mock_calls == once
    kernel.unmap_host.assert_not_called()
    buffer.unmap()
    buffer.unmap()
    assert kernel.unmap_host.mock_calls == once
    assert unpin.call_count == (1 if is_wanted else 2)


def test_memory_beside_a_gpu_is_pinned_and_never_mapped(
    torch: Any,
    pinned: list[bool],
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    monkeypatch.setattr(torch.version, "hip", None)
    HostBuffer.allocate(4096, GPU)
    assert pinned == [True]
    assert not [each for each in caplog.records if each.levelno >= logging.WARNING]
    monkeypatch.setenv(ASCEND_KERNEL_VARIABLE, "1")
    HostBuffer.allocate(4096, GPU).unmap()
    assert "cuda: expected a device with a kernel of its own" in caplog.text


@pytest.mark.parametrize("has_kernel", [False, True])
def test_without_a_mapping_the_dma_engines_serve(
    has_kernel: bool,
    pinned: list[bool],
    monkeypatch: pytest.MonkeyPatch,
    mocker: MockerFixture,
    caplog: pytest.LogCaptureFixture,
) -> None:
    monkeypatch.setenv(ASCEND_KERNEL_VARIABLE, "1")
    if has_kernel:
        refusing = mocker.patch.object(npu_transfers, "AscendKernelBackend").return_value
        refusing.map_host.side_effect = BackendError("507001 of CANN's runtime")
    with caplog.at_level(logging.WARNING, logger="vllm.ascend_kvext.connector"):
        HostBuffer.allocate(4096, CPU)
        HostBuffer.allocate(4096, NPU)
    (record,) = caplog.records
    assert "the DMA engines serve it" in record.message
    assert ("507001" if has_kernel else "-DKVEXT_ASCEND=ON") in record.message


def test_a_wrong_setting_is_refused(pinned: list[bool], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(ASCEND_KERNEL_VARIABLE, "perhaps")
    with pytest.raises(SettingsError):
        HostBuffer.allocate(4096, NPU)
