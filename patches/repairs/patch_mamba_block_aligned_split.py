# SPDX-License-Identifier: Apache-2.0
"""``vllm_ascend/patch/platform/patch_mamba_block_aligned_split.py``: steps end at boundaries.

A recurrent state lies in the block of the last token of a step. When a later step passes the end of
that block, the block is cached as if it held the state of its end: steps of a prompt that has more
tokens behind them have to end where blocks do. vLLM's scheduler sees to it. vLLM-Ascend 0.30 does
not where a KV connector may load (``kv_both``, ``kv_consumer``), as soon as part of the prompt is
computed: prompts of three steps leave states of other positions, and answer wrong when they come
again.

vLLM-Ascend has to leave alone the step of one last prompt token, whose drafts are verified in it.
That step stays whole.
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
    """Shorten the steps of a prompt as where no connector loads, but for its last token's."""
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
    """A scheduler to read from, whose connector has a role of neither kind.

    vLLM-Ascend then shortens steps as where no connector loads, and leaves room for the block that
    lookups beside a connector drop for drafts.
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
    why="Beside a KV connector that may load, vLLM-Ascend ends the steps of a prompt within "
    "blocks. The next step passes the end of such a block, which is cached as if it held the "
    "state of its end: the same prompt, and siblings, answer wrong.",
    retire_when="vLLM-Ascend leaves only the step of the last prompt token whole",
    ascend=(f"{_ASCENDS}:_mamba_block_aligned_split",),
)
"""`aligned_steps` lists it, and installs it before every other patch of this function: where it
acts, it calls vLLM-Ascend's function directly, and so leaves out what was installed before."""
