# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vllm-ascend-kvext project
"""The AscendC kernel and its backend, on a host: see `support.transfer.ascend_shim`."""

from __future__ import annotations

import math
import mmap
import weakref
from collections.abc import Iterator
from dataclasses import replace
from types import SimpleNamespace
from unittest import mock

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from support.transfer.ascend_shim import Shim, compile_shim
from support.transfer.cases import (
    HOST_TO_PAGES,
    PAGES_TO_HOST,
    TransferCase,
    TransferMemory,
    assert_same,
    cases,
    uniform_case,
)

from vllm_ascend_kvext.transfer.ascend.kernel import AscendKernelBackend
from vllm_ascend_kvext.transfer.backend import Transfer
from vllm_ascend_kvext.transfer.errors import BackendError, DescriptorError
from vllm_ascend_kvext.transfer.placement import CALLING_THREAD
from vllm_ascend_kvext.transfer.schema import Direction

CASE = uniform_case(row_bytes=512, rows_per_page=4, pages=(3, 1, 2), num_planes=2)
ON_DEVICE = SimpleNamespace(device=SimpleNamespace(type="npu", index=0))
IN_HOST = SimpleNamespace(device=SimpleNamespace(type="cpu", index=None))
DIRECTIONS = pytest.mark.parametrize("direction", [PAGES_TO_HOST, HOST_TO_PAGES])


@pytest.fixture(scope="module")
def shim(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Shim]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(torch, "npu", npu := mock.MagicMock(), raising=False)
        npu.current_stream().npu_stream = 1
        yield Shim.load(compile_shim(tmp_path_factory.mktemp("shim")))


@pytest.fixture(autouse=True)
def forget_launches(shim: Shim) -> None:
    shim.launches.clear()


def transfer_of(case: TransferCase, memory: TransferMemory) -> Transfer:
    pools = [ON_DEVICE for _ in case.pool_bytes]
    return memory.transfer(case, pools, ON_DEVICE)


def run(shim: Shim, case: TransferCase, *, num_cores: int = 4) -> None:
    """Runs a case on memory of its own, and checks every byte, guards included."""
    memory = TransferMemory.random(case)
    expected = memory.after(case)
    transfer = transfer_of(case, memory)
    shim.num_cores = num_cores
    shim.prepare(transfer, is_mapped=False)
    shim.backend().run(transfer)
    assert_same(memory.snapshot(), expected)


RUNS_LONGER_THAN_A_TILE = cases(row_bytes=(1, 40_000, 70_000), max_page_bytes=300_000, max_pages=3)


@given(case=cases() | RUNS_LONGER_THAN_A_TILE, num_cores=st.integers(1, 48))
@settings(max_examples=170, suppress_health_check=[HealthCheck.data_too_large])
def test_every_byte_arrives_and_no_other_changes(
    shim: Shim, case: TransferCase, num_cores: int
) -> None:
    run(shim, case, num_cores=num_cores)


@DIRECTIONS
def test_reaches_the_host_by_the_devices_address(shim: Shim, direction: int) -> None:
    """The buffer is a part of the mapped memory."""
    case = replace(CASE, direction=direction)
    memory = TransferMemory.random(case)
    expected = memory.after(case)
    transfer = transfer_of(case, memory)._replace(host_tensor=IN_HOST)
    shim.prepare(transfer, is_mapped=True)
    backend = shim.backend()
    arena = memory.host.whole
    arena_tensor = torch.from_numpy(arena)
    assert not backend.can_reach(transfer)
    backend.map_host(arena_tensor)
    assert backend.can_reach(transfer)
    backend.run(transfer)
    assert_same(memory.snapshot(), expected)
    backend.unmap_host(arena_tensor)
    assert not backend.can_reach(transfer)


def test_mapped_memory_stays_allocated_until_it_is_unmapped(shim: Shim) -> None:
    """Otherwise another buffer at the same address would be taken for mapped."""
    backend = shim.backend()
    memory = np.zeros(4096, np.uint8)
    allocated = weakref.ref(memory)
    backend.map_host(torch.from_numpy(memory))
    del memory
    assert allocated() is not None
    backend.unmap_host(torch.from_numpy(allocated()))
    assert allocated() is None


