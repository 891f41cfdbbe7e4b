# SPDX-License-Identifier: Apache-2.0
"""The AscendC kernel and its backend, on a host: see `support.transfer.ascend_shim`."""

from __future__ import annotations

import math
import mmap
import os
import subprocess
import sys
import weakref
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from support.transfer.ascend_shim import SANITIZERS, Shim, compile_shim
from support.transfer.cases import (
    HOST_TO_PAGES,
    PAGES_TO_HOST,
    TransferCase,
    TransferMemory,
    assert_same,
    cases,
    uniform_case,
)
from support.transfer.fake_npu import device_tensor, host_tensor, installed_npu

from vllm_ascend_kvext.transfer.ascend.kernel import AscendKernelBackend
from vllm_ascend_kvext.transfer.backend import Transfer
from vllm_ascend_kvext.transfer.errors import BackendError, DescriptorError
from vllm_ascend_kvext.transfer.explode import explode
from vllm_ascend_kvext.transfer.schema import Direction

TESTS = Path(__file__).resolve().parents[1]
CASE = uniform_case(row_bytes=512, rows_per_page=4, pages=(3, 1, 2), num_planes=2)
DIRECTIONS = pytest.mark.parametrize("direction", [PAGES_TO_HOST, HOST_TO_PAGES])


@pytest.fixture(scope="module")
def shim(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Shim]:
    with installed_npu():
        yield Shim.load(compile_shim(tmp_path_factory.mktemp("shim")))


@pytest.fixture(autouse=True)
def forget_launches(shim: Shim) -> None:
    shim.launches.clear()


def transfer_of(case: TransferCase, memory: TransferMemory) -> Transfer:
    pools = [device_tensor() for _ in case.pool_bytes]
    return memory.transfer(case, pools, device_tensor())


def run(
    shim: Shim, case: TransferCase, *, num_cores: int = 4, is_last_core_first: bool = False
) -> None:
    """Runs a case on memory of its own and looks at every byte, guards included."""
    memory = TransferMemory.random(case)
    expected = memory.after(case)
    transfer = transfer_of(case, memory)
    shim.num_cores, shim.is_last_core_first = num_cores, is_last_core_first
    shim.prepare(transfer, is_mapped=False)
    shim.backend().run(transfer)
    assert_same(memory.snapshot(), expected)


@given(case=cases(), num_cores=st.integers(1, 48), is_last_core_first=st.booleans())
@settings(deadline=None, max_examples=150)
def test_every_byte_arrives_and_no_other_changes(
    shim: Shim, case: TransferCase, num_cores: int, is_last_core_first: bool
) -> None:
    run(shim, case, num_cores=num_cores, is_last_core_first=is_last_core_first)


@given(
    case=cases(row_bytes=(1, 40_000, 70_000), max_page_bytes=300_000, max_pages=3),
    num_cores=st.integers(1, 48),
)
@settings(deadline=None, max_examples=25, suppress_health_check=[HealthCheck.data_too_large])
def test_runs_longer_than_a_tile(shim: Shim, case: TransferCase, num_cores: int) -> None:
    run(shim, case, num_cores=num_cores)


@DIRECTIONS
@pytest.mark.parametrize("row_bytes", [1, 2, 16, 31, 32, 33, 512, 70_000])
@pytest.mark.parametrize("misalignment_bytes", [0, 1, 31])
def test_rows_of_any_width_at_any_address(
    shim: Shim, direction: int, row_bytes: int, misalignment_bytes: int
) -> None:
    case = uniform_case(
        row_bytes=row_bytes,
        rows_per_page=3,
        pages=(5, 2, 4, 1),
        num_planes=2,
        padding_bytes=7,
        direction=direction,
        misalignment_bytes=misalignment_bytes,
    )
    for num_cores in (1, 2, 3, 40, 48):
        run(shim, case, num_cores=num_cores)


@DIRECTIONS
@pytest.mark.parametrize("excess_bytes", [-33, -32, -1, 0, 1, 32])
def test_runs_about_as_long_as_tiles(shim: Shim, direction: int, excess_bytes: int) -> None:
    for tiles in (1, 2):
        row_bytes = tiles * shim.backend()._launcher.limits.tile_bytes + excess_bytes
        run(
            shim,
            uniform_case(row_bytes=row_bytes, rows_per_page=1, pages=(2, 1), direction=direction),
        )


