# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vllm-ascend-kvext project
"""Each request reads its own count of accepted drafts, whenever the device's copy of them ends.

Rows of a batch are added, removed and moved by vLLM's own batch. The counts are read as vLLM reads
them. The device writes them at a time that a seed draws: before, between or after the moves.
"""

from __future__ import annotations

import inspect
import random
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from support.upstream_version import IS_SINCE_0_30
from vllm.sampling_params import SamplingParams
from vllm.v1.worker.gpu_input_batch import CachedRequestState, InputBatch

from vllm_ascend_kvext.patches.repairs.gpu_model_runner import leave_counts_behind

NUM_CASES = 200
NUM_STEPS = 6
NUM_ROWS = 8
NUM_DRAFTS = 3

Update = Callable[[SimpleNamespace, Callable[[], None]], None]
"""Moves the rows of a runner's batch. The function is called between the moves."""


def new_batch() -> InputBatch:
    arguments: dict[str, Any] = {
        "max_num_reqs": NUM_ROWS,
        "max_model_len": 64,
        "max_num_batched_tokens": 64,
        "device": torch.device("cpu"),
        "vocab_size": 32,
        "block_sizes": [16],
        "kernel_block_sizes": [16],
        "max_num_blocks_per_req": [4],
        "num_spec_tokens": NUM_DRAFTS,
    }
    if not IS_SINCE_0_30:
        arguments["pin_memory"] = False
    return InputBatch(**arguments)


def new_request(req_id: str) -> CachedRequestState:
    arguments: dict[str, Any] = {
        "req_id": req_id,
        "prompt_token_ids": [1, 2, 3],
        "mm_features": [],
        "sampling_params": SamplingParams(temperature=0.0),
        "generator": None,
        "block_ids": ([0],),
        "num_computed_tokens": 0,
        "output_token_ids": [],
    }
    known = inspect.signature(CachedRequestState).parameters
    return CachedRequestState(**{name: value for name, value in arguments.items() if name in known})


class Steps:
    """Some steps of an asynchronous runner, up to the counts that each request reads."""

    def __init__(self, rng: random.Random) -> None:
        self.rng = rng
        self.runner = SimpleNamespace(
            use_async_scheduling=True, num_accepted_tokens_event="event", input_batch=new_batch()
        )
        self.num_requests = 0
        self.truth: dict[str, int] = {}
        """The accepted drafts of each request that has sampled in the last step, plus one."""

    @property
    def batch(self) -> InputBatch:
        return self.runner.input_batch

    def run(self, update: Update) -> int:
        """The number of counts that are not the request's own."""
        num_wrong = 0
        for _ in range(NUM_STEPS):
            write = self._sampled()
            if write is None:
                self._change_rows(lambda: None)
            else:
                num_writes = self.rng.randrange(4)
                if num_writes == 0:
                    write()
                writes: Iterator[Callable[[], None]] = iter([write])

                def between(left: Iterator[Callable[[], None]] = writes) -> None:
                    if self.rng.random() < 0.3:
                        next(left, lambda: None)()

                update(self.runner, lambda between=between: self._change_rows(between))  # type: ignore[misc]
                next(writes, lambda: None)()
            num_wrong += self._num_wrong()
        return num_wrong

    def _sampled(self) -> Callable[[], None] | None:
        """Have the rows sample; return what the device does to the counts later."""
        rows = list(self.batch.req_ids)
        if not rows:
            return None
        counts = [self.rng.randrange(1, NUM_DRAFTS + 2) for _ in rows]
        in_prompt = {row for row in range(len(rows)) if self.rng.random() < 0.2}
        for row in in_prompt:
            counts[row] = 1
        self.truth = {name: counts[row] for row, name in enumerate(rows) if row not in in_prompt}
        self.batch.prev_req_id_to_index = {name: rows.index(name) for name in self.truth}

        def write() -> None:
            written = torch.tensor(counts, dtype=torch.int32)
            self.batch.num_accepted_tokens_cpu_tensor[: len(rows)] = written

        return write

    def _change_rows(self, between: Callable[[], None]) -> None:
        """Remove, add and move rows, like ``_update_states``."""
        batch = self.batch
        between()
        for name in list(batch.req_ids):
            if self.rng.random() < 0.3:
                batch.remove_request(name)
        between()
        while batch.num_reqs < NUM_ROWS and self.rng.random() < 0.5:
            self.num_requests += 1
            batch.add_request(new_request(f"request-{self.num_requests}"))
        between()
        batch.condense()
        between()
        for _ in range(self.rng.randrange(3)):
            if batch.num_reqs > 1:
                batch.swap_states(*self.rng.sample(range(batch.num_reqs), 2))
        between()
        if hasattr(batch, "refresh_metadata"):
            batch.refresh_metadata()

    def _num_wrong(self) -> int:
        """Read the counts like ``_prepare_inputs``: mapped by the rows of the last step, if any."""
        batch = self.batch
        names = list(batch.req_ids)
        if batch.prev_req_id_to_index:
            rows = np.array([batch.prev_req_id_to_index.get(name, -1) for name in names])
            found = batch.num_accepted_tokens_cpu[np.where(rows < 0, 0, rows)].copy()
            found[rows < 0] = 1
            batch.num_accepted_tokens_cpu[: len(names)] = found
        found = batch.num_accepted_tokens_cpu[: len(names)]
        return sum(
            int(count) != self.truth.get(name, 1) for name, count in zip(names, found, strict=True)
        )


def stock(runner: SimpleNamespace, change: Callable[[], None]) -> None:
    change()


def repaired(runner: SimpleNamespace, change: Callable[[], None]) -> None:
    leave_counts_behind(lambda _: change(), runner, None)  # type: ignore[arg-type]


def wrong_cases(update: Update) -> list[int]:
    return [seed for seed in range(NUM_CASES) if Steps(random.Random(seed)).run(update)]


def test_stock_reads_counts_of_other_requests() -> None:
    assert len(wrong_cases(stock)) > NUM_CASES / 10


def test_each_request_reads_its_own_count() -> None:
    assert not wrong_cases(repaired)


@pytest.mark.parametrize(
    "of_runner", [{"use_async_scheduling": False}, {"num_accepted_tokens_event": None}]
)
def test_counts_move_with_rows_that_are_read_where_they_are(of_runner: dict[str, Any]) -> None:
    """A synchronous runner reads counts without a mapping, so they have to move."""
    runner = SimpleNamespace(
        **{"use_async_scheduling": True, "num_accepted_tokens_event": "event"} | of_runner,
        input_batch=new_batch(),
    )
    batch = runner.input_batch
    for name in "ab":
        batch.add_request(new_request(name))
    batch.num_accepted_tokens_cpu[:2] = 3, 2
    repaired(runner, lambda: batch.swap_states(0, 1))
    assert list(batch.num_accepted_tokens_cpu[:2]) == [2, 3]


def test_the_counts_are_the_devices_again_after_a_failure() -> None:
    runner = SimpleNamespace(
        use_async_scheduling=True, num_accepted_tokens_event="event", input_batch=new_batch()
    )
    batch = runner.input_batch
    batch.add_request(new_request("a"))
    batch.prev_req_id_to_index = {"a": 0}

    def fail(_: Any) -> None:
        raise ValueError

    with pytest.raises(ValueError):
        leave_counts_behind(fail, runner, None)  # type: ignore[arg-type]
    batch.num_accepted_tokens_cpu_tensor[0] = 3
    assert batch.num_accepted_tokens_cpu[0] == 3
