# SPDX-License-Identifier: Apache-2.0
"""The Ascend DMA backend, on a fake of vLLM-Ascend's batched copy."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from support.transfer.cases import (
    HOST_TO_PAGES,
    PAGES_TO_HOST,
    TransferCase,
    TransferMemory,
    assert_same,
    cases,
    uniform_case,
)
from support.transfer.fake_npu import (
    DEVICE_TO_HOST,
    HOST_TO_DEVICE,
    FakeNpu,
    Stream,
    device_tensor,
    host_tensor,
    installed_npu,
)

from vllm_ascend_kvext.transfer.ascend.dma import IN_FLIGHT, AscendDmaBackend
from vllm_ascend_kvext.transfer.backend import Transfer
from vllm_ascend_kvext.transfer.errors import BackendError, DescriptorError
from vllm_ascend_kvext.transfer.explode import explode

CASE = uniform_case(row_bytes=512, rows_per_page=4, pages=(3, 1, 2), num_planes=2)


@pytest.fixture
def npu() -> Iterator[FakeNpu]:
    with installed_npu() as fake:
        yield fake
        for index in (0, 1):
            fake.stream_of(index).synchronize()
        IN_FLIGHT.release_finished()
        assert len(IN_FLIGHT) == 0


def transfer_of(case: TransferCase, memory: TransferMemory, npu: FakeNpu) -> Transfer:
    npu.host = (memory.host.address, case.host_bytes)
    pools = [device_tensor() for _ in case.pool_bytes]
    return memory.transfer(case, pools, host_tensor())


@given(case=cases())
@settings(
    deadline=None, max_examples=60, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
def test_every_byte_arrives_and_no_other_changes(npu: FakeNpu, case: TransferCase) -> None:
    memory = TransferMemory.random(case)
    before, expected = memory.snapshot(), memory.after(case)
    AscendDmaBackend().run(transfer_of(case, memory, npu))
    assert_same(memory.snapshot(), before)
    npu.current_stream().synchronize()
    assert_same(memory.snapshot(), expected)


@given(case=cases())
@settings(
    deadline=None, max_examples=20, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
def test_one_call_per_plane_does_the_same(npu: FakeNpu, case: TransferCase) -> None:
    memory = TransferMemory.random(case)
    expected = memory.after(case)
    for part in explode(transfer_of(case, memory, npu)):
        AscendDmaBackend().run(part)
    npu.current_stream().synchronize()
    assert_same(memory.snapshot(), expected)


@pytest.mark.parametrize(
    ("direction", "code"), [(PAGES_TO_HOST, DEVICE_TO_HOST), (HOST_TO_PAGES, HOST_TO_DEVICE)]
)
def test_direction_is_upstreams_code(npu: FakeNpu, direction: int, code: int) -> None:
    case = replace(CASE, direction=direction)
    AscendDmaBackend().run(transfer_of(case, TransferMemory.random(case), npu))
    assert npu.directions == [code]


def test_goes_to_the_current_stream_of_the_pools_device(npu: FakeNpu) -> None:
    transfer = transfer_of(CASE, TransferMemory.random(CASE), npu)
    on_other_device = transfer._replace(pool_tensors=(device_tensor(1), device_tensor(1)))
    stream = Stream()
    with npu.device(device_tensor(1).device), npu.stream(stream):
        with npu.device(device_tensor(0).device):
            AscendDmaBackend().run(on_other_device)
        assert stream.pending and not npu.stream_of(0).pending
    stream.synchronize()


def test_pointer_arrays_live_until_the_stream_has_passed(npu: FakeNpu) -> None:
    memory = TransferMemory.random(CASE)
    backend = AscendDmaBackend()
    backend.run(transfer_of(CASE, memory, npu))
    del backend
    AscendDmaBackend().run(transfer_of(CASE, memory, npu))
    assert len(IN_FLIGHT) == 2
    npu.current_stream().synchronize()  # the fake looks whether its arrays are still there
    IN_FLIGHT.release_finished()
    assert len(IN_FLIGHT) == 0


def test_nothing_to_move_enqueues_nothing(npu: FakeNpu) -> None:
    transfer = transfer_of(CASE, TransferMemory.random(CASE), npu)
    AscendDmaBackend().run(transfer._replace(runs=transfer.runs[:0]))
    assert npu.directions == [] and len(IN_FLIGHT) == 0


def test_bad_descriptor_enqueues_nothing(npu: FakeNpu) -> None:
    transfer = transfer_of(CASE, TransferMemory.random(CASE), npu)
    runs = transfer.runs.copy()
    runs[1, 1] = 4
    with pytest.raises(DescriptorError, match=r"runs\[1\]"):
        AscendDmaBackend().run(transfer._replace(runs=runs))
    assert npu.directions == [] and len(IN_FLIGHT) == 0


def test_refuses_host_memory_that_is_not_pinned(npu: FakeNpu) -> None:
    transfer = transfer_of(CASE, TransferMemory.random(CASE), npu)
    with pytest.raises(BackendError, match="pin_memory=True"):
        AscendDmaBackend().run(transfer._replace(host_tensor=host_tensor(is_pinned=False)))


@pytest.mark.parametrize(
    ("pools", "found"),
    [
        ((device_tensor(0), device_tensor(1)), "npu:0, npu:1"),
        ((device_tensor(0), host_tensor()), "cpu:None, npu:0"),
        ((), "none"),
    ],
)
def test_refuses_pools_that_are_not_on_one_npu(
    npu: FakeNpu, pools: tuple[torch.Tensor, ...], found: str
) -> None:
    transfer = transfer_of(CASE, TransferMemory.random(CASE), npu)
    with pytest.raises(BackendError, match=found):
        AscendDmaBackend().run(transfer._replace(pool_tensors=pools))


def test_failure_of_the_operator_names_it_and_keeps_the_arrays(
    npu: FakeNpu, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*_: object) -> None:
        raise RuntimeError("aclrtMemcpyBatchAsync failed at index 7 with error code 507899")

    monkeypatch.setattr(torch.ops._C_ascend, "swap_blocks_batch", fail)
    with pytest.raises(BackendError, match=r"swap_blocks_batch failed.*index 7"):
        AscendDmaBackend().run(transfer_of(CASE, TransferMemory.random(CASE), npu))
    assert len(IN_FLIGHT) == 1


def test_missing_operator_says_what_to_import(
    npu: FakeNpu, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.ops, "_C_ascend", object())
    with pytest.raises(BackendError, match="vllm_ascend_C"):
        AscendDmaBackend().run(transfer_of(CASE, TransferMemory.random(CASE), npu))
