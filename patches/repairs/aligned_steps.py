# SPDX-License-Identifier: Apache-2.0
"""``vllm/v1/core/sched/scheduler.py``: where prefill steps of models with states end.

A step leaves the state of its last token in the block that holds that token. Upstream caches the
block as the state at the block's end, once the request has passed it. So a step may end inside a
block, if the next step goes on to the end of that block and no further.

vLLM 0.23 never lets a step end inside a block, and plans no step where it cannot do otherwise.
vLLM 0.30 lets it end there, and goes on to the end of the least block of all groups: a state whose
block is longer is cached with a wrong one. vLLM-Ascend 0.30 goes on anywhere, where a connector
reads KV: `patch_mamba_block_aligned_split`.

A step with a drafter of several MTP modules may not end among the last tokens of a prompt, either.
Where a block does, such a step could not be planned.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from vllm_ascend_kvext.groups.kinds import kind_of
from vllm_ascend_kvext.groups.model import GroupKind
from vllm_ascend_kvext.patches.repairs import patch_mamba_block_aligned_split
from vllm_ascend_kvext.patches.upstream import step_start_tokens
from vllm_ascend_kvext.patching.declaration import BEFORE_0_30, SINCE_0_30, Patch
from vllm_ascend_kvext.patching.instance_methods import InstanceMethods

if TYPE_CHECKING:
    from vllm.v1.core.kv_cache_coordinator import KVCacheCoordinator
    from vllm.v1.core.sched.scheduler import Scheduler
    from vllm.v1.request import Request


def plan_step_inside_block(
    wrapped: Callable[..., int],
    scheduler: Scheduler,
    request: Request,
    num_new_tokens: int,
    num_new_local_computed_tokens: int = 0,
    num_external_computed_tokens: int = 0,
) -> int:
    """Let a step end inside a block where upstream would wait for ever, and the next at its end."""
    num_split_tokens = wrapped(
        request, num_new_tokens, num_new_local_computed_tokens, num_external_computed_tokens
    )
    start_tokens = step_start_tokens(
        request, num_new_local_computed_tokens, num_external_computed_tokens
    )
    if (
        not num_split_tokens
        and num_new_tokens
        and _waits_for_ever(scheduler, request, start_tokens, start_tokens + num_new_tokens)
    ):
        num_split_tokens = num_new_tokens
    return _within_block(scheduler, request, start_tokens, num_split_tokens)


def end_step_with_its_block(
    wrapped: Callable[..., int],
    scheduler: Scheduler,
    request: Request,
    num_new_tokens: int,
    num_new_local_computed_tokens: int = 0,
    num_external_computed_tokens: int = 0,
) -> int:
    """End a step that begins inside a state's block at the end of that block."""
    num_split_tokens = wrapped(
        request, num_new_tokens, num_new_local_computed_tokens, num_external_computed_tokens
    )
    if scheduler.mamba_has_prefill_checkpoint_blocks:
        return num_split_tokens  # A step leaves further states besides that of its last token.
    start_tokens = step_start_tokens(
        request, num_new_local_computed_tokens, num_external_computed_tokens
    )
    return _within_block(scheduler, request, start_tokens, num_split_tokens)


def let_steps_end_with_blocks(
    wrapped: Callable[..., None], scheduler: Scheduler, *args: Any, **kwargs: Any
) -> None:
    """Have a new scheduler of a model with states leave alone a step that ends with a block."""
    wrapped(*args, **kwargs)
    if (
        scheduler.need_mamba_block_aligned_split
        and scheduler.num_prefill_lookahead > 1
        and not scheduler.mamba_has_prefill_checkpoint_blocks
    ):
        _replaced.replace(scheduler, _StepsBeforeDrafts(scheduler)._reserve_prefill_lookahead)


class _StepsBeforeDrafts:
    """The steps of one scheduler whose drafter reads several tokens behind a prefill step."""

    def __init__(self, scheduler: Scheduler) -> None:
        self._block_tokens = scheduler.cache_config.block_size

    def _reserve_prefill_lookahead(
        self,
        wrapped: Callable[..., int],
        request: Request,
        num_computed_tokens: int,
        num_new_tokens: int,
    ) -> int:
        """Shorten no step that ends with a block.

        The next step would begin inside that block, and have to end with it, too. For the tokens
        that it cannot read, the drafter takes drafts of its own: fewer of its next ones are right.
        """
        if (num_computed_tokens + num_new_tokens) % self._block_tokens == 0:
            return num_new_tokens
        return wrapped(request, num_computed_tokens, num_new_tokens)


_replaced = InstanceMethods()


def _within_block(
    scheduler: Scheduler, request: Request, start_tokens: int, num_new_tokens: int
) -> int:
    """The tokens of a step, or as many as complete the state's block that it begins inside."""
    # With one token left it is decoded: what lies behind it are drafts.
    if num_new_tokens <= 1 or start_tokens >= request.num_tokens - 1:
        return num_new_tokens
    block_tokens = _state_block_tokens(scheduler.kv_cache_manager.coordinator)
    num_tokens_in_block = start_tokens % block_tokens
    if not num_tokens_in_block:
        return num_new_tokens
    return min(num_new_tokens, block_tokens - num_tokens_in_block)


