# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vllm-ascend-kvext project
"""Random lives of requests whose questions are probed, on vLLM's real scheduler.

No model computes: scores are random, and some are missing. Requests are aborted and the prefix
cache is reset before, during and after the computation of questions. The test does not check the
contents of pages. It checks that all requests end, and that nothing is left of them.
"""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
import pytest
from support.connector import simulated_engine
from support.connector.offload_run import check_blocks, check_nothing_is_left, offloading_installed
from support.connector.offload_workloads import offloading, tokens
from support.connector.paged_layouts import FULL, GEMMA, GPT_OSS, PagedLayout
from support.connector.scripted_transfers import TransferScript
from support.connector.simulated_engine import PagedModelRunner, SimulatedEngine
from support.connector.simulated_segments import SimulatedSegments
from support.sample import IS_LONG
from support.scheduler.options import EngineOptions
from support.scheduler.workload import RequestPlan
from vllm.v1.outputs import ModelRunnerOutput
from vllm.v1.request import RequestStatus

from vllm_ascend_kvext.segments.messages import ProbeJob
from vllm_ascend_kvext.segments.prompt_segments import SEGMENTS_KEY, STORE_KEY
from vllm_ascend_kvext.segments.scheduler import make_segments
from vllm_ascend_kvext.segments.scheduler.segments_side import segments_of

NUM_LIVES = 12 if IS_LONG else 6
"""The number of lives of each layout."""

NUM_STEPS = 150
MAX_STEPS_TO_THE_END = 1500
MAX_LIVE_REQUESTS = 10
STEP_S = 0.2
DOCUMENTS = [
    tokens(random.Random(f"document {n}"), length) for n, length in enumerate((40, 64, 90))
]
DISTURBANCES = ("aborts with an open question", "resets while a question is computed")
ANSWER = 7
"""The token that each step samples."""


class RandomScores:
    """A `QuestionProbe` that knows no keys."""

    def __init__(self, rng: random.Random) -> None:
        self._rng = rng
        self._jobs: Sequence[ProbeJob] = ()
        self.pages: Any = None

    def begin_step(self, jobs: Sequence[ProbeJob]) -> None:
        self._jobs = jobs

    def end_step(self) -> dict[str, Any]:
        jobs, self._jobs = self._jobs, ()
        return {job.row_id: self._scores_of(job) for job in jobs}

    def _scores_of(self, job: ProbeJob) -> Any:
        if self._rng.random() < 0.1:
            return None
        num_scored = sum(each.num_tokens for each in job.scored)
        return np.array([self._rng.random() for _ in range(num_scored)], np.float32)

    def shutdown(self) -> None:
        pass


def execute(runner: Any, scheduled: Any) -> ModelRunnerOutput:
    """A step without a model."""
    for worker in runner._workers:
        worker.begin(scheduled)
    rows = [*scheduled.num_scheduled_tokens]
    requests = runner.scheduler.requests
    answered = [
        [ANSWER]
        if row in requests and requests[row].num_computed_tokens >= requests[row].num_tokens
        else []
        for row in rows
    ]
    outputs = [
        ModelRunnerOutput(
            req_ids=rows,
            req_id_to_index={row: place for place, row in enumerate(rows)},
            sampled_token_ids=answered,
            kv_connector_output=worker.end(scheduled),
        )
        for worker in runner._workers
    ]
    return runner._aggregator.aggregate(outputs) if len(outputs) > 1 else outputs[0]


