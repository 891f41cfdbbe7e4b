# SPDX-License-Identifier: Apache-2.0
"""The op on the CPU: exactly the bytes that the oracle moves, and no other."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from support.transfer.cases import (
    HOST_TO_PAGES,
    PAGES_TO_HOST,
    TransferCase,
    TransferMemory,
    assert_same,
    cases,
    cut_into_chunks,
    uniform_case,
)

from vllm_ascend_kvext.native import native
from vllm_ascend_kvext.settings import ASCEND_KERNEL_VARIABLE, BUNDLE_ALIAS, BUNDLE_VARIABLE
from vllm_ascend_kvext.transfer import choice
from vllm_ascend_kvext.transfer import page_transfer as op
from vllm_ascend_kvext.transfer.ascend.dma import AscendDmaBackend
from vllm_ascend_kvext.transfer.backend import Transfer
from vllm_ascend_kvext.transfer.choice import (
    LEAST_MEAN_RUN_BYTES_FOR_DMA,
    choose_backend,
    mean_run_bytes,
)
from vllm_ascend_kvext.transfer.cpu import CpuBackend
from vllm_ascend_kvext.transfer.errors import BackendError, DescriptorError
from vllm_ascend_kvext.transfer.oracle import oracle_transfer
from vllm_ascend_kvext.transfer.page_transfer import page_transfer
from vllm_ascend_kvext.transfer.pools import Pools
from vllm_ascend_kvext.transfer.schema import Direction

SLOW = settings(max_examples=300, deadline=None, suppress_health_check=list(HealthCheck))


@pytest.fixture(autouse=True)
def forget_what_the_environment_said():
    """A process reads it once."""
    for cached in (op._is_bundled_by_default, choice._uses_kernel, choice._warn_once):
        cached.cache_clear()


def tensors(memory: TransferMemory) -> tuple[list[torch.Tensor], torch.Tensor]:
    pools = [torch.from_numpy(pool.region) for pool in memory.pools]
    return pools, torch.from_numpy(memory.host.region)


def run(case: TransferCase, memory: TransferMemory, **options) -> None:
    direction = Direction(case.direction)
    page_transfer(*tensors(memory), case.planes, case.runs, direction, **options)


def oracles_result(case: TransferCase, memory: TransferMemory) -> tuple[np.ndarray, ...]:
    """Every byte as the oracle leaves it; the memory itself is put back."""
    before = memory.snapshot()
    oracle_transfer(*tensors(memory), case.planes, case.runs, Direction(case.direction))
    after = memory.snapshot()
    for region, was in zip((*memory.pools, memory.host), before, strict=True):
        region.whole[:] = was
    return after


@SLOW
@given(cases())
def test_the_oracle_does_what_the_definition_says(case: TransferCase) -> None:
    memory = TransferMemory.random(case)
    expected = memory.after(case)
    oracle_transfer(*tensors(memory), case.planes, case.runs, Direction(case.direction))
    assert_same(memory.snapshot(), expected)


@SLOW
@given(cases(), st.integers(1, 3), st.booleans())
def test_it_does_what_the_oracle_does(case: TransferCase, num_threads, is_bundled) -> None:
    memory = TransferMemory.random(case)
    expected = oracles_result(case, memory)
    run(case, memory, num_threads=num_threads, is_bundled=is_bundled)
    assert_same(memory.snapshot(), expected)


@SLOW
@given(cases(), st.integers(1, 3), st.sampled_from((-1, 0, 1)))
def test_it_writes_nothing_else(case: TransferCase, num_threads: int, streaming: int) -> None:
    memory = TransferMemory.random(case)
    expected = memory.after(case)
    native().page_transfer(*memory.descriptors(case), num_threads, streaming)
    assert_same(memory.snapshot(), expected)


@SLOW
@given(cases(is_one_to_one=True, direction=PAGES_TO_HOST), st.booleans())
def test_what_was_stored_is_loaded(case: TransferCase, is_bundled: bool) -> None:
    memory = TransferMemory.random(case)
    originals = [pool.region.copy() for pool in memory.pools]
    run(case, memory, is_bundled=is_bundled)
    for pool in memory.pools:
        pool.region[:] ^= 0xFF
    expected = memory.after(case.reversed())
    run(case.reversed(), memory, is_bundled=is_bundled)
    assert_same(memory.snapshot(), expected)
    restored = sum(
        int((pool.region == original).sum())
        for pool, original in zip(memory.pools, originals, strict=True)
    )
    of_group = {group: case.runs[case.runs[:, 0] == group, 3].sum() for group in case.planes[:, 0]}
    assert restored == sum(of_group[plane[0]] * plane[5] for plane in case.planes)


# Large enough to be split between threads, row widths that no task's end falls on.
LARGE = [
    uniform_case(
        row_bytes=row_bytes,
        rows_per_page=rows_per_page,
        pages=pages,
        num_planes=num_planes,
        padding_bytes=padding,
        misalignment_bytes=padding % 64,
    )
    for row_bytes, rows_per_page, pages, num_planes, padding in (
        (9000, 7, (5, 1, 9, 2, 3), 8, 100),
        (33, 301, tuple(range(40, 0, -1)), 5, 0),
        (2, 997, tuple(range(1, 200)), 6, 31),
        (70_001, 1, (3, 2, 7, 1), 9, 1),
        (2048, 16, tuple(range(1, 33)), 4, 0),
    )
]


@pytest.mark.parametrize("num_threads", [1, 2, 3])
@pytest.mark.parametrize("direction", [PAGES_TO_HOST, HOST_TO_PAGES])
@pytest.mark.parametrize("streaming", [0, 1])
@pytest.mark.parametrize("case", LARGE, ids=lambda case: f"rows of {case.planes[0, 5]}")
def test_large_transfers_are_split(case, direction, num_threads, streaming) -> None:
    if direction == HOST_TO_PAGES:
        case = case.reversed()
    memory = TransferMemory.random(case)
    expected = oracles_result(case, memory)
    native().page_transfer(*memory.descriptors(case), num_threads, streaming)
    assert_same(memory.snapshot(), expected)


@SLOW
@given(cases())
def test_expansion_is_the_same_copies(case: TransferCase) -> None:
    memory = TransferMemory.random(case)
    sources, destinations, sizes = native().expand(*memory.descriptors(case))
    assert {part.dtype for part in (sources, destinations, sizes)} == {np.dtype(np.int64)}
    rows = {group: case.runs[case.runs[:, 0] == group, 3].sum() for group in case.planes[:, 0]}
    assert sizes.sum() == sum(rows[plane[0]] * plane[5] for plane in case.planes)
    for one, other in itertools.pairwise(zip(sources, destinations, sizes, strict=True)):
        assert (one[0] + one[2], one[1] + one[2]) != other[:2]


def test_adjacent_runs_are_one_copy() -> None:
    case = uniform_case(row_bytes=16, rows_per_page=4, pages=(1, 2, 3, 5, 6, 4), num_planes=2)
    memory = TransferMemory.random(case)
    arguments = (memory.pool_table, memory.host.address, case.host_bytes, case.planes, case.runs)
    *_, sizes = native().expand(*arguments, PAGES_TO_HOST)
    assert sizes.tolist() == [192, 128, 64] * 2
    # Adjacent in the pool only.
    case.runs[1:, 4] += 1
    case.planes[1, 8] += 64
    *_, sizes = native().expand(
        *arguments[:2], case.host_bytes + 128, case.planes, case.runs, PAGES_TO_HOST
    )
    assert sizes.tolist() == [64, 128, 128, 64] * 2


class Recorder:
    """A backend that only takes notes."""

    name = "recorder"

    def __init__(self) -> None:
        self.transfers: list[Transfer] = []

    def run(self, transfer: Transfer) -> None:
        self.transfers.append(transfer)


THREE_PLANES = uniform_case(row_bytes=8, rows_per_page=4, pages=(3, 1), num_planes=3)


@pytest.mark.parametrize(
    ("environ", "num_calls"),
    [
        ({}, 1),
        ({BUNDLE_VARIABLE: "1"}, 1),
        ({BUNDLE_VARIABLE: "0"}, 3),
        ({BUNDLE_ALIAS: "0"}, 3),
        ({BUNDLE_ALIAS: "False"}, 3),
        ({BUNDLE_ALIAS: "true"}, 1),
        ({BUNDLE_VARIABLE: "1", BUNDLE_ALIAS: "0"}, 1),
        ({BUNDLE_VARIABLE: "0", BUNDLE_ALIAS: "1"}, 3),
    ],
)
def test_the_variable_decides_on_bundling(monkeypatch, environ, num_calls) -> None:
    for name in (BUNDLE_VARIABLE, BUNDLE_ALIAS):
        monkeypatch.delenv(name, raising=False)
    for name, value in environ.items():
        monkeypatch.setenv(name, value)
    recorder = Recorder()
    run(THREE_PLANES, TransferMemory.random(THREE_PLANES), backend=recorder)
    assert [len(transfer.planes) for transfer in recorder.transfers] == [3 // num_calls] * num_calls


def test_exploded_leaves_out_planes_without_runs() -> None:
    case = uniform_case(row_bytes=8, rows_per_page=4, pages=(3, 1), num_planes=3)
    case.planes[1, 0] = 5
    recorder = Recorder()
    run(case, TransferMemory.random(case), backend=recorder, is_bundled=False)
    assert [transfer.planes[0, 8] for transfer in recorder.transfers] == [0, 128]


def test_exploded_is_validated_as_a_whole() -> None:
    """Planes that overlap each other cannot be seen one by one."""
    case = uniform_case(row_bytes=8, rows_per_page=4, pages=(3, 1), num_planes=3)
    case.planes[2, 8] = case.planes[1, 8]
    memory = TransferMemory.random(case)
    before = memory.snapshot()
    with pytest.raises(DescriptorError, match=r"planes\[\d\]\.host_offset_bytes"):
        run(case, memory, is_bundled=False)
    assert_same(memory.snapshot(), before)


@pytest.mark.parametrize(
    ("wrong", "found"),
    [
        (torch.zeros(64, dtype=torch.int8), r"found int8, shape \[64\]"),
        (torch.zeros(8, 8, dtype=torch.uint8), r"found uint8, shape \[8, 8\]"),
        (torch.zeros(64, dtype=torch.uint8)[::2], r"shape \[32\], not contiguous"),
    ],
)
def test_tensors_are_bytes(wrong: torch.Tensor, found: str) -> None:
    case = THREE_PLANES
    pools, host = tensors(TransferMemory.random(case))
    arguments = (case.planes, case.runs, Direction.PAGES_TO_HOST)
    with pytest.raises(DescriptorError, match=rf"host: expected uint8, .*{found}"):
        page_transfer(pools, wrong, *arguments)
    with pytest.raises(DescriptorError, match=rf"pools\[1\]: expected uint8, .*{found}"):
        page_transfer([pools[0], wrong], host, *arguments)


def transfer_of(case: TransferCase, pools: list[torch.Tensor]) -> Transfer:
    memory = TransferMemory.random(case)
    return memory.transfer(case, pools, torch.from_numpy(memory.host.region))


def test_the_mean_counts_every_plane_of_every_run() -> None:
    case = uniform_case(row_bytes=8, rows_per_page=4, pages=(3, 1), num_planes=2)
    case.planes[1, 5] = 2
    case.runs[0, 3] = 1
    assert mean_run_bytes(transfer_of(case, [])) == (5 * 8 + 5 * 2) / 4
    nothing = transfer_of(case, [])._replace(runs=case.runs[:0])
    assert mean_run_bytes(nothing) == 0.0


def test_pools_on_the_cpu_take_the_cpu() -> None:
    assert isinstance(choose_backend(transfer_of(THREE_PLANES, []), ("cpu",)), CpuBackend)


SMALL_ROW_BYTES = LEAST_MEAN_RUN_BYTES_FOR_DMA // 4 - 1


class FakeKernel:
    """Stands for the kernel's backend on a machine that has one."""

    is_built = True
    is_host_mapped = True

    def __init__(self) -> None:
        if not self.is_built:
            raise BackendError("libkvext_ascend.so: expected it, found none. Build it.")

    def can_reach(self, _: Transfer) -> bool:
        return self.is_host_mapped


