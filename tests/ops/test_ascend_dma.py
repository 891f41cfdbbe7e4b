# SPDX-License-Identifier: Apache-2.0
"""The Ascend DMA backend: what it hands to vLLM-Ascend's batched copy. The NPU is a mock."""

from __future__ import annotations

import ctypes
import weakref
from collections.abc import Iterator
from types import SimpleNamespace
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

from vllm_ascend_kvext.transfer.ascend.dma import IN_FLIGHT, AscendDmaBackend
from vllm_ascend_kvext.transfer.backend import Transfer
from vllm_ascend_kvext.transfer.errors import BackendError, DescriptorError

CASE = uniform_case(row_bytes=512, rows_per_page=4, pages=(3, 1, 2), num_planes=2)
NPU, OTHER_NPU = (SimpleNamespace(device=SimpleNamespace(type="npu", index=i)) for i in (0, 1))


def host(*, is_pinned: bool = True) -> SimpleNamespace:
    device = SimpleNamespace(type="cpu", index=None)
    return SimpleNamespace(device=device, is_pinned=lambda: is_pinned)


class Copies:
    """The requests to the operator: lifetimes of the arrays, and direction, of each batch."""

    def __init__(self) -> None:
        self.batches: list[tuple[list[weakref.ref[torch.Tensor]], int]] = []

    def swap_blocks_batch(self, *arrays_and_direction: object) -> None:
        *arrays, direction = arrays_and_direction
        self.batches.append((list(map(weakref.ref, arrays)), direction))

    def run(self) -> None:
        """Run the enqueued work, as the device does some time later."""
        for found, _ in self.batches:
            arrays = [array() for array in found]
            assert None not in arrays, "an array was freed before the device had read it"
            for array in arrays:
                assert array.dtype == torch.int64 and array.dim() == 1 and array.is_contiguous()
            for source, destination, size in zip(*(a.tolist() for a in arrays), strict=True):
                assert size > 0
                ctypes.memmove(destination, source, size)


@pytest.fixture
def npu(mocker: MockerFixture) -> Iterator[mock.MagicMock]:
    """A `torch.npu` whose events are all the same."""
    npu = mocker.patch.object(torch, "npu", create=True)
    npu.Event.return_value.query.return_value = False
    yield npu
    npu.Event.return_value.query.return_value = True
    IN_FLIGHT.release_finished()
    assert len(IN_FLIGHT._held) == 0


@pytest.fixture
def copies(npu: mock.MagicMock, monkeypatch: pytest.MonkeyPatch) -> Copies:
    copies = Copies()
    monkeypatch.setattr(torch.ops, "_C_ascend", copies)
    return copies


def transfer_of(case: TransferCase, memory: TransferMemory) -> Transfer:
    return memory.transfer(case, [NPU for _ in case.pool_bytes], host())


@given(case=cases())
@settings(max_examples=60, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_every_byte_arrives_and_no_other_changes(copies: Copies, case: TransferCase) -> None:
    copies.batches.clear()
    memory = TransferMemory.random(case)
    expected = memory.after(case)
    AscendDmaBackend().run(transfer_of(case, memory))
    copies.run()
    assert_same(memory.snapshot(), expected)
    assert [direction for _, direction in copies.batches] == [int(case.direction != HOST_TO_PAGES)]


def test_goes_to_the_current_stream_of_the_pools_device(
    npu: mock.MagicMock, copies: Copies
) -> None:
    transfer = transfer_of(CASE, TransferMemory.random(CASE))
    AscendDmaBackend().run(transfer._replace(pool_tensors=(OTHER_NPU, OTHER_NPU)))
    npu.device.assert_called_once_with(OTHER_NPU.device)
    npu.Event.return_value.record.assert_called_once_with(npu.current_stream())
    # Pointer arrays live until that stream has passed.
    assert len(copies.batches) == len(IN_FLIGHT._held) == 1
    npu.Event.return_value.query.return_value = True
    IN_FLIGHT.release_finished()
    assert len(IN_FLIGHT._held) == 0


def test_what_is_wrong_or_nothing_is_not_enqueued(copies: Copies) -> None:
    transfer = transfer_of(CASE, TransferMemory.random(CASE))
    AscendDmaBackend().run(transfer._replace(runs=transfer.runs[:0]))
    runs = transfer.runs.copy()
    runs[1, 1] = 4
    with pytest.raises(DescriptorError, match=r"runs\[1\]"):
        AscendDmaBackend().run(transfer._replace(runs=runs))
    assert copies.batches == [] and len(IN_FLIGHT._held) == 0


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"host_tensor": host(is_pinned=False)}, "pin_memory=True"),
        ({"host_tensor": NPU}, "found one on npu"),
        ({"pool_tensors": (NPU, OTHER_NPU)}, "npu:0, npu:1"),
        ({"pool_tensors": (NPU, host())}, "cpu:None, npu:0"),
        ({"pool_tensors": ()}, "none"),
    ],
)
def test_tensors_that_the_engines_cannot_reach_are_refused(
    copies: Copies, changes: dict[str, object], message: str
) -> None:
    with pytest.raises(BackendError, match=message):
        AscendDmaBackend().run(transfer_of(CASE, TransferMemory.random(CASE))._replace(**changes))
    assert not copies.batches


def test_failure_of_the_operator_names_it_and_keeps_the_arrays(
    copies: Copies, monkeypatch: pytest.MonkeyPatch
) -> None:
    fail = mock.Mock(side_effect=RuntimeError("aclrtMemcpyBatchAsync failed at index 7"))
    monkeypatch.setattr(copies, "swap_blocks_batch", fail)
    with pytest.raises(BackendError, match=r"swap_blocks_batch failed.*index 7"):
        AscendDmaBackend().run(transfer_of(CASE, TransferMemory.random(CASE)))
    assert len(IN_FLIGHT._held) == 1


def test_missing_operator_says_what_to_import(
    npu: mock.MagicMock, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.ops, "_C_ascend", object())
    with pytest.raises(BackendError, match="vllm_ascend_C"):
        AscendDmaBackend().run(transfer_of(CASE, TransferMemory.random(CASE)))
