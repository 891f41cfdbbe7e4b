# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vllm-ascend-kvext project
"""The op on the CPU: exactly the bytes that the oracle moves, and no other."""

from __future__ import annotations

from dataclasses import replace
from unittest import mock

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from pytest_mock import MockerFixture
from support.sample import sampled
from support.transfer.cases import (
    HOST_TO_PAGES,
    LARGE_CASES,
    PAGES_TO_HOST,
    TransferCase,
    TransferMemory,
    assert_same,
    cases,
    cut_into_chunks,
    uniform_case,
)

from vllm_ascend_kvext.native import native
from vllm_ascend_kvext.transfer.ascend.dma import AscendDmaBackend
from vllm_ascend_kvext.transfer.ascend.npu_transfers import (
    MIN_MEAN_RUN_BYTES_FOR_DMA,
    _warn_once,
    mean_run_bytes,
)
from vllm_ascend_kvext.transfer.backend import CpuBackend, Transfer
from vllm_ascend_kvext.transfer.errors import BackendError, DescriptorError
from vllm_ascend_kvext.transfer.page_transfer import choose_backend, page_transfer
from vllm_ascend_kvext.transfer.placement import CALLING_THREAD
from vllm_ascend_kvext.transfer.pools import Pools
from vllm_ascend_kvext.transfer.schema import Direction

SLOW = settings(max_examples=sampled(300), suppress_health_check=list(HealthCheck))


def tensors(memory: TransferMemory) -> tuple[Pools, torch.Tensor]:
    pools = Pools([torch.from_numpy(pool.region) for pool in memory.pools])
    return pools, torch.from_numpy(memory.host.region)


def run(case: TransferCase, memory: TransferMemory, **options) -> None:
    direction = Direction(case.direction)
    page_transfer(*tensors(memory), case.planes, case.runs, direction, **options)


@SLOW
@given(st.data(), cases(), st.integers(1, 3), st.booleans(), st.booleans())
def test_it_does_what_the_oracle_does(
    data: st.DataObject, case: TransferCase, num_threads: int, is_bundled: bool, is_cut: bool
) -> None:
    """Chunks of one call may lie anywhere in the host buffer, in any order."""
    if is_cut:
        case = cut_into_chunks(case, data.draw)
    memory = TransferMemory.random(case)
    expected = memory.after(case)
    placement = CALLING_THREAD._replace(num_threads=num_threads)
    run(case, memory, placement=placement, is_bundled=is_bundled)
    assert_same(memory.snapshot(), expected)


@pytest.mark.parametrize("num_threads", [1, 2, 3])
@pytest.mark.parametrize("direction", [PAGES_TO_HOST, HOST_TO_PAGES])
@pytest.mark.parametrize("streaming", [0, 1])
@pytest.mark.parametrize("case", LARGE_CASES, ids=lambda case: f"rows of {case.planes[0, 5]}")
def test_large_transfers_are_split(case, direction, num_threads, streaming) -> None:
    if direction == HOST_TO_PAGES:
        case = case.reversed()
    memory = TransferMemory.random(case)
    expected = memory.after(case)
    native().page_transfer(*memory.descriptors(case), num_threads, streaming)
    assert_same(memory.snapshot(), expected)


def test_adjacent_runs_are_one_copy() -> None:
    case = uniform_case(row_bytes=16, rows_per_page=4, pages=(1, 2, 3, 5, 6, 4), num_planes=2)
    memory = TransferMemory.random(case)
    arguments = (memory.pool_table, memory.host.address, case.host_bytes, case.planes, case.runs)
    *_, sizes = native().expand(*arguments, PAGES_TO_HOST)
    assert sizes.tolist() == [192, 128, 64] * 2
    # The runs are adjacent in the pool only.
    case.runs[1:, 4] += 1
    case.planes[1, 8] += 64
    *_, sizes = native().expand(
        *arguments[:2], case.host_bytes + 128, case.planes, case.runs, PAGES_TO_HOST
    )
    assert sizes.tolist() == [64, 128, 128, 64] * 2


THREE_PLANES = uniform_case(row_bytes=8, rows_per_page=4, pages=(3, 1), num_planes=3)


@pytest.mark.parametrize(
    ("is_bundled", "moved"), [(True, [[0, 64, 128]]), (False, [[0], [128]])], ids=["one", "each"]
)
def test_bundled_is_one_call_and_exploded_one_per_plane_that_has_runs(
    is_bundled: bool, moved: list[list[int]]
) -> None:
    case = replace(THREE_PLANES, planes=THREE_PLANES.planes.copy())
    case.planes[1, 0] = 5
    recorder = mock.Mock()
    run(case, TransferMemory.random(case), backend=recorder, is_bundled=is_bundled)
    transfers = [call.args[0] for call in recorder.run.call_args_list]
    assert [transfer.planes[:, 8].tolist() for transfer in transfers] == moved


def test_exploded_is_validated_as_a_whole() -> None:
    """Planes that overlap each other cannot be checked one by one."""
    case = replace(THREE_PLANES, planes=THREE_PLANES.planes.copy())
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
        Pools([host, wrong])


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


