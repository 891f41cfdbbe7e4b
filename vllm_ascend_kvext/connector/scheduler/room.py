# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vllm-ascend-kvext project
"""Keeps loads from filling the pool with requests of which none can go on.

A request that loads is *parked*: it holds blocks and computes nothing, and vLLM never preempts it.
If parked requests hold so many blocks that no next chunk fits, the engine stands still. So a load
begins only if each parked request could go on while the others stay parked. vLLM's own check
(``_request_remaining_blocks``) does not count windows and states beyond the first chunk. On Ascend,
a chunk of 2,048 tokens takes some 360 blocks of windows and states.

Each request that vLLM tries to admit should fit. If a request does not fit, vLLM tries no request
behind it. vLLM's admission (``allocate_slots``, ``full_sequence_must_fit``) counts a window and a
step for each group with windows, and since 0.30 all steps in flight. vLLM does not count pages that
the request has already.
"""

from __future__ import annotations

import enum
from collections.abc import Sequence
from dataclasses import dataclass

from vllm_ascend_kvext.connector.common.block_references import BlockReferences
from vllm_ascend_kvext.connector.common.scheduler_view import SchedulerView
from vllm_ascend_kvext.groups.model import GroupKind
from vllm_ascend_kvext.layout.model import LayoutGroup

Holes = Sequence[tuple[int, int]]
"""The first and the end token of each hole, ascending."""


class Room(enum.Enum):
    """Whether a request may load."""

    YES = "yes"
    """The load may begin now."""

    LATER = "later"
    """The load may begin when parked requests have gone on."""

    NEVER = "never"
    """The load does not fit even if it were the only one."""


@dataclass(frozen=True, slots=True)
class _Parked:
    """The blocks of a request.

    Attributes:
        held: The blocks that it holds while it is parked.
        missing: The further blocks that it needs to compute the rest, chunk by chunk.
    """

    held: int
    missing: int


class PoolRoom:
    """The room of one pool.

    Attributes:
        num_blocks: The number of blocks that can be free at the same time.
        version: A number that changes whenever a load may begin that could not begin before.
    """

    def __init__(
        self, groups: Sequence[LayoutGroup], view: SchedulerView, references: BlockReferences
    ) -> None:
        # Transfer groups of one KV cache group share its blocks.
        self._groups = {group.kv_cache_group_id: group for group in groups}.values()
        self.num_blocks = view.num_blocks - 1  # The null block is never free.
        self._view = view
        self._references = references
        self._parked: dict[str, _Parked] = {}
        self._first_waiting_id: str | None = None
        self._was_first_asked = False
        self.version = 0

    @property
    def num_parked(self) -> int:
        return len(self._parked)

    def blocks_of_load(self, num_tokens: int, boundary_tokens: int, holes: Holes = ()) -> int:
        """The most blocks that a request takes when its load begins. Arguments: see `of_load`."""
        return self._needs(num_tokens, boundary_tokens, holes).held

    def of_load(
        self, request_id: str, num_tokens: int, boundary_tokens: int, holes: Holes = ()
    ) -> Room:
        """Whether a load may begin. If the request must wait, later requests wait behind it.

        Args:
            request_id: The request.
            num_tokens: Its length.
            boundary_tokens: Where it would resume.
            holes: The holes that are computed before it resumes.
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
        """Whether an earlier request waits for room. If so, no load of this request may begin."""
        return self._first_waiting_id not in (None, request_id)

    def keep_turn(self, request_id: str) -> None:
        """Note that a waiting request was asked about in this step, so that it keeps its turn."""
        self._was_first_asked |= self._first_waiting_id == request_id

    def end_step(self) -> None:
        """End the planning of a step.

        If the first waiting request was not asked about in this step, it waits for something else,
        and loses its turn.
        """
        if not self._was_first_asked and self._first_waiting_id is not None:
            self.withdraw(self._first_waiting_id)
        self._was_first_asked = False

    def of_other(self, num_tokens: int) -> Room:
        """Whether vLLM may try to admit a request that loads nothing.

        If this request does not fit, vLLM tries no later request, and parked requests would wait
        behind it.
        """
        if not self._parked or self._view.num_running():
            return Room.YES
        has_room = self._references.make_free(self._needs(num_tokens, 0).missing)
        return Room.YES if has_room else Room.LATER

    def park(
        self, request_id: str, num_tokens: int, boundary_tokens: int, holes: Holes = ()
    ) -> None:
        """Note that a request has got blocks for a load. Arguments: see `of_load`."""
        self._parked[request_id] = self._needs(num_tokens, boundary_tokens, holes)
        self.withdraw(request_id)

    def unpark(self, request_id: str) -> None:
        """Note that a request computes, or has ended."""
        self.release(request_id)
        self.withdraw(request_id)

    def release(self, request_id: str) -> None:
        """Note that a request holds no blocks, because it is to be admitted (again)."""
        if self._parked.pop(request_id, None) is not None:
            self.version += 1

    def withdraw(self, request_id: str) -> None:
        """Note that a request does not wait for room any more."""
        if self._first_waiting_id == request_id:
            self._first_waiting_id = None
            self.version += 1

    def _needs(self, num_tokens: int, boundary_tokens: int, holes: Holes = ()) -> _Parked:
        held = 0
        missing = 0
        of_hole = 0
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
            # If fewer blocks than these are free, vLLM admits neither this request nor a later
            # request.
            admitted_tokens = min(num_tokens, group.window_tokens - 1 + max_tokens)
            admitted = min(
                -(-num_tokens // tokens_per_page), -(-admitted_tokens // tokens_per_page) + 1
            )
            missing += max(-(-chunk_tokens // tokens_per_page) + 1, admitted - end_page)
            # Holes are computed one after the other, in their own blocks.
            of_hole += -(-hole_tokens // tokens_per_page) + 1
            held += sum(min(-(-first // tokens_per_page), window_pages) for first, _ in holes)
        return _Parked(held, max(missing, of_hole) if holes else missing)
