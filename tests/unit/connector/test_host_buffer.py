# SPDX-License-Identifier: Apache-2.0
"""Host memory of a worker: its size, its kind, and whether it is mapped.

torch is imported when a test runs, so the tests can be collected without torch.
"""

from __future__ import annotations

import logging
import mmap
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

import pytest
from pytest_mock import MockerFixture

from vllm_ascend_kvext.connector.worker import host_buffer
from vllm_ascend_kvext.connector.worker.host_buffer import HostBuffer, HostMemoryError
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


def resident_bytes() -> int:
    _, num_pages, *_ = Path("/proc/self/statm").read_text().split()
    return int(num_pages) * mmap.PAGESIZE


def test_more_memory_than_the_machine_has_left_is_refused(
    torch: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(host_buffer, "_available_bytes", lambda: 8192)
    HostBuffer.allocate(8192, CPU)
    with pytest.raises(HostMemoryError, match="8192 bytes are available"):
        HostBuffer.allocate(8192 + 64, CPU)


@pytest.mark.parametrize(
    ("num_bytes", "message"),
    [
        (0, "expected at least 64 bytes"),
        (63, "expected at least 64 bytes"),
        (1 << 60, rf"expected {1 << 60} bytes for this worker"),
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
    kernel = mocker.patch.object(npu_transfers, "AscendKernelBackend").return_value
    if is_wanted:
        monkeypatch.setenv(ASCEND_KERNEL_VARIABLE, "1")
    buffer = HostBuffer.allocate(4096, NPU)
    HostBuffer.allocate(4096, CPU)
    assert pinned == [True]
    once = [mock.call(buffer.tensor)] * is_wanted
    assert kernel.map_host.mock_calls == once
    kernel.unmap_host.assert_not_called()
    buffer.unmap()
    buffer.unmap()
    assert kernel.unmap_host.mock_calls == once


def test_memory_beside_a_gpu_is_pinned_and_never_mapped(
    torch: Any,
    pinned: list[bool],
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    monkeypatch.setattr(torch.version, "hip", None)
    HostBuffer.allocate(4096, GPU)
    assert pinned == [True] and not caplog.records
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
