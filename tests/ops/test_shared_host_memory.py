# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vllm-ascend-kvext project
"""Workers that share host memory, with one scheduler side: each of them loads its own bytes.

The workers are in one process, and their memory is the real one. The pages of a layout are equal on
all ranks, or differ where a test says so.
"""

from __future__ import annotations

import gc
import logging
import os
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from support.connector.gates import Gate, until
from support.connector.held import held_by
from support.connector.page_round_trip import Sides, paged_request, pages_read
from support.connector.shared_workers import shared_workers
from support.connector.small_workers import deepseek_v4_like, one_head
from support.layout.truth import LayoutFixture

from vllm_ascend_kvext.connector.common.messages import (
    ConnectorMetadata,
    PlaneDigest,
    StoreJob,
    WorkerOutput,
)
from vllm_ascend_kvext.connector.worker.worker_side import WorkerSide
from vllm_ascend_kvext.layout.transfer_plan import PlacedChunk, TablePart
from vllm_ascend_kvext.token_range import TokenRange
from vllm_ascend_kvext.transfer.errors import BackendError
from vllm_ascend_kvext.transfer.page_transfer import page_transfer
from vllm_ascend_kvext.transfer.schema import Direction

HOST_GIB = 64 / 1024
NUM_TOKENS = 128
Make = Callable[[], LayoutFixture]


