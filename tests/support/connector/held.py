# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vllm-ascend-kvext project
"""Lists what a scheduler side holds for requests at one moment, to find leaks."""

from __future__ import annotations

from dataclasses import dataclass

from vllm_ascend_kvext.connector.scheduler.connector_scheduler import ConnectorScheduler
from vllm_ascend_kvext.segments.scheduler.segments_side import segments_of


@dataclass(frozen=True, slots=True)
class Held:
    """What a scheduler side holds. The defaults mean nothing.

    Attributes:
        request_ids: Requests that the side remembers.
        pinned_ids: Requests that pin entries of the tier.
        loading_ids: Requests whose load is under way.
        hole_ids: Requests with holes that are not computed yet.
        loaded_hole_ids: Requests of ``hole_ids`` whose load has ended.
        num_planned_stores: Stores that have not begun.
        num_stores: Stores that workers make.
        num_referenced_blocks: Blocks that are protected from being reallocated. A block that is
            referenced twice counts twice.
        num_awaited_blocks: Blocks that stores of segments will reference.
        num_begun_segments: Segments that the engine's own requests compute, or that workers store
            for these requests. Queued segments do not count.
    """

    request_ids: frozenset[str] = frozenset()
    pinned_ids: frozenset[str] = frozenset()
    loading_ids: frozenset[str] = frozenset()
    hole_ids: frozenset[str] = frozenset()
    loaded_hole_ids: frozenset[str] = frozenset()
    num_planned_stores: int = 0
    num_stores: int = 0
    num_referenced_blocks: int = 0
    num_awaited_blocks: int = 0
    num_begun_segments: int = 0


def held_by(side: ConnectorScheduler) -> Held:
    """List what a scheduler side holds at this moment."""
    states = side._states
    parked = side.holes._parked
    room = side._room
    loading = {each for each, state in states.items() if state.under_way is not None}
    pinned = {each for each, state in states.items() if state.admission.pinned is not None}
    request_ids = {*states, *parked, *room._parked} | {room._first_waiting_id} - {None}
    request_ids |= {new.request_id for new in side.holes._new_holes}
    request_ids |= {job.request_id for job in side._step_loads}
    request_ids |= side.holes._tables.keys()
    num_awaited_blocks = num_begun_segments = 0
    segments = segments_of(side)
    if segments is not None:
        blended, stores = segments.blended, segments.stores
        request_ids |= {*blended._states, *stores._segments}
        request_ids |= {*blended._windows._held, *blended._probed.values()}
        num_awaited_blocks = stores._num_expected_blocks
        if segments.questions is not None:
            request_ids |= segments.questions._compared.keys()
        if (learning := segments.learning) is not None:
            request_ids.update(learning.request_ids)
            num_queued = len(learning._queue) + len(learning._behind_contexts)
            num_known = len(learning._known) - num_queued
            num_begun_segments = max(num_known, len(learning._begun))
    return Held(
        request_ids=frozenset(request_ids),
        pinned_ids=frozenset(loading | pinned),
        loading_ids=frozenset(loading),
        hole_ids=frozenset(parked),
        loaded_hole_ids=frozenset(each for each, hole in parked.items() if hole.is_loaded),
        num_planned_stores=len(side._stores.queue) + len(side._swaps),
        num_stores=len(side._jobs._under_way),
        num_referenced_blocks=side.references.num_references,
        num_awaited_blocks=num_awaited_blocks,
        num_begun_segments=num_begun_segments,
    )