SMALL_ROW_BYTES = MIN_MEAN_RUN_BYTES_FOR_DMA // 4 - 1


@pytest.fixture
def kernel(mocker: MockerFixture) -> mock.MagicMock:
    """The class of a kernel that is available."""
    return mocker.patch("vllm_ascend_kvext.transfer.ascend.npu_transfers.AscendKernelBackend")


def chosen_on_npu(row_bytes: int, uses_kernel: bool = True) -> object:
    case = uniform_case(row_bytes=row_bytes, rows_per_page=4, pages=(3, 1), num_planes=2)
    return choose_backend(transfer_of(case, []), ("npu",), uses_kernel=uses_kernel)


def test_an_npu_has_the_kernel_only_where_it_is_asked_for(kernel) -> None:
    assert isinstance(chosen_on_npu(SMALL_ROW_BYTES, uses_kernel=False), AscendDmaBackend)
    assert chosen_on_npu(SMALL_ROW_BYTES) is kernel.return_value
    assert isinstance(chosen_on_npu(SMALL_ROW_BYTES + 1), AscendDmaBackend)


@pytest.mark.parametrize(
    ("missing", "reason"),
    [
        (
            {"side_effect": BackendError("libkvext_ascend.so: expected it")},
            "libkvext_ascend.so: exp",
        ),
        ({"return_value.can_reach.return_value": False}, "Call map_host on it"),
    ],
)
def test_a_kernel_that_cannot_be_used_is_said_once(kernel, caplog, missing, reason) -> None:
    _warn_once.cache_clear()
    kernel.configure_mock(**missing)
    with caplog.at_level("WARNING", "vllm.ascend_kvext.transfer"):
        for _ in range(3):
            assert isinstance(chosen_on_npu(SMALL_ROW_BYTES), AscendDmaBackend)
    (message,) = caplog.messages
    assert message.startswith("The AscendC kernel is asked for") and reason in message


def test_the_choice_refuses_wrong_tables() -> None:
    transfer = transfer_of(THREE_PLANES, [])._replace(runs=np.zeros((1, 4), np.int64))
    with pytest.raises(DescriptorError, match=r"runs: expected int64, shape \[rows, 5\]"):
        choose_backend(transfer, ("npu",))


def test_pools_of_no_known_device_are_refused() -> None:
    pools = Pools([torch.zeros(8, dtype=torch.uint8, device=on) for on in ("meta", "cpu")])
    assert pools.device_types == ("cpu", "meta")
    with pytest.raises(
        BackendError, match="expected all of them on cpu or all on npu or all on cuda, found cpu, m"
    ):
        choose_backend(transfer_of(THREE_PLANES, []), pools.device_types)


@pytest.mark.parametrize("direction", list(Direction))
def test_a_transfer_of_no_bytes_moves_nothing(direction: Direction) -> None:
    memory = TransferMemory.random(THREE_PLANES)
    pools, _ = tensors(memory)
    before = memory.snapshot()
    no_host = torch.empty(0, dtype=torch.uint8)
    no_runs = THREE_PLANES.runs[:0]
    recorder = mock.Mock()
    page_transfer(pools, no_host, THREE_PLANES.planes, no_runs, direction)
    page_transfer(pools, no_host, THREE_PLANES.planes[:0], no_runs, direction, backend=recorder)
    page_transfer(Pools([]), no_host, THREE_PLANES.planes[:0], no_runs, direction, is_bundled=False)
    recorder.run.assert_not_called()
    assert_same(memory.snapshot(), before)
    with pytest.raises(DescriptorError, match=r"runs: expected int64, shape \[rows, 5\]"):
        page_transfer(pools, no_host, THREE_PLANES.planes, no_runs[:, :4], direction)


def store_into(pools: Pools, memory: TransferMemory) -> None:
    case = THREE_PLANES
    page_transfer(pools, tensors(memory)[1], case.planes, case.runs, Direction.PAGES_TO_HOST)


def test_pools_serve_until_their_memory_moves_and_once_it_is_registered_again() -> None:
    """Sleep mode frees a storage like this, without telling its users."""
    before, after = (
        TransferMemory.random(THREE_PLANES, seed=1),
        TransferMemory.random(THREE_PLANES, seed=2),
    )
    pools = Pools([tensor.clone() for tensor in tensors(before)[0].tensors])
    expected = before.after(THREE_PLANES)
    for _ in range(2):
        store_into(pools, before)
    assert_same([before.host.whole], expected[-1:])
    expected = after.after(THREE_PLANES)
    untouched = after.snapshot()
    pools.tensors[0].untyped_storage().resize_(0)
    with pytest.raises(DescriptorError, match="storages where they were registered, found some el"):
        store_into(pools, after)
    assert_same(after.snapshot(), untouched)
    pools.register(tensors(after)[0].tensors)
    assert np.array_equal(pools.table, after.pool_table)
    store_into(pools, after)
    assert_same(after.snapshot(), expected)
