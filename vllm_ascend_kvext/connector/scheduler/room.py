# SPDX-License-Identifier: Apache-2.0
"""Keeps loads from filling the pool with requests none of which can go on.

A request that loads is *parked*: it holds blocks and computes nothing, and vLLM never preempts it.
If parked requests alone hold so much that the next chunk of none of them fits, the engine stands
still. So a load begins only if each parked request could go on while the others stay parked. vLLM's
own check (``_request_remaining_blocks``) does not count windows and states beyond the first chunk.
On Ascend a chunk of 2,048 tokens takes some 360 blocks of them.

Whoever is tried has to be admitted: behind a request that is not, vLLM tries nobody. What it asks
for then (``allocate_slots``, ``full_sequence_must_fit``) counts a window and a step of each group
with windows, from 0.30 on all steps in flight, as far as the request has not got these pages.
"""

from __future__ import annotations

import enum
from collections.abc import Sequence
from dataclasses import dataclass

from vllm_ascend_kvext.connector.common.scheduler_view import SchedulerView
from vllm_ascend_kvext.groups.model import GroupKind
from vllm_ascend_kvext.layout.model import LayoutGroup

Holes = Sequence[tuple[int, int]]
"""First and end token of each, ascending."""


class Room(enum.Enum):
    """Whether a request may load."""

    YES = "yes"

    LATER = "later"
    """When parked requests have gone on."""

    NEVER = "never"
    """Not even if it were the only one."""


@dataclass(frozen=True, slots=True)
class _Parked:
    """Blocks of a request.

    Attributes:
        held: While it is parked.
        missing: Those that it needs besides to compute the rest, chunk by chunk.
    """

    held: int
    missing: int


class PoolRoom:
    """The room of one pool.

    Attributes:
        num_blocks: Blocks that can be free at once.
        version: Another number whenever a load may begin that could not before.
    """

    def __init__(self, groups: Sequence[LayoutGroup], view: SchedulerView) -> None:
        # Transfer groups of one KV cache group share its blocks.
        self._groups = {group.kv_cache_group_id: group for group in groups}.values()
        self.num_blocks = view.num_blocks - 1  # without the null block
        self._view = view
        self._parked: dict[str, _Parked] = {}
        self._first_waiting_id: str | None = None
        self._was_first_asked = False
        self.version = 0

    @property
    def num_parked(self) -> int:
        return len(self._parked)

    def blocks_of_load(self, num_tokens: int, boundary_tokens: int, holes: Holes = ()) -> int:
        """Blocks that a request takes at most when its load begins; arguments as of `of_load`."""
        return self._needs(num_tokens, boundary_tokens, holes).held

    def of_load(
        self, request_id: str, num_tokens: int, boundary_tokens: int, holes: Holes = ()
    ) -> Room:
        """Whether a load may begin. If the request has to wait, later ones wait behind it.

        Args:
            num_tokens: Length of the request.
            boundary_tokens: Where it would resume.
            holes: What is computed before it resumes.
        """
        needs = self._needs(num_tokens, boundary_tokens, holes)
        if needs.held + needs.missing > self.num_blocks:
            return Room.NEVER
        if self.is_behind_other(request_id):
            return Room.LATER
        held = needs.held + sum(parked.held for parked in self._parked.values())
        missing = max([needs.missing, *(parked.missing for parked in self._parked.values())])
        if held + missing <= self.num_blocks:
            return Room.YES
        self._first_waiting_id = request_id
        self.keep_turn(request_id)
        return Room.LATER

    def is_behind_other(self, request_id: str) -> bool:
        """Whether an earlier request waits for room: no load of this one may begin."""
        return self._first_waiting_id not in (None, request_id)

    def keep_turn(self, request_id: str) -> None:
        """A request that waits is still asked about."""
        self._was_first_asked |= self._first_waiting_id == request_id

    def end_step(self) -> None:
        """A step is planned: whoever was not asked about waits for something else first."""
        if not self._was_first_asked and self._first_waiting_id is not None:
            self.withdraw(self._first_waiting_id)
        self._was_first_asked = False

    def of_other(self, num_tokens: int) -> Room:
        """Whether a request that loads nothing may be tried.

        vLLM tries no later request if this one does not fit: parked ones would wait behind it.
        """
        if not self._parked or self._view.num_running():
            return Room.YES
        num_free = self._view.block_pool.get_num_free_blocks()
        return Room.YES if self._needs(num_tokens, 0).missing <= num_free else Room.LATER

    def park(
        self, request_id: str, num_tokens: int, boundary_tokens: int, holes: Holes = ()
    ) -> None:
        """A request has got blocks for a load; arguments as of `of_load`."""
        self._parked[request_id] = self._needs(num_tokens, boundary_tokens, holes)
        self.withdraw(request_id)

    def unpark(self, request_id: str) -> None:
        """A request computes, or has ended."""
        self.release(request_id)
        self.withdraw(request_id)

    def release(self, request_id: str) -> None:
        """A request holds no blocks: it is to be admitted, perhaps after a load that failed."""
        if self._parked.pop(request_id, None) is not None:
            self.version += 1

    def withdraw(self, request_id: str) -> None:
        """A request does not wait for room any more."""
        if self._first_waiting_id == request_id:
            self._first_waiting_id = None
            self.version += 1

    def _needs(self, num_tokens: int, boundary_tokens: int, holes: Holes = ()) -> _Parked:
        held = missing = of_hole = 0
        step_tokens = self._view.max_num_batched_tokens
        max_tokens = step_tokens * self._view.num_steps_in_flight
        chunk_tokens = min(max_tokens, num_tokens - boundary_tokens)
        hole_tokens = min(step_tokens, max([end - first for first, end in holes], default=0))
        for group in self._groups:
            tokens_per_page = group.tokens_per_page
            end_page = -(-boundary_tokens // tokens_per_page)
            if group.kind is GroupKind.FULL:
                held += end_page
                missing += -(-num_tokens // tokens_per_page) - end_page
                continue
            window_pages = -(-max(1, group.window_tokens) // tokens_per_page) + 1
            held += min(end_page, window_pages)
            # vLLM tries nobody behind a request for which it lacks as many as this.
            admitted_tokens = min(num_tokens, group.window_tokens - 1 + max_tokens)
            admitted = min(
                -(-num_tokens // tokens_per_page), -(-admitted_tokens // tokens_per_page) + 1
            )
            missing += max(-(-chunk_tokens // tokens_per_page) + 1, admitted - end_page)
            # Holes are computed one after the other, in blocks of their own.
            of_hole += -(-hole_tokens // tokens_per_page) + 1
            held += sum(min(-(-first // tokens_per_page), window_pages) for first, _ in holes)
        return _Parked(held, max(missing, of_hole) if holes else missing)
