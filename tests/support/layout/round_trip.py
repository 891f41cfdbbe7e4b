# SPDX-License-Identifier: Apache-2.0
"""Stores a chunk of one worker and loads it into another, and compares every byte of both.

Knows how to call the op; what must come out is what `truth` copies by definition.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial

import torch

from support.layout.truth import LayoutFixture, copy_by_definition, random_block_ids
from vllm_ascend_kvext.layout.model import KVLayout
from vllm_ascend_kvext.layout.planner import TransferPlanner
from vllm_ascend_kvext.layout.row_map import StoredChunk
from vllm_ascend_kvext.layout.rows import TokenRange
from vllm_ascend_kvext.layout.transfer_plan import (
    LoadPlan,
    PlacedChunk,
    StorePlan,
)
from vllm_ascend_kvext.layout.views import storage_tensors
from vllm_ascend_kvext.transfer.backend import Backend
from vllm_ascend_kvext.transfer.cpu import CpuBackend
from vllm_ascend_kvext.transfer.oracle import oracle_transfer
from vllm_ascend_kvext.transfer.page_transfer import page_transfer
from vllm_ascend_kvext.transfer.schema import Direction

GUARD_BYTES = 256
CANARY = 0xA5

Mover = Callable[..., None]


def movers(backends: Mapping[str, Backend]) -> dict[str, Mover]:
    """The oracle, and every backend bundled and exploded; the CPU's on two threads besides."""
    found: dict[str, Mover] = {"oracle": oracle_transfer}
    for name, backend in {"cpu": CpuBackend(), **backends}.items():
        move = partial(page_transfer, backend=backend, num_threads=1)
        found[f"{name}, bundled"] = partial(move, is_bundled=True)
        found[f"{name}, exploded"] = partial(move, is_bundled=False)
    found["cpu, two threads"] = partial(page_transfer, backend=CpuBackend(), num_threads=2)
    return found


class GuardedHost:
    """A host buffer between canaries, aligned to 64 bytes."""

    def __init__(self, num_bytes: int) -> None:
        whole = torch.full((num_bytes + 2 * GUARD_BYTES + 64,), CANARY, dtype=torch.uint8)
        first = GUARD_BYTES + -(whole.data_ptr() + GUARD_BYTES) % 64
        self._guards = (whole[:first], whole[first + num_bytes :])
        self.buffer = whole[first : first + num_bytes]

    def assert_guards_intact(self) -> None:
        assert all(bool((guard == CANARY).all()) for guard in self._guards)


def round_trip(
    make: Callable[[], LayoutFixture],
    tokens: TokenRange,
    movers: Mapping[str, Mover],
    seed: int = 0,
) -> int:
    """Store from one worker, load into another, each way of moving; returns the bytes that moved.

    Pages are in another order on the other side, and more of them null.
    """
    source, target = make(), make()
    source.fill(seed)
    target.fill(seed + 1)
    source_ids = random_block_ids(source, tokens, seed + 2, null=None)
    target_ids = random_block_ids(target, tokens, seed + 3, null=source_ids)
    stored, before = source.copy_of_storages(), target.copy_of_storages()
    num_bytes = copy_by_definition(source, source_ids, target, target_ids, tokens)
    expected = target.copy_of_storages()

    layout, other_layout = source.layout(), target.layout()
    plan = TransferPlanner(layout).plan_store([PlacedChunk(tokens)], source_ids)
    stored_chunks = [StoredChunk(row_map) for row_map in plan.row_maps]
    load = TransferPlanner(other_layout).plan_load(stored_chunks, tokens, target_ids)
    if not plan.host_bytes:
        assert not len(plan.runs) and not len(load.runs) and not num_bytes
        return 0  # an empty tensor has no address, and there is nothing to move
    for name, move in movers.items():
        for storage, bytes_before in zip(target.storages(), before, strict=True):
            storage.copy_(bytes_before)
        host = GuardedHost(plan.host_bytes)
        _move(move, layout, source, host, plan, Direction.PAGES_TO_HOST)
        _assert_same(f"{name}: the pages that were stored", source.storages(), stored)
        kept = host.buffer.clone()
        _move(move, other_layout, target, host, load, Direction.HOST_TO_PAGES)
        _assert_same(f"{name}: the host that was loaded", [host.buffer], [kept])
        _assert_same(f"{name}: the pages that were loaded", target.storages(), expected)
        host.assert_guards_intact()
    return num_bytes


def _move(
    move: Mover,
    layout: KVLayout,
    fixture: LayoutFixture,
    host: GuardedHost,
    plan: StorePlan | LoadPlan,
    direction: Direction,
) -> None:
    storages = storage_tensors(layout, fixture.kv_caches)
    move(storages, host.buffer, plan.planes, plan.runs, direction)


def _assert_same(
    what: str, found: Sequence[torch.Tensor], expected: Sequence[torch.Tensor]
) -> None:
    for index, (one, right) in enumerate(zip(found, expected, strict=True)):
        if not torch.equal(one, right):
            wrong = (one != right).nonzero().flatten()
            raise AssertionError(
                f"{what}: {len(wrong)} of {len(right)} bytes of storage {index} differ, the first "
                f"at {int(wrong[0])}"
            )
