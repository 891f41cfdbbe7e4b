# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vllm-ascend-kvext project
"""Random lives of requests that share prefixes, on the real block manager of a small pool.

Requests are admitted, prefilled in chunks, decoded, preempted, finished and aborted in any order,
under eviction. A hit is compared with a record of the tokens that were written to each block.
"""

from __future__ import annotations

import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule
from support.installed import retention_installed
from support.retention.checkpoints import adaptive_retention
from support.retention.started import retention_of
from support.scheduler.block_manager import BlockManager, Layout, full, window
from support.scheduler.releases import look_up
from vllm.v1.request import Request

NUM_BLOCKS = 60

LAYOUTS = {
    "plain": Layout((full(4), window(4, 9), window(4, 9, head_size=2))),
    "EAGLE": Layout((full(8), window(4, 7), window(2, 5)), frozenset({1})),
    "EAGLE on full": Layout((full(8), window(4, 7)), frozenset({0})),
    "wide": Layout((full(8), window(2, 15)), frozenset({1})),
}


class Lives(RuleBasedStateMachine):
    """One block manager. Subclasses choose the layout and the interval."""

    layout: Layout
    interval: int | None

    def __init__(self) -> None:
        super().__init__()
        self.world = BlockManager(self.layout, self.interval, NUM_BLOCKS)
        self.retention = retention_of(self.world.manager.coordinator)
        self.null_references = self.world.pool.null_block.ref_cnt
        self.waiting: list[Request] = []
        self.running: list[Request] = []
        self.written: dict[int, tuple[int, ...]] = {}
        """By block id, the prompt's tokens up to the end of the last write."""

    @property
    def groups(self):
        return (*self.retention.full_groups, *self.retention.sparse_groups)

    @rule(
        prompt=st.lists(st.sampled_from([0, 0, 0, 1]), min_size=1, max_size=60),
        repeat=st.booleans(),
    )
    def arrive(self, prompt: list[int], repeat: bool) -> None:
        if repeat:
            prompt = [0] * len(prompt)
        self.waiting.append(self.world.request(prompt))

    @precondition(lambda self: self.waiting)
    @rule(chunk_tokens=st.integers(1, 70))
    def admit(self, chunk_tokens: int) -> None:
        request = self.waiting[0]
        manager = self.world.manager
        blocks, hit_tokens = look_up(manager, request)
        num_new_tokens = min(chunk_tokens, request.num_tokens - hit_tokens)
        if manager.allocate_slots(request, num_new_tokens, hit_tokens, blocks) is None:
            return
        self.running.append(self.waiting.pop(0))
        self.check_hit(request, hit_tokens)
        request.num_computed_tokens = hit_tokens
        self.write(request, num_new_tokens)

    @precondition(lambda self: self.running)
    @rule(data=st.data(), chunk_tokens=st.integers(1, 70))
    def step(self, data: st.DataObject, chunk_tokens: int) -> None:
        request = data.draw(st.sampled_from(self.running))
        if request.num_computed_tokens == request.num_tokens:
            request.append_output_token_ids(0)
        num_new_tokens = min(chunk_tokens, request.num_tokens - request.num_computed_tokens)
        if self.world.manager.allocate_slots(request, num_new_tokens) is not None:
            self.write(request, num_new_tokens)

    @precondition(lambda self: self.running)
    @rule(data=st.data())
    def preempt(self, data: st.DataObject) -> None:
        self.preempt_what_was_just_scheduled(data, 0)

    @precondition(lambda self: self.running)
    @rule(data=st.data(), scheduled_tokens=st.integers(1, 20))
    def preempt_what_was_just_scheduled(self, data: st.DataObject, scheduled_tokens: int) -> None:
        """Preempt by priority, within one step. So tokens are cached, but never computed."""
        request = data.draw(st.sampled_from(self.running))
        num_new_tokens = min(scheduled_tokens, request.num_tokens - request.num_computed_tokens)
        if num_new_tokens and self.world.manager.allocate_slots(request, num_new_tokens) is None:
            return
        self.running.remove(request)
        self.world.preempt(request)
        self.waiting.insert(0, request)

    @precondition(lambda self: self.running)
    @rule(data=st.data())
    def finish(self, data: st.DataObject) -> None:
        request = data.draw(st.sampled_from(self.running))
        self.running.remove(request)
        self.world.finish(request)

    @precondition(lambda self: self.waiting)
    @rule()
    def abort(self) -> None:
        self.world.finish(self.waiting.pop())

    @precondition(lambda self: not self.running)
    @rule()
    def reset(self) -> None:
        self.world.reset()

    def write(self, request: Request, num_tokens: int) -> None:
        """Compute the next tokens. Each block then holds the tokens up to its end."""
        first = request.num_computed_tokens
        request.num_computed_tokens += num_tokens
        for group in self.groups:
            blocks = group.manager.req_to_blocks[request.request_id]
            for position in range(first, request.num_computed_tokens):
                block = blocks[position // group.block_tokens]
                if not block.is_null:
                    self.written[block.block_id] = tuple(request.all_token_ids[: position + 1])

    def check_hit(self, request: Request, hit_tokens: int) -> None:
        """Every block that the first new token reads holds the request's own tokens."""
        for group in self.groups:
            blocks = group.manager.req_to_blocks[request.request_id]
            skipped_tokens = group.manager.get_num_skipped_tokens(hit_tokens)
            for i in range(skipped_tokens // group.block_tokens, hit_tokens // group.block_tokens):
                tokens = tuple(request.all_token_ids[: (i + 1) * group.block_tokens])
                assert not blocks[i].is_null
                assert self.written[blocks[i].block_id] == tokens

    @invariant()
    def null_block_is_left_alone(self) -> None:
        null_block = self.world.pool.null_block
        assert null_block.ref_cnt == self.null_references
        assert null_block not in self.world.pool.free_block_queue.get_all_free_blocks()

    @invariant()
    def no_block_is_lost(self) -> None:
        free = self.world.pool.free_block_queue.get_all_free_blocks()
        assert len(free) == len({block.block_id for block in free})
        assert len(free) == self.world.pool.get_num_free_blocks()
        referenced = [b for b in self.world.pool.blocks if b.ref_cnt > 0 and not b.is_null]
        assert len(free) + len(referenced) == NUM_BLOCKS - 1

    @invariant()
    def nothing_is_remembered_of_requests_that_are_gone(self) -> None:
        alive = {request.request_id for request in self.waiting + self.running}
        assert set(self.retention._request_states) <= alive


@pytest.mark.parametrize("interval_units", [None, 0, 2], ids=["adaptive", "0", "2 units"])
@pytest.mark.parametrize("layout_name", LAYOUTS)
def test_lives(layout_name: str, interval_units: int | None) -> None:
    layout = LAYOUTS[layout_name]
    unit_tokens = max(spec.block_size for spec in layout.specs)

    class LivesOfLayout(Lives):
        pass

    LivesOfLayout.layout = layout
    is_adaptive = interval_units is None
    LivesOfLayout.interval = None if is_adaptive else interval_units * unit_tokens
    machine = LivesOfLayout.TestCase
    machine.settings = settings(
        max_examples=40,
        stateful_step_count=60,
        suppress_health_check=list(HealthCheck),
    )
    with adaptive_retention() if is_adaptive else retention_installed():
        machine().runTest()