def _waits_for_ever(
    scheduler: Scheduler, request: Request, start_tokens: int, end_tokens: int
) -> bool:
    """Whether no later step would get further than ``end_tokens``, which lies in the same block.

    Where other requests have taken what a step may compute, a later one will.
    """
    block_tokens = scheduler.cache_config.block_size
    if start_tokens % block_tokens:
        return True
    longest_step_tokens = scheduler.max_num_scheduled_tokens
    if long_prefill_tokens := scheduler.scheduler_config.long_prefill_token_threshold:
        longest_step_tokens = min(longest_step_tokens, long_prefill_tokens)
    # Steps end before an image for which the encoder's cache has no room; a drafter reads one
    # token ahead. What fills the cache may be the request's own image, until it is computed.
    next_read_tokens = end_tokens + scheduler.use_eagle
    return longest_step_tokens < block_tokens or any(
        feature.mm_position.offset == next_read_tokens for feature in request.mm_features or ()
    )


def _state_block_tokens(coordinator: KVCacheCoordinator) -> int:
    """Tokens at whose multiples blocks of all groups of states end."""
    return math.lcm(
        *(
            manager.block_size
            for manager in coordinator.single_type_managers
            if kind_of(manager.kv_cache_spec) is GroupKind.STATE
        )
    )


_SCHEDULER = "vllm.v1.core.sched.scheduler:Scheduler"
_MANAGERS = "vllm.v1.core.single_type_kv_cache_manager"
_ASCEND = "vllm_ascend.patch.platform"
_TARGET = f"{_SCHEDULER}._mamba_block_aligned_split"
_OF_STATES = (
    f"{_MANAGERS}:MambaManager.allocate_new_blocks",
    f"{_MANAGERS}:MambaManager.cache_blocks",
    "vllm.v1.worker.mamba_utils:preprocess_mamba",
)

PATCHES = (
    Patch(
        id="KVX-170",
        target=_TARGET,
        feature="aligned-steps",
        vllm=BEFORE_0_30,
        wrapper=plan_step_inside_block,
        why="Upstream rounds a prefill step down to whole blocks, and to no token where it may not "
        "be as long as one: before an image for which the encoder's cache has no room, and where "
        "long_prefill_token_threshold or max_num_scheduled_tokens is less than a block. Nothing "
        "changes until the next step, which comes to the same. A step that begins inside a block "
        "goes past its end, and the state that the block holds is cached as that of its end.",
        retire_when="0.23 is not supported any more",
        relies_on=(
            f"{_SCHEDULER}.schedule",
            f"{_SCHEDULER}._try_schedule_encoder_inputs",
            *_OF_STATES,
        ),
        ascend=(
            f"{_ASCEND}.patch_balance_schedule:BalanceScheduler.schedule",
            "vllm_ascend.core.recompute_scheduler:RecomputeScheduler.schedule",
        ),
    ),
    patch_mamba_block_aligned_split.PATCH,  # Before the next one, which lies outside of it.
    Patch(
        id="KVX-171",
        target=_TARGET,
        feature="aligned-steps",
        vllm=SINCE_0_30,
        wrapper=end_step_with_its_block,
        why="A step that begins inside a state's block goes past its end where a group of another "
        "kind has smaller blocks. The state that the block holds is cached as that of its end.",
        retire_when="vLLM aligns steps to the blocks of states",
        relies_on=(f"{_SCHEDULER}.schedule", *_OF_STATES),
        ascend=(
            f"{_ASCEND}.patch_mamba_block_aligned_split:_mamba_block_aligned_split",
            f"{_ASCEND}.patch_balance_schedule:BalanceScheduler.schedule",
            "vllm_ascend.core.recompute_scheduler:RecomputeScheduler.schedule",
        ),
    ),
    Patch(
        id="KVX-173",
        target=f"{_SCHEDULER}.__init__",
        feature="aligned-steps",
        vllm=SINCE_0_30,
        wrapper=let_steps_end_with_blocks,
        undo=_replaced.take_back,
        why="With a drafter of several MTP modules, upstream shortens a step that would end among "
        "the last tokens of a prompt. If it ended with a block of states, the next step begins "
        "inside the block, has to end with it, and is shortened to no token, for ever.",
        retire_when="upstream lets such a step end with a block",
        relies_on=(f"{_SCHEDULER}.schedule", f"{_SCHEDULER}._reserve_prefill_lookahead"),
        ascend=(
            f"{_ASCEND}.patch_balance_schedule:BalanceScheduler.__init__",
            f"{_ASCEND}.patch_balance_schedule:BalanceScheduler.schedule",
        ),
    ),
)