@pytest.mark.parametrize("part", [slice(None), slice(0, 100), slice(4000, 5000)])
def test_refuses_to_map_memory_twice(shim: Shim, part: slice) -> None:
    backend = shim.backend()
    memory = torch.zeros(8192, dtype=torch.uint8)
    mapped = memory[:4096]
    backend.map_host(mapped)
    with pytest.raises(BackendError, match=r"map_host: .*4096 bytes at 0x[0-9a-f]+ mapped"):
        backend.map_host(memory[part])
    backend.map_host(memory[4096:])
    backend.unmap_host(memory[4096:])
    backend.unmap_host(mapped)


def test_refuses_host_memory_that_is_not_mapped(shim: Shim) -> None:
    memory = TransferMemory.random(CASE)
    before = memory.snapshot()
    transfer = transfer_of(CASE, memory)._replace(host_tensor=IN_HOST)
    with pytest.raises(BackendError, match="map_host"):
        shim.backend().run(transfer)
    with pytest.raises(BackendError, match="unmap_host"):
        shim.backend().unmap_host(torch.from_numpy(memory.host.region))
    assert_same(memory.snapshot(), before)


def test_bad_descriptor_launches_nothing(shim: Shim) -> None:
    transfer = transfer_of(CASE, TransferMemory.random(CASE))
    runs = transfer.runs.copy()
    runs[2, 3] = 5
    with pytest.raises(DescriptorError, match=r"runs\[2\]"):
        shim.backend().run(transfer._replace(runs=runs))
    shim.backend().run(transfer._replace(runs=runs[:0]))
    assert shim.launches == []


def test_failing_launch_names_the_function_and_the_code(
    shim: Shim, monkeypatch: pytest.MonkeyPatch
) -> None:
    transfer = transfer_of(CASE, TransferMemory.random(CASE))
    shim.prepare(transfer, is_mapped=False)
    backend = shim.backend()
    monkeypatch.setattr(shim.library, "kvext_ascend_page_transfer", lambda *_: 507899)
    with pytest.raises(BackendError, match=r"kvext_ascend_page_transfer.*507899"):
        backend.run(transfer)


def test_without_the_library_the_error_says_how_to_build_it() -> None:
    with pytest.raises(BackendError, match=r"libkvext_ascend\.so.*-DKVEXT_ASCEND=ON"):
        AscendKernelBackend()


def test_takes_no_more_cores_than_there_are_units(shim: Shim) -> None:
    run(shim, uniform_case(row_bytes=2, rows_per_page=1, pages=(1, 2, 3)), num_cores=48)
    ((cores, units),) = shim.launches
    assert cores == units == 3


def test_small_runs_share_units_but_leave_no_core_idle(shim: Shim) -> None:
    case = uniform_case(row_bytes=2, rows_per_page=1, pages=range(1, 1001))
    run(shim, case, num_cores=40)
    run(shim, case, num_cores=1)
    # These have 25 runs each, and as many as a unit may have.
    assert shim.launches == [(40, 40), (1, math.ceil(1000 / 32))]


@DIRECTIONS
@pytest.mark.parametrize("is_far", ["page", "host"])
def test_pages_and_host_rows_beyond_32_bits(shim: Shim, direction: int, is_far: str) -> None:
    """The pool, or the host buffer, is larger than 4 GiB. Only the touched part of it exists."""
    rows = np.random.default_rng(1).integers(0, 256, 2048, dtype=np.uint8)  # four of 512 bytes
    far, near = np.frombuffer(mmap.mmap(-1, 5 << 30), np.uint8), np.zeros(2 * 2048, np.uint8)
    pool, host = (far, near) if is_far == "page" else (near, far)
    stride, page, first = (1 << 30, 4, 0) if is_far == "page" else (2048, 1, 4 << 30)
    in_page, in_host = pool[page * stride :][:2048], host[first:][:2048]
    (in_page if direction == PAGES_TO_HOST else in_host)[:] = rows
    transfer = Transfer(
        pools=np.array([(pool.ctypes.data, pool.size)], np.int64),
        planes=np.array([(0, 0, 0, stride, 0, 512, 4, page + 1, 0)], np.int64),
        runs=np.array([(0, page, 0, 4, first // 512)], np.int64),
        host_address=host.ctypes.data,
        host_bytes=host.size,
        direction=Direction(direction),
        placement=CALLING_THREAD,
        pool_tensors=(ON_DEVICE,),
        host_tensor=ON_DEVICE,
    )
    shim.prepare(transfer, is_mapped=False)
    shim.backend().run(transfer)
    assert (in_page == rows).all() and (in_host == rows).all()
