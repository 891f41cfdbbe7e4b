# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vllm-ascend-kvext project
"""Records a scheduler's decisions step by step, so two runs can be compared."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field, fields
from typing import Any


@dataclass(frozen=True, slots=True)
class ScheduledRequest:
    """One request in one step, as the model runner gets it."""

    request_id: str
    num_tokens: int
    num_computed_tokens: int
    new_block_ids: tuple[tuple[int, ...], ...] | None
    is_new_or_resumed: bool
    draft_tokens: tuple[int, ...]
    encoder_inputs: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Step:
    """One scheduler step.

    Attributes:
        scheduled: The scheduled requests, in the scheduler's order.
        preempted: The ids of preempted requests, sorted.
        finished: The ids of the requests that the model runner is told to forget, sorted.
        num_common_prefix_blocks: One count per group.
        free_queue: The ids of free blocks. The first one is allocated next.
        blocks: For every block of the pool: its reference count, its hash key (hexadecimal), the
            number of tokens that the key stands for if the block has it, and its number of other
            keys.
        events: The KV cache events that were published in this step.
        outputs: New tokens and the reason to finish, per request.
    """

    scheduled: tuple[ScheduledRequest, ...]
    preempted: tuple[str, ...]
    finished: tuple[str, ...]
    num_common_prefix_blocks: tuple[int, ...]
    free_queue: tuple[int, ...]
    blocks: tuple[tuple[int, str | None, int | None, int], ...]
    events: tuple[str, ...]
    outputs: tuple[tuple[str, tuple[int, ...], str], ...]


@dataclass
class Transcript:
    """All steps of a run, and how often each kind of event occurred."""

    steps: list[Step] = field(default_factory=list)
    counts: Counter[str] = field(default_factory=Counter)


def describe_schedule(scheduler_output: Any | None) -> dict[str, Any]:
    """The fields of a ``Step`` that come from a ``SchedulerOutput``. They are empty without one."""
    if scheduler_output is None:
        return {"scheduled": (), "preempted": (), "finished": (), "num_common_prefix_blocks": ()}
    new = {request.req_id: request for request in scheduler_output.scheduled_new_reqs}
    cached = scheduler_output.scheduled_cached_reqs
    cached_at = {request_id: i for i, request_id in enumerate(cached.req_ids)}
    scheduled = []
    for request_id, num_tokens in scheduler_output.num_scheduled_tokens.items():
        if request_id in new:
            block_ids = new[request_id].block_ids
            num_computed_tokens = new[request_id].num_computed_tokens
        else:
            block_ids = cached.new_block_ids[cached_at[request_id]]
            num_computed_tokens = cached.num_computed_tokens[cached_at[request_id]]
        scheduled.append(
            ScheduledRequest(
                request_id,
                num_tokens,
                num_computed_tokens,
                block_ids and tuple(map(tuple, block_ids)),
                request_id in new or request_id in cached.resumed_req_ids,
                tuple(scheduler_output.scheduled_spec_decode_tokens.get(request_id, ())),
                tuple(scheduler_output.scheduled_encoder_inputs.get(request_id, ())),
            )
        )
    return {
        "scheduled": tuple(scheduled),
        "preempted": tuple(sorted(scheduler_output.preempted_req_ids or ())),
        "finished": tuple(sorted(scheduler_output.finished_req_ids)),
        "num_common_prefix_blocks": tuple(scheduler_output.num_common_prefix_blocks),
    }


def first_difference(one: Transcript, other: Transcript) -> str | None:
    """The first step and field in which two runs differ. None if they are equal."""
    for number, (a, b) in enumerate(zip(one.steps, other.steps)):  # noqa: B905
        for item in fields(Step):
            left = getattr(a, item.name)
            right = getattr(b, item.name)
            if left != right:
                return f"step {number}, {item.name}: {left!r:.600} != {right!r:.600}"
    if len(one.steps) != len(other.steps):
        return f"{len(one.steps)} steps != {len(other.steps)} steps"
    return None
