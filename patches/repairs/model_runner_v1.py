# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vllm-ascend-kvext project
"""``vllm_ascend/worker/model_runner_v1.py``: states are saved by the drafts that were accepted.

vLLM-Ascend saves the states of a step on a stream of its own, behind the sampled tokens. The
kernel reads the block tables on the device. The next step uploads its tables on the compute stream,
and waits for the event of that kernel only afterwards. If rows of the batch have moved, states are
then saved in blocks of other requests. Copies of pages that begin with the next step, before it
waits, read blocks in which the states are not saved yet.

On an Ascend 310P, which has no Triton, vLLM-Ascend saves the state at the end of a block by a loop
on the host. With asynchronous scheduling, the loop of release 0.23.0 reads how many drafts the step
before has accepted, because this step's counts are in a buffer of the runner. Then a state of
another position is cached as the state of the block's end, or none is.

If all tokens of a prompt but one are hit, the scheduler of vLLM 0.30 adds places for drafts to the
request's first step, so that the step has the size of a decode. vLLM-Ascend takes the places for a
part of the prompt: the state of the request goes on over tokens that are no tokens.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from vllm_ascend_kvext.patching.declaration import BEFORE_0_30, SINCE_0_30, Patch

if TYPE_CHECKING:
    import torch
    from vllm.v1.core.sched.output import SchedulerOutput


def save_states_by_this_step(
    wrapped: Callable[..., None],
    runner: Any,
    output_token_ids: torch.Tensor,
    scheduler_output: SchedulerOutput,
) -> None:
    """Give the loop on the host the counts of this step.

    The loop waits for the device in any case. The next step overwrites these counts.
    """
    if (
        runner.use_async_scheduling
        and runner.speculative_config
        and runner.model_config.is_hybrid
        and runner.cache_config.mamba_cache_mode == "align"
        and _saves_on_host()
    ):
        counts = (output_token_ids != -1).sum(dim=1)
        runner.input_batch.num_accepted_tokens_cpu[: len(counts)] = counts.cpu().numpy()
    wrapped(output_token_ids, scheduler_output)


def save_states_before_the_next_step(
    wrapped: Callable[..., Any], runner: Any, *args: Any, **kwargs: Any
) -> Any:
    """Let the compute stream wait until the states of the step before are saved.

    The host waits for the same event a little later, so nothing is slower.
    """
    event = runner.num_accepted_tokens_event
    if event is not None:
        import torch

        torch.npu.current_stream().wait_event(event)
    return wrapped(*args, **kwargs)


def count_drafts_of_first_steps(
    wrapped: Callable[..., Any],
    runner: Any,
    scheduler_output: SchedulerOutput,
    num_scheduled_tokens: Any,
) -> Any:
    """Count the places for drafts in a request's first step as drafts, as vLLM's runner does."""
    prepared = wrapped(scheduler_output, num_scheduled_tokens)
    counts = runner.num_decode_draft_tokens
    is_changed = False
    for request_id, drafts in scheduler_output.scheduled_spec_decode_tokens.items():
        row = runner.input_batch.req_id_to_index[request_id]
        if counts.np[row] < 0 and num_scheduled_tokens[row] == len(drafts) + 1:
            counts.np[row] = len(drafts)
            is_changed = True
    if is_changed:
        counts.copy_to_gpu()
    return prepared


def _saves_on_host() -> bool:
    """Whether vLLM-Ascend has put its loop in place of vLLM's kernel."""
    from vllm.v1.worker import mamba_utils
    from vllm_ascend.patch.worker import patch_mamba_utils

    of_ascend = patch_mamba_utils._postprocess_mamba_align_gpu_cpu_fallback
    return mamba_utils.postprocess_mamba_align_gpu is of_ascend


_RUNNER = "vllm_ascend.worker.model_runner_v1:NPUModelRunner"

PATCHES = (
    Patch(
        id="KVX-324",
        target=f"{_RUNNER}._update_states_after_model_execute",
        feature="accepted-drafts",
        vllm=BEFORE_0_30,
        wrapper=save_states_by_this_step,
        why="On an Ascend 310P, vLLM-Ascend saves the states at the ends of blocks by the "
        "drafts that the step before has accepted. The states of other positions are then cached.",
        retire_when="0.23.0 is not supported any more: 0.23.0.post1 reads this step's counts",
        # 0.23.0.post1 reads this step's counts. There the patch changes nothing.
        relies_on=(f"{_RUNNER}._sync_num_accepted_tokens",),
        when_imported=True,
    ),
    Patch(
        id="KVX-326",
        target=f"{_RUNNER}.execute_model",
        feature="accepted-drafts",
        wrapper=save_states_before_the_next_step,
        why="vLLM-Ascend saves states on a stream for which the next step does not wait before it "
        "uploads its block tables. If rows of the batch have moved, a request's state is saved in "
        "another request's block, and that request answers wrong.",
        retire_when="vLLM-Ascend waits for `num_accepted_tokens_event` before it uploads block "
        "tables and hands preemptions to a connector",
        relies_on=(
            f"{_RUNNER}._prepare_inputs",
            f"{_RUNNER}.sample_tokens",
            f"{_RUNNER}._update_states_after_model_execute",
        ),
        when_imported=True,
    ),
    Patch(
        id="KVX-327",
        target=f"{_RUNNER}._prepare_inputs",
        feature="accepted-drafts",
        vllm=SINCE_0_30,
        wrapper=count_drafts_of_first_steps,
        why="If all tokens of a prompt but one are hit, vLLM adds places for drafts to the first "
        "step. vLLM-Ascend takes them for a part of the prompt, unless a connector reads KV and "
        "the request is new. The state then goes on over tokens that are no tokens, and the "
        "request answers wrong from its second token on.",
        retire_when="vLLM-Ascend counts the drafts of a step that has one token more than drafts",
        relies_on=(f"{_RUNNER}._build_attention_metadata",),
        when_imported=True,
    ),
)
