# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vllm-ascend-kvext project
"""``vllm/v1/worker/gpu_model_runner.py``: a request reads its own count of accepted drafts.

A model with states keeps a state per draft. The next step goes on from the state of the last
accepted draft, so the runner copies the counts of accepted drafts to the host. With asynchronous
scheduling, the copy may end before or after the next step moves the rows of its batch. Upstream
moves the counts with the rows. When it reads the counts, it maps them by the rows of the last step.
If the copy has ended before the move, the counts have then been moved twice, and a request goes on
from the state of another number of drafts.

Here no row takes its count along. Rows of the host's copy stay rows of the last step, as the
mapping expects, whenever the copy ends.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from vllm_ascend_kvext.patching.declaration import Patch

if TYPE_CHECKING:
    from vllm.v1.core.sched.output import SchedulerOutput
    from vllm.v1.worker.gpu_model_runner import GPUModelRunner


def leave_counts_behind(
    wrapped: Callable[..., Any], runner: GPUModelRunner, scheduler_output: SchedulerOutput
) -> Any:
    """Move the rows of a batch, but not the counts that the device may still be writing.

    The counts themselves are neither read nor written meanwhile, for the copy may end at any time.
    Only an asynchronous scheduler's counts are mapped when they are read.
    """
    if not runner.use_async_scheduling or runner.num_accepted_tokens_event is None:
        return wrapped(scheduler_output)
    batch = runner.input_batch
    # Rows move in an array of ones. Upstream reads the array itself if no row of the last step has
    # sampled a token: then all rows are new, or within their prompt, and have no drafts.
    batch.num_accepted_tokens_cpu = batch.num_accepted_tokens_cpu_tensor.new_ones(
        batch.num_accepted_tokens_cpu_tensor.shape
    ).numpy()
    try:
        return wrapped(scheduler_output)
    finally:
        if batch.prev_req_id_to_index:
            batch.num_accepted_tokens_cpu = batch.num_accepted_tokens_cpu_tensor.numpy()


_RUNNER = "vllm.v1.worker.gpu_model_runner:GPUModelRunner"
_BATCH = "vllm.v1.worker.gpu_input_batch:InputBatch"

PATCHES = (
    Patch(
        id="KVX-323",
        target=f"{_RUNNER}._update_states",
        feature="accepted-drafts",
        wrapper=leave_counts_behind,
        why="With asynchronous scheduling, the counts of accepted drafts move with the rows of the "
        "batch, and are mapped once more when they are read. If the device has written them before "
        "the rows move, a request of a model with states goes on from another request's count.",
        retire_when="vLLM copies the counts to a buffer whose rows do not move",
        relies_on=(
            f"{_RUNNER}._prepare_inputs",
            f"{_RUNNER}._update_states_after_model_execute",
            f"{_BATCH}.add_request",
            f"{_BATCH}.condense",
            f"{_BATCH}.remove_request",
            f"{_BATCH}.swap_states",
        ),
        ascend=(
            "vllm_ascend.worker.model_runner_v1:NPUModelRunner._sync_num_accepted_tokens",
            "vllm_ascend.worker.model_runner_v1:NPUModelRunner._update_states",
        ),
        when_imported=True,
    ),
)
