# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vllm-ascend-kvext project
"""``vllm/v1/core/sched/scheduler.py``: rows of a step that compute holes of requests that wait.

To the workers, the row of a hole is a request of its own. It has the block table of the request
with the hole, begins at the hole's first token, and is finished in the next step. The scheduler
itself does not know the row.
"""

from __future__ import annotations

from array import array
from collections.abc import MutableSequence, Sequence
from typing import TYPE_CHECKING

import numpy as np

from vllm_ascend_kvext.patches.upstream import set_external_hit_tokens
from vllm_ascend_kvext.upstream_state import RequestState

if TYPE_CHECKING:
    from vllm.v1.core.sched.output import NewRequestData, SchedulerOutput
    from vllm.v1.core.sched.scheduler import Scheduler
    from vllm.v1.request import Request

    from vllm_ascend_kvext.holes.hole_queue import HoleRow, NewHoles


def budget_of_holes(scheduler: Scheduler) -> tuple[int, int, int]:
    """The tokens and rows of the next step that holes may take, and the most tokens of one row.

    Requests that run, or that go on after their load, come first.
    """
    from vllm.v1.core.sched.interface import PauseState

    if scheduler.pause_state != PauseState.UNPAUSED:
        return 0, 0, 0
    max_row_tokens = (
        scheduler.scheduler_config.long_prefill_token_threshold
        or scheduler.max_num_scheduled_tokens
    )
    loaded = scheduler.finished_recving_kv_req_ids
    going_on = [scheduler.requests[each] for each in loaded if each in scheduler.requests]
    going_on += scheduler.running
    wanted_tokens = sum(
        min(
            max_row_tokens,
            request.num_tokens_with_spec
            + request.num_output_placeholders
            - request.num_computed_tokens,
        )
        for request in going_on
    )
    num_places = len(going_on)
    if scheduler.use_v2_model_runner:
        # The V2 runner keeps the place of a session that waits for its next input.
        num_places += scheduler.num_waiting_for_streaming_input
    return (
        scheduler.max_num_scheduled_tokens - wanted_tokens,
        scheduler.max_num_running_reqs - num_places,
        max_row_tokens,
    )


def add_rows(scheduler: Scheduler, output: SchedulerOutput, rows: Sequence[HoleRow]) -> None:
    """Add rows to a step that has been planned. The rows of each request ascend."""
    model_config = scheduler.vllm_config.model_config
    # These workers look into prompts. Other workers only copy and count the tokens of prompts.
    needs_list = (
        scheduler.use_v2_model_runner
        or model_config.uses_mrope
        or bool(getattr(model_config, "uses_xdrope_dim", 0))  # vLLM 0.30 has no such models.
    )
    # All rows of a request have the same prompt: the prompt of the last row.
    last_rows = {row.request_id: row for row in rows}
    prompts = {
        request_id: _prompt_of(row, scheduler.requests[request_id], needs_list)
        for request_id, row in last_rows.items()
    }
    for row in rows:
        output.scheduled_new_reqs.append(_request_of(scheduler, row, prompts[row.request_id]))
        output.num_scheduled_tokens[row.row_id] = row.run.num_tokens
        output.total_num_scheduled_tokens += row.run.num_tokens


def _prompt_of(row: HoleRow, request: Request, needs_list: bool) -> Sequence[int]:
    """The prompt of a row. It has one token more than the row computes, so nothing is sampled."""
    if not row.has_last_tokens:
        return _beginning_of(request, row.run.end_tokens + 1, needs_list)
    prompt = _beginning_of(request, row.run.first_tokens, needs_list)
    probed = request.all_token_ids[-row.run.num_tokens :]
    prompt.extend([*probed, probed[-1]])
    return prompt


def _beginning_of(request: Request, num_tokens: int, needs_list: bool) -> MutableSequence[int]:
    """The first tokens of a request, as an array unless the worker needs a list.

    A worker copies all these tokens for each row. A copy of a list of 131,072 numbers takes
    milliseconds, and a copy of an array almost no time. The holes of a request may take many steps,
    so the request's list is read only once. Tokens that are computed do not change any more.
    """
    if needs_list:
        return list(request.all_token_ids[:num_tokens])
    state = RequestState.of(request)
    tokens = state.token_ids
    if tokens is None or len(tokens) < num_tokens:
        tokens = state.token_ids = array("q")
        tokens.frombytes(np.array(request.all_token_ids[:], np.int64).tobytes())
    return tokens[:num_tokens]


def _request_of(scheduler: Scheduler, row: HoleRow, token_ids: Sequence[int]) -> NewRequestData:
    from vllm.sampling_params import SamplingParams
    from vllm.v1.core.sched.output import NewRequestData

    block_ids = row.tables(scheduler.kv_cache_manager.get_block_ids(row.request_id))
    return NewRequestData(
        req_id=row.row_id,
        prompt_token_ids=token_ids,
        mm_features=[],
        sampling_params=SamplingParams(temperature=0.0, max_tokens=1),
        pooling_params=None,
        block_ids=block_ids,
        num_computed_tokens=row.run.first_tokens,
        lora_request=None,
        prefill_token_ids=token_ids if scheduler.use_v2_model_runner else None,
    )


def go_on_behind_holes(scheduler: Scheduler, request_id: str) -> None:
    """Let a request go on: all that it waited for is there, or it has ended meanwhile."""
    request = scheduler.requests.get(request_id)
    if request is None:
        return
    if request.is_finished():
        scheduler._free_blocks(request)
    else:
        scheduler.finished_recving_kv_req_ids.add(request_id)


def correct_hits(scheduler: Scheduler, counts_every_admission: bool, new: NewHoles) -> None:
    """Take holes out of the hits that upstream has counted.

    Upstream counts all tokens up to the end of a load. Upstream counts every admission of a request
    before its first answer, or only the first admission. The counts are complete when upstream asks
    the connector what to send to the workers.
    """
    request = scheduler.requests.get(new.request_id)
    if request is None:
        return
    found = request.prefill_stats
    if found is not None and (counts_every_admission or not request.num_preemptions):
        set_external_hit_tokens(found, found.num_external_cached_tokens - new.num_tokens)
    stats = scheduler.connector_prefix_cache_stats
    if stats is None or not new.is_planned:
        return  # The hits of a lookup were reported before its load failed.
    if request.num_preemptions:
        stats.preempted_hits -= new.num_tokens
    else:
        stats.hits -= new.num_tokens