class Life:
    """One engine, and the requests that it gets."""

    def __init__(self, layout: PagedLayout, seed: int) -> None:
        self.rng = rng = random.Random(f"{layout.name}/{seed}")
        self.counts: Counter[str] = Counter()
        self.num_requests = 0
        self.num_steps = 0
        segments = {
            "selector": "question",
            "sink": rng.choice([[5], [], None]),
            "head_tokens": rng.choice([0, 4]),
            "ratio": rng.choice([0.0, 0.2, 0.9]),
            "learn": rng.choice([False, True]),
        }
        max_tokens = 3 * 90 + 64
        pages = max_tokens // layout.groups[0].block_tokens + 3
        options = EngineOptions(
            num_blocks=pages * (2 * len(layout.groups) - 1) * rng.choice([1, 2, 6]) + 1,
            max_num_seqs=rng.choice([2, 4, 8]),
            max_num_batched_tokens=rng.choice([24, 64, 256]),
            is_async=rng.random() < 0.7,
            caching=rng.random() < 0.7,
            num_workers=rng.choice([1, 1, 2]),
            offloading=offloading(layout, segments=segments),
        )
        script = TransferScript(
            seed=seed,
            failing_loads=rng.choice([0.0, 0.3]),
            failing_stores=rng.choice([0.0, 0.2]),
            max_per_step=rng.choice([None, 1]),
        )
        self.engine = SimulatedEngine(layout, options, script)
        self.engine.clock = lambda: self.num_steps * STEP_S
        self.engine.runner.scheduler = self.engine.scheduler
        found = segments_of(self.engine.side)
        assert found is not None and found.questions is not None
        self.segments = found

    def ask(self) -> None:
        rng = self.rng
        prompt = tokens(rng, rng.randint(0, 12))
        segments = []
        for document in rng.choices(DOCUMENTS, k=rng.randint(1, 3)):
            segments.append([len(prompt), len(prompt) + len(document)])
            prompt += [*document, *tokens(rng, rng.randint(0, 4))]
        prompt += tokens(rng, rng.randint(0, 20))
        more = {"kvext_explain": True} if rng.random() < 0.5 else {}
        more |= {"kvext_store": False} if rng.random() < 0.2 else {}
        self.add(prompt, {SEGMENTS_KEY: segments, **more})

    def add(self, prompt: Sequence[int], extra_args: dict[str, Any]) -> None:
        self.num_requests += 1
        plan = RequestPlan(
            request_id=f"request-{self.num_requests}",
            arrival_step=0,
            prompt=tuple(prompt),
            max_tokens=self.rng.randint(1, 6),
            extra_args=tuple(extra_args.items()),
        )
        self.engine.add_request(plan)

    def live(self) -> None:
        for document in DOCUMENTS:
            self.add(document, {STORE_KEY: True})
        for _ in range(NUM_STEPS):
            self.happen()
            self.check()
            self.step()
        for _ in range(MAX_STEPS_TO_THE_END):
            if not self.engine.has_work():
                break
            self.step()
        left = {id: each.status.name for id, each in self.engine.scheduler.requests.items()}
        assert not self.engine.has_work(), f"left are {left}"
        check_nothing_is_left(self.engine)
        counters = self.segments.counters
        self.counts["reused tokens"] += counters.reused_tokens
        self.counts["probes with scores"] += counters.scored_probes
        self.counts["probes without"] += counters.lost_probes

    def happen(self) -> None:
        engine, rng = self.engine, self.rng
        requests = [each for each in engine.scheduler.requests.values() if not each.is_finished()]
        if rng.random() < 0.3 and len(requests) < MAX_LIVE_REQUESTS:
            self.ask()
        if rng.random() < 0.08 and requests:
            blended = self.segments.blended
            asking = [
                each
                for each in requests
                if (state := blended._states.get(each.request_id)) and state.preview is not None
            ]
            request = rng.choice(asking or requests)
            self.counts["aborts with an open question"] += request in asking
            engine.abort(request.request_id)
        is_computed = bool(self.segments.blended._probed)
        if rng.random() < (0.2 if is_computed else 0.02):
            self.counts["resets while a question is computed"] += is_computed
            self.reset()
        if rng.random() < 0.05:
            engine.tier.evict(lambda entry: rng.random() < 0.2)
            if rng.random() < 0.3:
                self.add(rng.choice(DOCUMENTS), {STORE_KEY: True})

    def reset(self) -> None:
        engine = self.engine
        waits = RequestStatus.WAITING_FOR_REMOTE_KVS
        loaded = engine.scheduler.finished_recving_kv_req_ids | engine.held.loaded_hole_ids
        may_restart = all(
            request.request_id in loaded if request.status is waits else not request.is_finished()
            for request in engine.scheduler.requests.values()
        )
        restarts = may_restart and self.rng.random() < 0.8
        self.counts["resets of running requests"] += restarts
        assert engine.reset(restarts, self.rng.random() < 0.1) or not restarts

    def step(self) -> None:
        engine = self.engine
        self.num_steps += 1
        if not engine.has_work():
            return
        engine.step()
        check_blocks(engine)
        self.check()

    def check(self) -> None:
        """An ended request may be remembered only if it was aborted during its load, as in vLLM."""
        engine = self.engine
        gone = engine.held.request_ids - engine.scheduler.requests.keys()
        assert not gone, f"requests that are gone are remembered: {gone}"


@pytest.fixture(scope="module", autouse=True)
def patches_installed() -> Iterator[None]:
    with offloading_installed():
        yield


@pytest.mark.parametrize("layout", [FULL, GPT_OSS, GEMMA], ids=lambda layout: layout.name)
def test_random_lives_with_questions(layout: PagedLayout, monkeypatch: pytest.MonkeyPatch) -> None:
    scores = RandomScores(random.Random(layout.name))
    monkeypatch.setattr(SimulatedSegments, "probe", lambda *_: scores, raising=False)
    monkeypatch.setattr(PagedModelRunner, "execute", execute)
    monkeypatch.setattr(simulated_engine, "_compute", lambda *_: None)
    monkeypatch.setattr(make_segments, "MIN_REUSED_TOKENS", 8)
    counts: Counter[str] = Counter()
    for seed in range(NUM_LIVES):
        life = Life(layout, seed)
        try:
            life.live()
        finally:
            life.engine.shutdown()
        counts += life.counts
    for name in ("reused tokens", "probes with scores", "probes without", *DISTURBANCES):
        assert counts[name], (name, counts)
