# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vllm-ascend-kvext project
"""``vllm_ascend/patch/platform/patch_mamba_block_aligned_split.py``: steps end at boundaries.

A recurrent state lies in the block of the last token of a step. When a later step passes the end of
that block, the block is cached as if it held the state of its end. So every step of a prompt but
the last one must end at the end of a block. vLLM's scheduler ensures that. vLLM-Ascend 0.30 does
not, if a KV connector may load (``kv_both``, ``kv_consumer``) and a part of the prompt is computed.
A prompt of three steps then leaves states of other positions, and answers wrong when it is sent
again.

A step that computes only the last token of a prompt must stay whole, because the drafts behind this
token are verified in the same step. vLLM-Ascend keeps such a step whole, and so does this repair.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

from vllm_ascend_kvext.patches.upstream import step_start_tokens
from vllm_ascend_kvext.patching.declaration import SINCE_0_30, Patch

if TYPE_CHECKING:
    from vllm.v1.core.sched.scheduler import Scheduler
    from vllm.v1.request import Request

_ASCENDS = "vllm_ascend.patch.platform.patch_mamba_block_aligned_split"


def end_prompt_steps_at_blocks(
    wrapped: Callable[..., int],
    scheduler: Scheduler,
    request: Request,
    num_new_tokens: int,
    num_new_local_computed_tokens: int = 0,
    num_external_computed_tokens: int = 0,
) -> int:
    """Shorten the steps of a prompt as without a connector, except the step of its last token."""
    computed = (num_new_local_computed_tokens, num_external_computed_tokens)
    prefill_end = max(request.num_prompt_tokens, request.num_tokens - 1)
    tokens_left = prefill_end - step_start_tokens(request, *computed)
    connected = scheduler.vllm_config.kv_transfer_config
    ascends = sys.modules.get(_ASCENDS)
    if ascends is None or connected is None or not connected.is_kv_consumer or tokens_left <= 1:
        return wrapped(request, num_new_tokens, *computed)
    split: Callable[..., int] = ascends._mamba_block_aligned_split
    return split(_LoadsNothing(scheduler), request, num_new_tokens, *computed)


class _LoadsNothing:
    """A read-only view of a scheduler, whose connector is neither producer nor consumer.

    vLLM-Ascend then shortens steps as without a connector. vLLM-Ascend still leaves room for the
    block that lookups with a connector drop for drafts.
    """

    def __init__(self, scheduler: Scheduler) -> None:
        self._scheduler = scheduler
        self.vllm_config = SimpleNamespace(
            kv_transfer_config=SimpleNamespace(is_kv_producer=False, is_kv_consumer=False),
            model_config=scheduler.vllm_config.model_config,
        )

    def __getattr__(self, name: str) -> Any:
        return getattr(self._scheduler, name)


PATCH = Patch(
    id="KVX-133",
    target="vllm.v1.core.sched.scheduler:Scheduler._mamba_block_aligned_split",
    feature="aligned-steps",
    vllm=SINCE_0_30,
    wrapper=end_prompt_steps_at_blocks,
    why="With a KV connector that may load, vLLM-Ascend ends the steps of a prompt inside blocks. "
    "The next step passes the end of such a block, which is cached as if it held the state of its "
    "end. The same prompt, and siblings, answer wrong.",
    retire_when="vLLM-Ascend leaves only the step of the last prompt token whole",
    ascend=(f"{_ASCENDS}:_mamba_block_aligned_split",),
)
"""`aligned_steps` lists this patch before every other patch of the function. If the patch acts,
it calls vLLM-Ascend's function directly, and so skips everything that was installed before."""
