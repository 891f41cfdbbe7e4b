# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vllm-ascend-kvext project
"""Very many requests on one engine whose transfers are slow, fail, and belong to aborted requests.

The pool is small, so stores give way, begin late, and hold blocks that others lack. At the end
nothing may be held. The long tests serve 20,000 requests.
"""

from __future__ import annotations

import random
from collections import Counter

import pytest
from support.connector.engines import engine_of
from support.connector.offload_run import check_blocks, check_nothing_is_left
from support.connector.offload_workloads import chats, offloading
from support.connector.paged_layouts import GPT_OSS, PagedLayout
from support.connector.scripted_transfers import TransferScript
from support.connector.simulated_engine import SimulatedEngine
from support.connector.step_clock import StepClock
from support.sample import IS_LONG
from support.scheduler.workload import RequestPlan

from vllm_ascend_kvext.store.counters import Refusal

pytestmark = pytest.mark.usefixtures("offloading_in_effect")

NUM_REQUESTS = 20_000 if IS_LONG else 400
REQUESTS_PER_SPEED = NUM_REQUESTS // 20
"""After so many requests, transfers get another speed."""

STEPS_PER_TRANSFER = (None, 1, 3, 12, 50)
ABORTED_SHARE = 0.03
"""The share of steps before which a request is aborted."""

MAX_STEPS_PER_REQUEST = 100


class Soak:
    """The requests of one engine."""

    def __init__(self, engine: SimulatedEngine) -> None:
        self._engine = engine
        self._rng = random.Random("store soak")
        self._outputs: dict[str, list[int]] = {}
        self.counts: Counter[str] = Counter()

    def serve(self, plans: list[RequestPlan]) -> None:
        """Serve all requests. Answers are checked as they end."""
        engine = self._engine
        waiting = list(reversed(plans))
        while waiting or engine.has_work():
            while waiting and len(engine.scheduler.requests) < self._rng.randrange(1, 12):
                self.counts["requests"] += 1
                if not self.counts["requests"] % REQUESTS_PER_SPEED:
                    self._change_speed()
                engine.add_request(waiting.pop())
            if self._rng.random() < ABORTED_SHARE:
                self._abort_one()
            self._step()
            assert self.counts["steps"] < MAX_STEPS_PER_REQUEST * len(plans)

    def _change_speed(self) -> None:
        script = TransferScript(
            seed=self._rng.randrange(1 << 20),
            failing_stores=self._rng.choice((0.0, 0.1)),
            failing_loads=self._rng.choice((0.0, 0.1)),
            steps_per_transfer=self._rng.choice(STEPS_PER_TRANSFER),
        )
        for worker in self._engine.workers:
            worker.transfers._script = script

    def _abort_one(self) -> None:
        live = [r for r in self._engine.scheduler.requests.values() if not r.is_finished()]
        if live:
            request_id = self._rng.choice(live).request_id
            self.counts["aborts"] += self._engine.abort(request_id)
            self._outputs.pop(request_id, None)

    def _step(self) -> None:
        engine = self._engine
        step = engine.step()
        self.counts["steps"] += 1
        self.counts["preemptions"] += len(step.preempted)
        for request_id, token_ids, finish_reason in step.outputs:
            self._outputs.setdefault(request_id, []).extend(token_ids)
            if finish_reason != "None":
                expected = engine.plans.pop(request_id).expected_output()
                assert self._outputs.pop(request_id) == expected, request_id
                self.counts["answers"] += 1
        if not self.counts["steps"] % 50:
            check_blocks(engine)
        if not engine.has_work():
            check_nothing_is_left(engine)


@pytest.mark.timeout(7200)
@pytest.mark.parametrize("layout", [GPT_OSS], ids=lambda layout: layout.name)
def test_nothing_is_held_after_many_requests(layout: PagedLayout) -> None:
    plans = list(chats(random.Random("store soak"), layout, NUM_REQUESTS))
    connector = offloading(layout, store_policy="second_touch")
    with engine_of(
        layout,
        num_blocks=30,
        max_num_batched_tokens=64,
        caching=True,
        is_async=True,
        num_workers=2,
        offloading=connector,
    ) as engine:
        StepClock(engine)
        soak = Soak(engine)
        soak.serve(plans)
        check_blocks(engine)
        check_nothing_is_left(engine)
        counters = engine.side.counters
        tier = counters.tier
        counts = soak.counts + Counter(
            {
                "stores": sum(tier.stored_entries.values()),
                "failed stores": tier.failed_stores,
                "hit requests": counters.hit_requests,
                "busy": tier.refused_stores[Refusal.BUSY],
            }
        )
        met = ["answers", "aborts", "stores", "failed stores", "busy", "preemptions"]
        assert all(counts[name] for name in [*met, "hit requests"]), counts
        assert counts["answers"] + counts["aborts"] == len(plans)
