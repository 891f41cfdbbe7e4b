# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vllm-ascend-kvext project
"""The batched DMA backends: what they hand to the operators of vLLM-Ascend and of vLLM.

The device is a mock. The same tests serve an NPU and a GPU.
"""

from __future__ import annotations

import contextlib
import ctypes
import weakref
from collections.abc import Iterator
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any
from unittest import mock

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from pytest_mock import MockerFixture
from support.transfer.cases import (
    HOST_TO_PAGES,
    TransferCase,
    TransferMemory,
    assert_same,
    cases,
    uniform_case,
)

from vllm_ascend_kvext.transfer.accelerator import dma
from vllm_ascend_kvext.transfer.accelerator.dma import IN_FLIGHT, BatchedDmaBackend
from vllm_ascend_kvext.transfer.ascend.dma import AscendDmaBackend
from vllm_ascend_kvext.transfer.backend import Transfer
from vllm_ascend_kvext.transfer.cuda_transfers import CudaDmaBackend, CudaTransfers
from vllm_ascend_kvext.transfer.errors import BackendError, DescriptorError
from vllm_ascend_kvext.transfer.page_transfer import choose_backend

CASE = uniform_case(row_bytes=512, rows_per_page=4, pages=(3, 1, 2), num_planes=2)
OPERATORS = {"npu": "_C_ascend", "cuda": "_C_cache_ops"}
BACKENDS: dict[str, type[BatchedDmaBackend]] = {"npu": AscendDmaBackend, "cuda": CudaDmaBackend}


def on(device_type: str, index: int) -> SimpleNamespace:
    return SimpleNamespace(device=SimpleNamespace(type=device_type, index=index))


def host(*, is_pinned: bool = True) -> SimpleNamespace:
    device = SimpleNamespace(type="cpu", index=None)
    return SimpleNamespace(device=device, is_pinned=lambda: is_pinned)


@dataclass
class Device:
    """A device whose events are all the same, and the requests to its operator.

    ``batches`` has the arrays of each request, as references that do not keep them alive, and the
    last argument. ``parts`` has the part of the arrays that the request was for.
    """

    device_type: str
    module: mock.MagicMock
    batches: list[tuple[list[weakref.ref[Any]], object]] = field(default_factory=list)
    parts: list[slice] = field(default_factory=list)

    @property
    def backend(self) -> BatchedDmaBackend:
        return BACKENDS[self.device_type]()

    def swap_blocks_batch(self, *arrays_and_last: object) -> None:
        *arrays, last = arrays_and_last
        found = []
        for array in arrays:
            assert array.dtype == torch.int64 and array.dim() == 1 and array.is_contiguous()
            # A part of an array lives as long as the array that has its memory.
            found.append(weakref.ref(array if array._base is None else array._base))
        parts = [(array.storage_offset(), len(array)) for array in arrays]
        assert len(set(parts)) == 1
        self.batches.append((found, last))
        self.parts.append(slice(parts[0][0], sum(parts[0])))

    def run(self) -> None:
        """Run the enqueued work, as the device does some time later."""
        for (found, _), part in zip(self.batches, self.parts, strict=True):
            arrays = [array() for array in found]
            assert None not in arrays, "an array was freed before the device had read it"
            for source, destination, size in zip(*(a[part].tolist() for a in arrays), strict=True):
                assert size > 0
                ctypes.memmove(destination, source, size)

    def transfer(self, case: TransferCase, memory: TransferMemory) -> Transfer:
        pool = on(self.device_type, 0)
        return memory.transfer(case, [pool for _ in case.pool_bytes], host())


@pytest.fixture(params=OPERATORS)
def device(
    request: pytest.FixtureRequest, mocker: MockerFixture, monkeypatch: pytest.MonkeyPatch
) -> Iterator[Device]:
    module = mocker.patch.object(torch, request.param, create=True)
    module.Event.return_value.query.return_value = False
    module.current_stream.return_value.cuda_stream = 7
    found = Device(request.param, module)
    monkeypatch.setattr(torch.ops, OPERATORS[request.param], found)
    yield found
    module.Event.return_value.query.return_value = True
    IN_FLIGHT.release_finished()
    assert len(IN_FLIGHT._held) == 0


@pytest.fixture
def gpu(mocker: MockerFixture, monkeypatch: pytest.MonkeyPatch) -> Device:
    module = mocker.patch.object(torch, "cuda")
    module.current_stream.return_value.cuda_stream = 7
    module.Event.return_value.query.return_value = True
    found = Device("cuda", module)
    monkeypatch.setattr(torch.ops, "_C_cache_ops", found)
    return found