@pytest.fixture
def kernel(monkeypatch) -> type[FakeKernel]:
    class Kernel(FakeKernel):
        pass

    monkeypatch.setattr("vllm_ascend_kvext.transfer.ascend.kernel.AscendKernelBackend", Kernel)
    return Kernel


def chosen_on_npu(row_bytes: int) -> object:
    case = uniform_case(row_bytes=row_bytes, rows_per_page=4, pages=(3, 1), num_planes=2)
    return choose_backend(transfer_of(case, []), ("npu",))


def test_an_npu_has_the_kernel_only_where_it_is_asked_for(monkeypatch, kernel) -> None:
    assert isinstance(chosen_on_npu(SMALL_ROW_BYTES), AscendDmaBackend)
    monkeypatch.setenv(ASCEND_KERNEL_VARIABLE, "1")
    choice._uses_kernel.cache_clear()
    assert isinstance(chosen_on_npu(SMALL_ROW_BYTES), kernel)
    assert isinstance(chosen_on_npu(SMALL_ROW_BYTES + 1), AscendDmaBackend)


@pytest.mark.parametrize(
    ("missing", "reason"),
    [("is_built", "libkvext_ascend.so: expected it"), ("is_host_mapped", "Call map_host on it")],
)
def test_a_kernel_that_cannot_be_used_is_said_once(
    monkeypatch, kernel, caplog, missing, reason
) -> None:
    monkeypatch.setenv(ASCEND_KERNEL_VARIABLE, "1")
    monkeypatch.setattr(kernel, missing, False)
    with caplog.at_level("WARNING", "vllm.ascend_kvext.transfer"):
        for _ in range(3):
            assert isinstance(chosen_on_npu(SMALL_ROW_BYTES), AscendDmaBackend)
    (message,) = caplog.messages
    assert message.startswith(f"{ASCEND_KERNEL_VARIABLE}=1 asks for the AscendC kernel")
    assert reason in message