@given(case=cases(), num_cores=st.integers(1, 48))
@settings(deadline=None, max_examples=30)
def test_one_launch_per_plane_does_the_same(shim: Shim, case: TransferCase, num_cores: int) -> None:
    memory = TransferMemory.random(case)
    expected = memory.after(case)
    shim.num_cores = num_cores
    for part in explode(transfer_of(case, memory)):
        shim.prepare(part, is_mapped=False)
        shim.backend().run(part)
    assert_same(memory.snapshot(), expected)


@DIRECTIONS
def test_reaches_the_host_by_the_devices_address(shim: Shim, direction: int) -> None:
    """The buffer is a part of what was mapped."""
    case = replace(CASE, direction=direction)
    memory = TransferMemory.random(case)
    expected = memory.after(case)
    transfer = transfer_of(case, memory)._replace(host_tensor=host_tensor())
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
    """Else another buffer at the same address would be taken for mapped."""
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
    transfer = transfer_of(CASE, memory)._replace(host_tensor=host_tensor())
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
    assert not AscendKernelBackend.is_available()
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
    # 25 runs each; and as many as a unit may have.
    assert shim.launches == [(40, 40), (1, math.ceil(1000 / 32))]


def test_short_runs_beside_long_ones(shim: Shim) -> None:
    """Units are cut for the longest run; those of the others that are left empty do nothing."""
    case = uniform_case(row_bytes=30_000, rows_per_page=5, pages=(1, 2, 3), padding_bytes=1)
    runs = case.runs.copy()
    runs[0, 3] = runs[2, 3] = 1
    run(shim, replace(case, runs=runs), num_cores=7)


@DIRECTIONS
def test_pages_beyond_32_bits(shim: Shim, direction: int) -> None:
    """The pool is 5 GiB, of which only what is touched exists."""
    stride = 1 << 30
    pool = np.frombuffer(mmap.mmap(-1, 5 * stride), np.uint8)
    page, host = pool[4 * stride : 4 * stride + 2048], np.zeros(2048, np.uint8)
    (page if direction == PAGES_TO_HOST else host)[:] = ROWS
    run_far(shim, direction, pool, host, stride=stride, page=4, host_row=0)
    assert (page == ROWS).all() and (host == ROWS).all()


@DIRECTIONS
def test_host_rows_beyond_32_bits(shim: Shim, direction: int) -> None:
    first = 4 << 30
    pool, host = np.zeros(2 * 2048, np.uint8), np.frombuffer(mmap.mmap(-1, first + 2048), np.uint8)
    page, rows = pool[2048:], host[first:]
    (page if direction == PAGES_TO_HOST else rows)[:] = ROWS
    run_far(shim, direction, pool, host, stride=2048, page=1, host_row=first // 512)
    assert (page == ROWS).all() and (rows == ROWS).all()


ROWS = np.random.default_rng(1).integers(0, 256, 2048, dtype=np.uint8)
"""Four rows of 512 bytes."""


def run_far(
    shim: Shim,
    direction: int,
    pool: np.ndarray,
    host: np.ndarray,
    *,
    stride: int,
    page: int,
    host_row: int,
) -> None:
    transfer = Transfer(
        pools=np.array([(pool.ctypes.data, pool.size)], np.int64),
        planes=np.array([(0, 0, 0, stride, 0, 512, 4, page + 1, 0)], np.int64),
        runs=np.array([(0, page, 0, 4, host_row)], np.int64),
        host_address=host.ctypes.data,
        host_bytes=host.size,
        direction=Direction(direction),
        placement=None,
        pool_tensors=(device_tensor(),),
        host_tensor=device_tensor(),
    )
    shim.prepare(transfer, is_mapped=False)
    shim.backend().run(transfer)


def test_address_and_undefined_behaviour_sanitizers(tmp_path: Path) -> None:
    library = compile_shim(tmp_path, SANITIZERS, "-fno-sanitize-recover=all")
    preloaded = subprocess.run(
        ["g++", "-print-file-name=libasan.so"], check=True, capture_output=True, text=True
    ).stdout.strip()
    environment = {
        **os.environ,
        "LD_PRELOAD": preloaded,
        "ASAN_OPTIONS": "detect_leaks=0",  # Python's own
        "PYTHONMALLOC": "malloc",
        "PYTHONPATH": str(TESTS),
    }
    command = [sys.executable, "-m", "support.transfer.sanitized_shim", str(library)]
    result = subprocess.run(command, env=environment, capture_output=True, text=True)
    assert result.returncode == 0, result.stderr
    assert int(result.stdout) >= 100
