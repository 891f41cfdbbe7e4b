# SPDX-License-Identifier: Apache-2.0
"""What state machines of a simulated engine share: steps, pauses, what is lost, the end."""

from __future__ import annotations

import random
from typing import Any

from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, precondition, rule
from vllm.v1.core.sched.interface import PauseState
from vllm.v1.request import Request, RequestStatus

from support.connector.paged_layouts import PagedLayout
from support.scheduler.workload import RequestPlan
from vllm_ascend_kvext.store.counters import Removal


class NoEstimates:
    """Costs of an engine that has measured nothing: what is swapped does not depend on clocks."""

    def compute_s(self, num_tokens: int) -> None:
        del num_tokens

    def load_s(self, num_bytes: int) -> float:
        del num_bytes
        return 0.0

    def note(self, *measured: float) -> None:
        pass

    note_copies = note_load = note_step = note


def blocks_of_longest(layout: PagedLayout, most_tokens: int) -> int:
    """Blocks without which vLLM may never admit a request: all of its windows' are counted.

    Args:
        most_tokens: Of a prompt and its answer.
    """
    return sum(-(-most_tokens // group.block_tokens) + 2 for group in layout.groups)


class EngineMachine(RuleBasedStateMachine):
    """One engine, and those who use it.

    Attributes:
        engine: A ``SimulatedEngine``; None until the machine has begun.
        plans: Of the requests so far.
        num_plans: Their number.
        is_well: Whether nothing has been found wrong.
    """

    def __init__(self) -> None:
        super().__init__()
        self.engine: Any = None
        self.plans: dict[str, RequestPlan] = {}
        self.num_plans = 0
        self.is_well = False

    def _step(self) -> None:
        """A step, and what is checked after it."""
        raise NotImplementedError

    def _end(self) -> None:
        """Serve all requests to their ends, and check what is left."""
        raise NotImplementedError

    @rule(num_steps=st.sampled_from([1, 2, 3, 6, 12, 40]))
    def go_on(self, num_steps: int) -> None:
        for _ in range(num_steps):
            self._step()

    @rule()
    def go_on_once(self) -> None:
        self._step()

    @rule(state=st.sampled_from([PauseState.PAUSED_ALL, PauseState.PAUSED_NEW]))
    def step_paused(self, state: PauseState) -> None:
        scheduler = self.engine.scheduler
        scheduler.set_pause_state(state)
        for _ in range(3):
            self._step()
        scheduler.set_pause_state(PauseState.UNPAUSED)

    @rule(share=st.sampled_from([0.1, 0.3]), seed=st.integers(0, 99))
    def evict(self, share: float, seed: int) -> None:
        self._evict(share, random.Random(seed))

    @precondition(lambda self: self.engine.options.caching)
    @rule(share=st.sampled_from([0.2, 1.0]), seed=st.integers(0, 99))
    def evict_on_device(self, share: float, seed: int) -> None:
        self._evict_on_device(share, random.Random(seed))

    def teardown(self) -> None:
        if self.engine is None:
            return
        try:
            if self.is_well:
                self._end()
        finally:
            self.engine.shutdown()

    def _evict(self, share: float, rng: random.Random) -> None:
        tier = self.engine.tier
        for entry in list(tier._entries.values()):
            if entry.is_evictable and rng.random() < share:
                tier._remove(entry, Removal.EVICTED)

    def _evict_on_device(self, share: float, rng: random.Random) -> None:
        pool = self.engine.block_pool
        cached = [block.block_id for block in pool.blocks if block.block_hash is not None]
        pool.evict_blocks({block_id for block_id in cached if rng.random() < share})

    def _live(self) -> list[Request]:
        return [r for r in self.engine.scheduler.requests.values() if not r.is_finished()]

    def _can_restart_running(self) -> bool:
        """Not while a load writes to blocks."""
        scheduler = self.engine.scheduler
        loaded = scheduler.finished_recving_kv_req_ids
        return all(
            request.request_id in loaded or self._waits_for_holes_alone(request.request_id)
            if request.status is RequestStatus.WAITING_FOR_REMOTE_KVS
            else not request.is_finished()
            for request in scheduler.requests.values()
        )

    def _waits_for_holes_alone(self, request_id: str) -> bool:
        holes = self.engine.side._holes
        parked = holes._parked.get(request_id) if holes is not None else None
        return parked is not None and parked.is_loaded