@given(case=cases())
@settings(max_examples=60, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_every_byte_arrives_and_no_other_changes(device: Device, case: TransferCase) -> None:
    device.batches.clear()
    device.parts.clear()
    memory = TransferMemory.random(case)
    expected = memory.after(case)
    device.backend.run(device.transfer(case, memory))
    device.run()
    assert_same(memory.snapshot(), expected)
    is_store = case.direction != HOST_TO_PAGES
    last = {"npu": int(is_store), "cuda": False}[device.device_type]
    assert [found for _, found in device.batches] == [last]


def test_it_goes_to_the_current_stream_of_the_pools_device(device: Device) -> None:
    other = on(device.device_type, 1)
    transfer = device.transfer(CASE, TransferMemory.random(CASE))
    device.backend.run(transfer._replace(pool_tensors=(other, other)))
    device.module.device.assert_called_once_with(other.device)
    event = device.module.Event.return_value
    event.record.assert_called_once_with(device.module.current_stream())
    # Pointer arrays live until that stream has passed.
    assert len(device.batches) == len(IN_FLIGHT._held) == 1
    event.query.return_value = True
    IN_FLIGHT.release_finished()
    assert len(IN_FLIGHT._held) == 0


def test_what_is_wrong_or_nothing_is_not_enqueued(device: Device) -> None:
    transfer = device.transfer(CASE, TransferMemory.random(CASE))
    device.backend.run(transfer._replace(runs=transfer.runs[:0]))
    runs = transfer.runs.copy()
    runs[1, 1] = 4
    with pytest.raises(DescriptorError, match=r"runs\[1\]"):
        device.backend.run(transfer._replace(runs=runs))
    assert device.batches == [] and len(IN_FLIGHT._held) == 0


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"host_tensor": host(is_pinned=False)}, "pin_memory=True"),
        ({"host_tensor": on("meta", 0)}, "found one on meta"),
        ({"pool_tensors": (on("npu", 0), on("cuda", 1))}, "cuda:1, npu:0"),
        ({"pool_tensors": (on("npu", 0), on("npu", 1))}, "npu:0, npu:1"),
        ({"pool_tensors": (on("cuda", 0), on("cuda", 1))}, "cuda:0, cuda:1"),
        ({"pool_tensors": (host(),)}, "cpu:None"),
        ({"pool_tensors": ()}, "none"),
    ],
)
def test_tensors_that_the_engines_cannot_reach_are_refused(
    device: Device, changes: dict[str, object], message: str
) -> None:
    transfer = device.transfer(CASE, TransferMemory.random(CASE))
    with pytest.raises(BackendError, match=message):
        device.backend.run(transfer._replace(**changes))
    assert not device.batches


def test_failure_of_the_operator_names_it_and_keeps_the_arrays(
    device: Device, monkeypatch: pytest.MonkeyPatch
) -> None:
    fail = mock.Mock(side_effect=RuntimeError("failed at index 7"))
    monkeypatch.setattr(device, "swap_blocks_batch", fail)
    with pytest.raises(BackendError, match=r"swap_blocks_batch failed.*index 7"):
        device.backend.run(device.transfer(CASE, TransferMemory.random(CASE)))
    assert len(IN_FLIGHT._held) == 1


def test_a_missing_operator_says_what_to_import(
    device: Device, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.ops, OPERATORS[device.device_type], object())
    needed = {"npu": "vllm_ascend_C", "cuda": "wheel for CUDA"}[device.device_type]
    with pytest.raises(BackendError, match=needed):
        device.backend.run(device.transfer(CASE, TransferMemory.random(CASE)))


def test_without_torchs_module_it_says_what_to_import(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delattr(torch, "npu", raising=False)
    monkeypatch.setattr(torch.ops, "_C_ascend", mock.Mock())
    transfer = TransferMemory.random(CASE).transfer(CASE, [on("npu", 0)], host())
    with pytest.raises(BackendError, match=r"torch\.npu: expected it.*Import torch_npu first"):
        AscendDmaBackend().run(transfer)


def test_one_call_gets_at_most_so_many_copies(
    device: Device, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(dma, "MAX_COPIES_PER_CALL", 3)
    memory = TransferMemory.random(CASE)
    expected = memory.after(CASE)
    device.backend.run(device.transfer(CASE, memory))
    assert [part.stop - part.start for part in device.parts] == [3, 1]
    device.run()
    assert_same(memory.snapshot(), expected)


def test_no_call_has_more_copies_than_an_npu_takes(device: Device) -> None:
    """A driver of a GPU crashes with some 50,000 copies; docs/gpu.md names our limit."""
    many = uniform_case(row_bytes=8, rows_per_page=1, pages=range(1, 20_001, 2))
    device.backend.run(device.transfer(many, TransferMemory.random(many)))
    sizes = [part.stop - part.start for part in device.parts]
    assert sum(sizes) == 10_000 and max(sizes) <= 4096


@pytest.mark.parametrize("fails", [False, True])
def test_on_the_default_stream_of_a_gpu_copies_run_on_another_in_order(
    gpu: Device, monkeypatch: pytest.MonkeyPatch, fails: bool
) -> None:
    """``cuMemcpyBatchAsync`` refuses the legacy default stream."""
    calls = mock.Mock()
    error = RuntimeError("index 0") if fails else None
    calls.copy.side_effect = error
    monkeypatch.setattr(gpu, "swap_blocks_batch", calls.copy)
    current, beside = gpu.module.current_stream.return_value, gpu.module.Stream.return_value
    current.cuda_stream = 0
    calls.attach_mock(beside.wait_stream, "beside_waits")
    calls.attach_mock(current.wait_stream, "current_waits")
    entered = contextlib.ExitStack()
    entered.callback(calls.left)
    gpu.module.stream.return_value = entered
    with pytest.raises(BackendError) if fails else contextlib.nullcontext():
        CudaDmaBackend().run(gpu.transfer(CASE, TransferMemory.random(CASE)))
    gpu.module.stream.assert_called_once_with(beside)
    assert calls.mock_calls == [
        mock.call.beside_waits(current),
        mock.call.copy(mock.ANY, mock.ANY, mock.ANY, False),
        mock.call.left(),
        mock.call.current_waits(beside),
    ]


def test_a_gpu_has_the_dma_engines_also_where_a_kernel_is_asked_for(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(torch.version, "hip", None)
    transfer = TransferMemory.random(CASE).transfer(CASE, [], host())
    assert isinstance(choose_backend(transfer, ("cuda",), uses_kernel=True), CudaDmaBackend)
    with pytest.raises(BackendError, match="cuda: expected a device with a kernel"):
        CudaTransfers().map_host(torch.empty(64, dtype=torch.uint8))


def test_rocm_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.version, "hip", "7.2")
    with pytest.raises(BackendError, match=r"NVIDIA GPU, found ROCm 7\.2"):
        CudaTransfers()
