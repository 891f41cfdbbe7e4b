# SPDX-License-Identifier: Apache-2.0
"""Registered storages: looked at once, refused while their memory is away, renewed after."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from support.transfer.cases import TransferMemory, assert_same, uniform_case

from vllm_ascend_kvext.transfer.errors import DescriptorError
from vllm_ascend_kvext.transfer.page_transfer import page_transfer
from vllm_ascend_kvext.transfer.pools import Pools
from vllm_ascend_kvext.transfer.schema import Direction

CASE = uniform_case(row_bytes=8, rows_per_page=4, pages=(3, 1), num_planes=3)


def tensors(memory: TransferMemory) -> list[torch.Tensor]:
    return [torch.from_numpy(pool.region) for pool in memory.pools]


def store(pools: Pools, memory: TransferMemory) -> None:
    host = torch.from_numpy(memory.host.region)
    page_transfer(pools, host, CASE.planes, CASE.runs, Direction.PAGES_TO_HOST)


def test_pools_are_registered_once() -> None:
    memory = TransferMemory.random(CASE)
    expected = memory.after(CASE)
    pools = Pools.of(tensors(memory))
    assert np.array_equal(pools.table, memory.pool_table)
    for _ in range(2):
        store(pools, memory)
    assert_same(memory.snapshot(), expected)


def test_retired_pools_are_refused_until_they_are_renewed() -> None:
    before, after = TransferMemory.random(CASE, seed=1), TransferMemory.random(CASE, seed=2)
    pools = Pools.of(tensors(before))
    pools.retire()
    assert pools.tensors == ()
    untouched, expected = before.snapshot(), after.after(CASE)
    with pytest.raises(DescriptorError, match="pools: expected registered storages, found retired"):
        store(pools, after)
    pools.renew(tensors(after))
    store(pools, after)
    assert_same(before.snapshot(), untouched)
    assert_same(after.snapshot(), expected)


def test_pools_may_be_renewed_without_having_been_retired() -> None:
    before, after = TransferMemory.random(CASE, seed=1), TransferMemory.random(CASE, seed=2)
    pools = Pools.of(tensors(before))
    expected = after.after(CASE)
    pools.renew(tensors(after))
    store(pools, after)
    assert_same(after.snapshot(), expected)


@pytest.mark.parametrize("change", ["number", "size", "device"])
def test_other_storages_are_no_renewal(change: str) -> None:
    memory = TransferMemory.random(CASE)
    found = tensors(memory)
    pools = Pools.of(found)
    pools.retire()
    if change == "number":
        found.pop()
    elif change == "size":
        found[1] = found[1][:-1]
    else:
        found = [torch.empty_like(tensor, device="meta") for tensor in found]
    with pytest.raises(DescriptorError, match="pools: expected to renew storages on"):
        pools.renew(found)
    assert pools.is_retired


def test_memory_that_has_moved_without_a_word_is_refused() -> None:
    """As a storage that sleep mode has freed."""
    memory = TransferMemory.random(CASE)
    pools = Pools.of([tensor.clone() for tensor in tensors(memory)])
    untouched = memory.snapshot()
    pools.tensors[0].untyped_storage().resize_(0)
    with pytest.raises(DescriptorError, match="storages where they were registered, found some el"):
        store(pools, memory)
    assert_same(memory.snapshot(), untouched)
