# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vllm-ascend-kvext project
"""Ranks with one memory get an object once. A job has ended when all of them have ended it."""

from __future__ import annotations

import shutil
import tempfile
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule
from support.connector.gates import until

from vllm_ascend_kvext.connector.common.messages import WorkerOutput
from vllm_ascend_kvext.connector.common.options import parse_options
from vllm_ascend_kvext.layout.sharing import HostSharing
from vllm_ascend_kvext.shared_tier.backend import Answer, SharedObject
from vllm_ascend_kvext.shared_tier.files import FilesTier
from vllm_ascend_kvext.shared_tier.messages import SharedJobs, SharedOutput
from vllm_ascend_kvext.shared_tier.worker.object_ranks import object_ranks
from vllm_ascend_kvext.shared_tier.worker.shared_transfers import SharedTransfers

NUM_RANKS = 3
NUM_BYTES = 4096
PLACES = 8
DIRT = 0x5A


def name_of(number: int) -> str:
    return f"engine/R0-64-{number:032x}"


def content_of(number: int) -> bytes:
    return np.random.default_rng(number).bytes(NUM_BYTES)


class OneMemory:
    """The ranks of a host, and what the scheduler side would know of their jobs."""

    def __init__(self, folder: Path) -> None:
        self.memory = np.zeros(PLACES * 2 * NUM_BYTES, np.uint8)
        options = parse_options({"shared_tier": f"file://{folder}"}, NUM_RANKS)
        ranks = tuple(range(NUM_RANKS))
        self.ranks = [object_ranks(rank, 1, HostSharing(rank, ranks, ())) for rank in ranks]
        self.transfers = [
            SharedTransfers(options, each, memoryview(self.memory), lambda: None)
            for each in self.ranks
        ]
        self.results = WorkerOutput()
        self.jobs_of_ranks: list[set[int]] = [set() for _ in ranks]

    def submit(self, rank: int, gets: Any = (), puts: Any = ()) -> None:
        self.transfers[rank].submit(SharedJobs(tuple(gets), tuple(puts)))

    def submit_to_all(self, gets: Any = (), puts: Any = ()) -> None:
        for rank in range(NUM_RANKS):
            self.submit(rank, gets, puts)

    def take(self) -> None:
        for rank, each in enumerate(self.transfers):
            output = each.take_output()
            self.jobs_of_ranks[rank] |= output.jobs_ended.keys()
            self.results.add(output)

    def has_ended(self, number: int) -> bool:
        self.take()
        return self.results.jobs_ended.get(number, 0) == NUM_RANKS

    def told(self) -> SharedOutput:
        told = self.results.secondary
        assert told is None or isinstance(told, SharedOutput)
        return told or SharedOutput()

    def place(self, offset_bytes: int) -> bytes:
        return self.memory[offset_bytes:][:NUM_BYTES].tobytes()

    def shutdown(self) -> None:
        for each in self.transfers:
            each.shutdown()


@contextmanager
def one_memory(folder: Path, num_objects: int = 4) -> Iterator[OneMemory]:
    """Ranks with one memory, and a tier that has some objects."""
    made = OneMemory(folder)
    try:
        for number in range(num_objects):
            made.memory[:NUM_BYTES] = np.frombuffer(content_of(number), np.uint8)
            made.submit_to_all(puts=[SharedObject(number, name_of(number), 0, NUM_BYTES)])
            until(lambda number=number: made.has_ended(number), "the put")
        made.memory[:] = DIRT
        yield made
    finally:
        made.shutdown()


def test_each_object_is_put_and_got_once(tmp_path: Path) -> None:
    with one_memory(tmp_path, 6) as made:
        put = made.results.traffic["put"]
        assert (put.num_bytes, put.transfers) == (6 * NUM_BYTES, 6)
        whats = [SharedObject(100 + n, name_of(n), n * NUM_BYTES, NUM_BYTES) for n in range(6)]
        made.submit_to_all(gets=whats)
        until(lambda: all(made.has_ended(what.number) for what in whats), "the gets")
        for number, what in enumerate(whats):
            assert made.place(what.offset_bytes) == content_of(number)
        got = made.results.traffic["get"]
        assert (got.num_bytes, got.transfers) == (6 * NUM_BYTES, 6)
        assert made.told().got_bytes == 6 * NUM_BYTES and not made.results.failed_jobs
    assert len(list(tmp_path.glob("kvext4/*/r0/objects/*/*"))) == 6
    assert not list(tmp_path.glob("kvext4/*/r[1-9]*"))


def test_the_others_end_at_once_although_their_threads_are_busy(tmp_path: Path) -> None:
    """A rank that gets nothing has nothing to wait for, so it does not delay the one that gets."""
    gate, get_into = threading.Event(), FilesTier.get_into

    def slow(tier: FilesTier, what: SharedObject, on_bytes: Any) -> Answer:
        assert gate.wait(20)
        return get_into(tier, what, on_bytes)

    with one_memory(tmp_path) as made, mock.patch.object(FilesTier, "get_into", slow):
        whats = [SharedObject(100 + n, name_of(n), n * NUM_BYTES, NUM_BYTES) for n in range(4)]
        made.submit_to_all(gets=whats)
        made.take()
        for what in whats:
            (getting,) = (each.rank for each in made.ranks if each.gets(what.name))
            ended = [what.number in of_rank for of_rank in made.jobs_of_ranks]
            assert ended == [rank != getting for rank in range(NUM_RANKS)]
            assert not made.has_ended(what.number)
        assert made.memory.min() == made.memory.max() == DIRT
        gate.set()
        until(lambda: all(made.has_ended(what.number) for what in whats), "the gets")


