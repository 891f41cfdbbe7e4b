# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vllm-ascend-kvext project
"""``vllm/v1/worker/gpu/model_runner.py``: a request goes on from the state at the end of its hit.

The second model runner notes for a new request which column of its block table has its state. vLLM
divides the tokens of the hit by ``cache_config.block_size``, which is the smallest block of all
groups. If the block of a state is larger, that column is another one, or lies beyond the table.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

from vllm_ascend_kvext.patching.declaration import SINCE_0_30, Patch

if TYPE_CHECKING:
    from vllm.v1.core.sched.output import SchedulerOutput
    from vllm.v1.worker.gpu.model_runner import GPUModelRunner


def count_columns_in_state_blocks(
    wrapped: Callable[..., None], runner: GPUModelRunner, scheduler_output: SchedulerOutput
) -> None:
    """Note the column of each new request's state, in blocks of states."""
    from vllm.v1.worker.gpu.model_states.mamba_hybrid import MambaHybridModelState

    wrapped(scheduler_output)
    model_state = runner.model_state
    if not isinstance(model_state, MambaHybridModelState) or not model_state._align_mode:
        return
    _, spec = model_state._get_mamba_group_info(runner.kv_cache_config)
    if spec.block_size == model_state.cache_config.block_size:
        return
    for request in scheduler_output.scheduled_new_reqs:
        row = runner.req_states.req_id_to_index[request.req_id]
        column = (request.num_computed_tokens - 1) // spec.block_size
        model_state._mamba_state_idx_gpu[row].fill_(column)


_RUNNER = "vllm.v1.worker.gpu.model_runner:GPUModelRunner"
_STATE = "vllm.v1.worker.gpu.model_states.mamba_hybrid:MambaHybridModelState"

PATCHES = (
    Patch(
        id="KVX-325",
        target=f"{_RUNNER}.add_requests",
        feature="state-columns",
        vllm=SINCE_0_30,
        wrapper=count_columns_in_state_blocks,
        why="The second model runner counts the blocks of a hit in the smallest block of all "
        "groups. If a state's block is larger, a request goes on from the state of another block.",
        retire_when="vLLM counts in blocks of states: its issue 55600",
        relies_on=(
            f"{_STATE}.add_request",
            f"{_STATE}.preprocess_state",
            f"{_STATE}._get_mamba_group_info",
        ),
        ascend=(
            "vllm_ascend.worker.v2.model_states.mamba_hybrid:AscendMambaHybridModelState"
            ".preprocess_state",
        ),
        when_imported=True,
    ),
)
