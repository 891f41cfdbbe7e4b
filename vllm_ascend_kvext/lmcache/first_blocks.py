# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vllm-ascend-kvext project
"""The blocks that a request begins with, for LMCache's connector below `MultiConnector`.

vLLM 0.23's `MultiConnector` tells the blocks of a request (``update_state_after_alloc``) only to
the connector that loads the request. vLLM 0.30's `MultiConnector` tells all connectors. LMCache
0.5.6 relies on this call. Without it, LMCache takes the blocks of the next step for those of the
first tokens, and stores them under the first tokens.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any


def tell_first_blocks(request_trackers: Mapping[str, Any], scheduler_output: Any) -> None:
    """Let LMCache's trackers know the blocks of every request that begins in a step.

    Call it before LMCache plans the step. The output of vLLM's scheduler has all blocks of each
    request that begins, or that goes on after a preemption.
    """
    for request_id, group_block_ids in _beginning(scheduler_output):
        tracker = request_trackers.get(request_id)
        if tracker is not None and not any(tracker.num_allocated_blocks().values()):
            tracker.append_block_ids(tuple(map(list, group_block_ids)))


def _beginning(scheduler_output: Any) -> Iterator[tuple[str, Sequence[Sequence[int]]]]:
    """Requests that begin or go on after a preemption, each with all its blocks by group."""
    for request in scheduler_output.scheduled_new_reqs:
        yield request.req_id, request.block_ids
    cached = scheduler_output.scheduled_cached_reqs
    for request_id, group_block_ids in zip(cached.req_ids, cached.new_block_ids, strict=True):
        if request_id in cached.resumed_req_ids and group_block_ids is not None:
            yield request_id, group_block_ids