@pytest.mark.parametrize("answer", [*Answer, None], ids=lambda answer: str(answer))
def test_a_failure_of_the_rank_that_gets_fails_the_job(
    tmp_path: Path, answer: Answer | None
) -> None:
    def fail(tier: FilesTier, what: SharedObject, on_bytes: Any) -> Answer:
        tier._memory[what.offset_bytes :][:1000] = bytes(1000)
        if answer is None:
            raise RuntimeError("a backend that is wrong")
        return answer

    what = SharedObject(100, name_of(1), 0, NUM_BYTES)
    with one_memory(tmp_path) as made, mock.patch.object(FilesTier, "get_into", fail):
        made.submit_to_all(gets=[what])
        until(lambda: made.has_ended(100), "the get")
        assert (100 in made.results.failed_jobs) == (answer is not Answer.WHOLE)
        assert sum(made.told().failures.values()) == (answer is not Answer.WHOLE)


def test_what_was_dropped_does_not_begin(tmp_path: Path) -> None:
    """Bytes of workers that keep them apart would have too little room in its place."""
    gate, begun = threading.Event(), []

    def slow(tier: FilesTier, what: SharedObject, *more: Any) -> Answer:
        begun.append(what.number)
        assert gate.wait(20)
        return Answer.WHOLE

    with (
        one_memory(tmp_path) as made,
        mock.patch.object(FilesTier, "put", slow),
        mock.patch.object(FilesTier, "get_into", slow),
    ):
        (rank,) = (each.rank for each in made.ranks if each.gets(name_of(0)))
        what = SharedObject(0, name_of(0), 0, NUM_BYTES)
        running = [what._replace(number=100 + number) for number in range(4)]
        made.submit(rank, gets=running, puts=[what._replace(number=200)])
        until(lambda: len(begun) > 1, "calls that run")
        made.submit(rank, gets=[what._replace(number=110)], puts=[what._replace(number=210)])
        made.transfers[rank].drop()
        made.submit(rank, gets=[what._replace(number=120)], puts=[what._replace(number=220)])
        gate.set()
        ended = {*(each.number for each in running), 200, 110, 210, 120, 220}

        def have_ended() -> bool:
            made.take()
            return made.jobs_of_ranks[rank] >= ended

        until(have_ended, "the end of all")
        assert {110, 210}.isdisjoint(begun) and {120, 220} <= {*begun}
        assert {110, 210} <= made.results.failed_jobs <= ended - {120, 220, 200}
        assert not made.told().failures, "what was dropped is no failure of the tier"


class Machine(RuleBasedStateMachine):
    """Jobs are told to each rank at its own time. Gets wait, fail, and end in any order."""

    def __init__(self) -> None:
        super().__init__()
        self.folder = Path(tempfile.mkdtemp(prefix="kvext-one-memory-"))
        self._context = one_memory(self.folder)
        self.made = self._context.__enter__()
        self.told_to = [0] * NUM_RANKS
        self.gets: list[SharedObject] = []
        self.fates: dict[int, Answer] = {}
        self.gates: dict[int, threading.Event] = {}
        get_into = FilesTier.get_into

        def gated(tier: FilesTier, what: SharedObject, on_bytes: Any) -> Answer:
            assert self.gates[what.number].wait(20)
            if self.fates[what.number] is not Answer.WHOLE:
                return self.fates[what.number]
            return get_into(tier, what, on_bytes)

        self._patch = mock.patch.object(FilesTier, "get_into", gated)
        self._patch.start()

    def teardown(self) -> None:
        for gate in self.gates.values():
            gate.set()
        for each in self.made.transfers:
            until(lambda each=each: not each.wait_for_end(0.01), "the end")
        self._patch.stop()
        self._context.__exit__(None, None, None)
        shutil.rmtree(self.folder)

    @precondition(lambda self: len(self.gets) < 2 * PLACES)
    @rule(number=st.integers(0, 3), fate=st.sampled_from([Answer.WHOLE, *Answer]))
    def begin(self, number: int, fate: Answer) -> None:
        job = 100 + len(self.gets)
        place = len(self.gets) * NUM_BYTES
        self.fates[job] = fate
        self.gates[job] = threading.Event()
        self.gets.append(SharedObject(job, name_of(number), place, NUM_BYTES))

    @rule(rank=st.integers(0, NUM_RANKS - 1))
    def tell(self, rank: int) -> None:
        """A rank takes a step: it is told of all jobs so far."""
        self.made.submit(rank, gets=self.gets[self.told_to[rank] :])
        self.told_to[rank] = len(self.gets)

    @precondition(lambda self: self.gets)
    @rule(number=st.integers(0, 2 * PLACES - 1))
    def let_go(self, number: int) -> None:
        self.gates[self.gets[number % len(self.gets)].number].set()

    @invariant()
    def a_job_has_ended_when_its_bytes_are_there(self) -> None:
        self.made.take()
        failed = self.made.results.failed_jobs
        for what in self.gets:
            ended = self.made.results.jobs_ended.get(what.number, 0)
            assert ended <= NUM_RANKS, "a rank has ended a job twice"
            if ended == NUM_RANKS:
                is_whole = self.fates[what.number] is Answer.WHOLE
                assert is_whole == (what.number not in failed)
                number = int(what.name[-2:], 16)
                expected = content_of(number) if is_whole else bytes([DIRT]) * NUM_BYTES
                assert self.made.place(what.offset_bytes) == expected
        whole = [each for each in self.fates.values() if each is Answer.WHOLE]
        assert self.made.results.traffic["get"].transfers <= len(whole)


Machine.TestCase.settings = settings(max_examples=30, stateful_step_count=25, deadline=None)
TestJobsOfRanksWithOneMemory = Machine.TestCase