def test_the_choice_refuses_wrong_tables() -> None:
    transfer = transfer_of(THREE_PLANES, [])._replace(runs=np.zeros((1, 4), np.int64))
    with pytest.raises(DescriptorError, match=r"runs: expected int64, shape \[rows, 5\]"):
        choose_backend(transfer, ("npu",))


def test_pools_of_no_known_device_are_refused() -> None:
    pools = Pools.of([torch.zeros(8, dtype=torch.uint8, device=on) for on in ("meta", "cpu")])
    assert pools.device_types == ("cpu", "meta")
    with pytest.raises(
        BackendError, match="expected all of them on cpu or all on npu, found cpu, m"
    ):
        choose_backend(transfer_of(THREE_PLANES, []), pools.device_types)


@SLOW
@given(cases(), st.data(), st.booleans())
def test_chunks_go_in_one_call(case: TransferCase, data: st.DataObject, is_bundled: bool) -> None:
    """Wherever each of them lies in the host buffer, and in any order."""
    chunks = cut_into_chunks(case, data.draw)
    memory = TransferMemory.random(chunks)
    expected = memory.after(chunks)
    run(chunks, memory, is_bundled=is_bundled)
    assert_same(memory.snapshot(), expected)


@pytest.mark.parametrize("direction", list(Direction))
def test_a_transfer_of_no_bytes_moves_nothing(direction: Direction) -> None:
    memory = TransferMemory.random(THREE_PLANES)
    pools, _ = tensors(memory)
    before = memory.snapshot()
    no_host = torch.empty(0, dtype=torch.uint8)
    no_runs = THREE_PLANES.runs[:0]
    recorder = Recorder()
    page_transfer(pools, no_host, THREE_PLANES.planes, no_runs, direction)
    page_transfer(pools, no_host, THREE_PLANES.planes[:0], no_runs, direction, backend=recorder)
    page_transfer([], no_host, THREE_PLANES.planes[:0], no_runs, direction, is_bundled=False)
    assert recorder.transfers == []
    assert_same(memory.snapshot(), before)
    with pytest.raises(DescriptorError, match=r"runs: expected int64, shape \[rows, 5\]"):
        page_transfer(pools, no_host, THREE_PLANES.planes, no_runs[:, :4], direction)