class Engine:
    """Some workers, their pages, and the scheduler side."""

    def __init__(self, workers: Sequence[WorkerSide], pages: Sequence[LayoutFixture]) -> None:
        self.workers = workers
        self.pages = pages
        self.sides = Sides(workers, 32)
        self.scheduler = self.sides.scheduler
        self.num_groups = workers[0].describe().layout.num_scheduler_groups
        self._number = 0

    def ids(self, first: int) -> list[list[int]]:
        """Blocks of a request of `NUM_TOKENS` tokens, no block twice."""
        free = iter(range(first, 64))
        found = []
        for group in range(self.num_groups):
            reaches = self.pages[0].reaches(group)
            num_pages = -(-NUM_TOKENS // max(each.tokens_per_page for each in reaches))
            read = set().union(*(pages_read(each, NUM_TOKENS) for each in reaches))
            found.append([next(free) if page in read else 0 for page in range(num_pages)])
        return found

    def store(self, name: str = "stored") -> None:
        self.sides.store(paged_request(name, NUM_TOKENS, 32), self.ids(1))

    def load(self) -> int:
        """Load what is stored into other blocks. Returns the number of tokens."""
        self._number += 1
        ids = [[*each] for each in self.ids(30)]
        request = paged_request(f"load {self._number}", NUM_TOKENS + 1, 32)
        return self.sides.load(request, 0, [[*each, 0] for each in ids])

    def contents(self, rank: int, first: int) -> list[torch.Tensor]:
        """The bytes of a request's blocks that a resume reads, tensor by tensor."""
        ids = self.ids(first)
        found = []
        for paged in self.pages[rank].tensors:
            pages = [page for page in ids[paged.group] if page]
            found.append(paged.tensor[pages].clone().view(torch.uint8))
        return found


@contextmanager
def engine(
    make: Make,
    num_ranks: int,
    num_kv_heads: int = 1,
    hosts: Sequence[str | None] | None = None,
    moves: Sequence[Any] | None = None,
) -> Iterator[Engine]:
    pages = [make() for _ in range(num_ranks)]
    for rank, each in enumerate(pages):
        each.fill(seed=1 + rank * num_kv_heads // num_ranks)
    with shared_workers(pages, HOST_GIB, num_kv_heads, hosts, moves) as workers:
        yield Engine(workers, pages)


def assert_each_rank_has_its_own(made: Engine) -> None:
    """Store, load into other blocks, and compare all ranks' bytes."""
    expected = [made.contents(rank, 1) for rank in range(len(made.workers))]
    for pages in made.pages:
        for paged in pages.tensors:
            paged.tensor[30:].zero_()
    assert made.load() == NUM_TOKENS
    for rank, content in enumerate(expected):
        found = made.contents(rank, 30)
        for one, other in zip(found, content, strict=True):
            assert torch.equal(one, other), f"rank {rank}"


CASES = [
    pytest.param(deepseek_v4_like, 2, 1, id="latents, 2 ranks"),
    pytest.param(deepseek_v4_like, 4, 1, id="latents, 4 ranks"),
    pytest.param(one_head, 2, 1, id="1 head, 2 ranks"),
    pytest.param(one_head, 4, 2, id="2 heads, 4 ranks"),
]


@pytest.mark.parametrize(("make", "num_ranks", "num_kv_heads"), CASES)
def test_each_rank_loads_its_own_bytes(make: Make, num_ranks: int, num_kv_heads: int) -> None:
    with engine(make, num_ranks, num_kv_heads) as made:
        made.store()
        assert_each_rank_has_its_own(made)
        made.sides.assert_idle()


@pytest.mark.parametrize(("make", "num_ranks", "num_kv_heads"), CASES)
def test_memory_holds_a_byte_once_for_the_ranks_that_have_it(
    make: Make, num_ranks: int, num_kv_heads: int
) -> None:
    with engine(make, 1) as made:
        alone = made.scheduler.tier.num_tokens
    with engine(make, num_ranks, num_kv_heads) as made:
        together = made.scheduler.tier.num_tokens
        own = {each.describe().host_bytes for each in made.workers}
        assert own == {int(HOST_GIB * (1 << 30))}
    # With all heads on each of them, a rank would have as many tokens in as many bytes.
    assert together == pytest.approx(alone / num_kv_heads, rel=0.02)


def test_nothing_is_loaded_before_it_is_compared(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, logger="vllm.ascend_kvext.connector")
    with engine(deepseek_v4_like, 2) as made:
        report = made.scheduler._check.note
        held_back: list[Any] = []
        made.scheduler._check.note = held_back.append  # type: ignore[method-assign]
        made.store()
        assert held_back and made.load() == 0
        for each in held_back:
            report(each)
        assert made.load() == NUM_TOKENS
    assert "1 copy for 2 ranks" in caplog.text


def test_a_plan_from_before_the_difference_is_dropped() -> None:
    """Its row maps are those of the old places."""
    with engine(deepseek_v4_like, 2) as made:
        made.store()
        request = paged_request("waits", NUM_TOKENS + 1, 32)
        assert made.scheduler.get_num_new_matched_tokens(request, 0) == NUM_TOKENS
        made.scheduler._check._unproven = {0}
        digests = {rank: (PlaneDigest(0, 0, 0, bytes([rank])),) for rank in range(2)}
        made.scheduler._check_sharing(WorkerOutput(jobs_ended={99: 2}, digests={99: digests}))
        assert not held_by(made.scheduler).pinned_ids
        assert made.scheduler.get_num_new_matched_tokens(request, 0) == 0
        made.scheduler.request_finished(request, is_end_of_turn=False)


def test_a_swap_that_no_worker_has_yet_fails_at_the_difference() -> None:
    """Otherwise its place would stay taken, and the engine would make steps for it forever."""
    with engine(deepseek_v4_like, 2) as made:
        scheduler = made.scheduler
        used_bytes = scheduler.tier._arena.used_bytes
        request = paged_request("preempted", NUM_TOKENS, 32)
        made.sides.compute(request, made.ids(1))
        state = scheduler._states[request.request_id]
        scheduler._swaps, is_whole = scheduler._stores.swap_out(request, state)
        assert scheduler._swaps and is_whole
        digests = {rank: (PlaneDigest(0, 0, 0, bytes([rank])),) for rank in range(2)}
        scheduler._check_sharing(WorkerOutput(jobs_ended={99: 2}, digests={99: digests}))
        made.sides.end(request, is_end_of_turn=False)
        made.sides.assert_idle()
        assert scheduler.tier._arena.used_bytes == used_bytes == 0
        assert made.load() == 0


def test_hosts_with_other_numbers_of_ranks_share_nothing() -> None:
    with engine(deepseek_v4_like, 6, hosts=["a"] * 4 + ["b"] * 2) as made:
        assert [each.describe().sharing for each in made.workers] == [None] * 6
        made.store()
        assert_each_rank_has_its_own(made)


@pytest.mark.parametrize("group", range(4))
def test_ranks_that_differ_keep_their_own_bytes(
    group: int, caplog: pytest.LogCaptureFixture
) -> None:
    with engine(deepseek_v4_like, 2) as made:
        paged = [each for each in made.pages[1].tensors if each.group == group][-1]
        page = [each for each in made.ids(1)[group] if each][-1]
        paged.tensor[page].view(torch.uint8).flatten()[-1] ^= 1
        before = made.scheduler.tier.num_tokens
        made.store()
        assert made.load() == 0, "what was stored before the comparison has been found"
        assert "keeps all of its bytes from now on" in caplog.text
        assert f"of group {group} on ranks 0 and 1" in caplog.text
        assert made.scheduler.tier.num_tokens == before // 2
        made.store("again")
        assert_each_rank_has_its_own(made)
        made.sides.assert_idle()


class GatedMove:
    """`page_transfer` behind a gate. Its stores fail while ``fails`` is true."""

    def __init__(self) -> None:
        self.gate = Gate()
        self.fails = False
        self.num_stores = 0

    def __call__(self, *arguments: Any, placement: Any) -> None:
        self.gate.pass_through()
        if arguments[-1] is Direction.PAGES_TO_HOST:
            self.num_stores += 1
            if self.fails:
                raise BackendError("the device is on fire")
        page_transfer(*arguments, placement=placement)


def test_stores_from_before_the_difference_do_not_begin_after_it() -> None:
    """Their places are too small for the bytes of all workers."""
    moves = [GatedMove(), GatedMove()]
    with engine(deepseek_v4_like, 2, moves=moves) as made:
        worker, move = made.workers[1], moves[1]
        tables = tuple(TablePart(0, tuple(ids)) for ids in made.ids(1))
        jobs = [StoreJob(n, (PlacedChunk(TokenRange(0, 128), 0),), tables) for n in range(4)]
        move.gate.close()
        worker.begin_step(ConnectorMetadata(stores=tuple(jobs[:2])))
        move.gate.wait_for_arrival()
        worker.begin_step(ConnectorMetadata(stores=(jobs[2],), has_forward=True))
        threading.Timer(0.05, move.gate.open).start()
        worker.run_before_step(ConnectorMetadata(keeps_apart=True, has_forward=True))
        results = worker.end_step().results
        assert (results.jobs_ended, results.failed_jobs) == ({0: 1, 1: 1, 2: 1}, {1, 2})
        assert move.num_stores == 1
        worker.begin_step(ConnectorMetadata(stores=(jobs[3],), keeps_apart=True))
        until(lambda: bool(worker.end_step().results.jobs_ended), "the end of the store")
        assert move.num_stores == 2


@pytest.mark.parametrize("rank", [0, 1])
def test_what_one_rank_could_not_store_is_lost_for_all(rank: int) -> None:
    moves = [GatedMove(), GatedMove()]
    with engine(deepseek_v4_like, 2, moves=moves) as made:
        made.sides.may_fail = moves[rank].fails = True
        made.store()
        assert made.load() == 0
        made.sides.may_fail = moves[rank].fails = False
        made.store("again")
        assert_each_rank_has_its_own(made)
        made.sides.assert_idle()


def test_workers_on_other_hosts_have_a_copy_of_their_own() -> None:
    hosts = ["first", "first", "second", "second"]
    with engine(deepseek_v4_like, 4, hosts=hosts) as made:
        sharings = [each.describe().sharing for each in made.workers]
        assert [each and each.ranks_of_host for each in sharings] == [(0, 1)] * 2 + [(2, 3)] * 2
        assert {each.describe().host_bytes for each in made.workers} == {
            int(HOST_GIB * (1 << 30)) // 2
        }
        made.store()
        assert_each_rank_has_its_own(made)


def test_hosts_with_other_equal_bytes_share_nothing() -> None:
    with engine(one_head, 4, 2, hosts=["a", "b", "b", "b"]) as made:
        told = [each.describe() for each in made.workers]
        assert [each.sharing for each in told] == [None] * 4
        assert "on some hosts" in (told[0].no_sharing or "")
        made.store()
        assert_each_rank_has_its_own(made)


def test_workers_that_cannot_know_their_host_share_nothing() -> None:
    with engine(deepseek_v4_like, 2, hosts=[None, None]) as made:
        told = [each.describe() for each in made.workers]
        assert [each.sharing for each in told] == [None] * 2
        assert "does not say which workers are on one host" in (told[0].no_sharing or "")
        made.store()
        assert_each_rank_has_its_own(made)


def test_memory_is_gone_with_its_workers() -> None:
    def num_mapped() -> int:
        gc.collect()
        with open("/proc/self/maps") as maps:
            return len({line.split()[4] for line in maps if "kvext host memory" in line})

    mapped = num_mapped()
    before = len(os.listdir("/proc/self/fd"))
    with engine(deepseek_v4_like, 2) as made:
        assert num_mapped() == mapped + 1
        del made
    assert num_mapped() == mapped
    assert len(os.listdir("/proc/self/fd")) == before
