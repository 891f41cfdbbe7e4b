# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vllm-ascend-kvext project
"""``vllm/v1/core/sched/scheduler.py``: the ends of prefill steps of models with states.

A step leaves the state of its last token in the block of that token. Once the request has passed
the end of the block, upstream caches the block as the state at its end. So a step may end inside a
block only if the next step ends exactly at the end of that block.

vLLM 0.23 never lets a step end inside a block. If the step can end nowhere else, vLLM plans no
step. vLLM 0.30 lets a step end inside a block, and ends the next step at the end of the smallest
block of all groups. If the block of a state is longer, a wrong state is cached. vLLM-Ascend 0.30
ends the next step anywhere if a connector reads KV, see `patch_mamba_block_aligned_split`.

With a drafter of several MTP modules, vLLM lets no step end among the last tokens of a prompt. If a
block ends among these tokens, no step can be planned.
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
    """Let a step end inside a block if upstream would wait for ever.

    The next step then ends at the end of that block.
    """
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
    return within_block(scheduler, request, start_tokens, num_split_tokens)


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
        return num_split_tokens  # A step leaves more states than the state of its last token.
    start_tokens = step_start_tokens(
        request, num_new_local_computed_tokens, num_external_computed_tokens
    )
    return within_block(scheduler, request, start_tokens, num_split_tokens)


def let_steps_end_with_blocks(
    wrapped: Callable[..., None], scheduler: Scheduler, *args: Any, **kwargs: Any
) -> None:
    """Keep a new scheduler of a model with states from shortening a step that ends with a block."""
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
        """Return the tokens of a step. A step that ends with a block is not shortened.

        After a shortened step, the next step would begin inside the block, and would also have to
        end with it. If the step is not shortened, the drafter reads its own drafts in place of the
        tokens behind the step. So fewer of its next drafts are right.
        """
        if (num_computed_tokens + num_new_tokens) % self._block_tokens == 0:
            return num_new_tokens
        return wrapped(request, num_computed_tokens, num_new_tokens)


_replaced = InstanceMethods()


def split_within_block(
    scheduler: Scheduler,
    request: Request,
    start_tokens: int,
    num_new_tokens: int,
    num_split_tokens: int,
) -> int:
    """The tokens of a step of which upstream lets ``num_split_tokens`` of ``num_new_tokens`` go.

    A step that begins inside a state's block gets tokens even if upstream waits until it is longer.
    """
    block_tokens = _state_block_tokens(scheduler.kv_cache_manager.coordinator)
    if not num_split_tokens and start_tokens % block_tokens:
        num_split_tokens = num_new_tokens
    if getattr(scheduler, "mamba_has_prefill_checkpoint_blocks", False):
        return num_split_tokens
    return within_block(scheduler, request, start_tokens, num_split_tokens)


def within_block(
    scheduler: Scheduler, request: Request, start_tokens: int, num_new_tokens: int
) -> int:
    """The tokens of a step. A step that begins inside a state's block ends with that block at the
    latest."""
    # The last token is decoded, so the tokens behind it are drafts.
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

    If other requests have only used up the tokens of this step, a later step gets further.
    """
    block_tokens = scheduler.cache_config.block_size
    if start_tokens % block_tokens:
        return True
    longest_step_tokens = scheduler.max_num_scheduled_tokens
    if long_prefill_tokens := scheduler.scheduler_config.long_prefill_token_threshold:
        longest_step_tokens = min(longest_step_tokens, long_prefill_tokens)
    # Steps end before an image if the encoder's cache has no room for it. A drafter reads one token
    # ahead. The cache may be full of an image of this request, until that image is computed.
    next_read_tokens = end_tokens + scheduler.use_eagle
    return longest_step_tokens < block_tokens or any(
        feature.mm_position.offset == next_read_tokens for feature in request.mm_features or ()
    )


def _state_block_tokens(coordinator: KVCacheCoordinator) -> int:
    """The number of tokens at whose multiples the blocks of all state groups end."""
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
        why="Upstream rounds a prefill step down to whole blocks. A step that must be shorter than "
        "a block gets no token. That happens before an image for which the encoder's cache has no "
        "room, and if long_prefill_token_threshold or max_num_scheduled_tokens is less than a "
        "block. The next step gets no token for the same reason. A step that begins inside a block "
        "goes past the end of the block, and the state in the block is cached as the state of its "
        "end.",
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
    patch_mamba_block_aligned_split.PATCH,  # The next patch is installed later, and lies outside.
    Patch(
        id="KVX-171",
        target=_TARGET,
        feature="aligned-steps",
        vllm=SINCE_0_30,
        wrapper=end_step_with_its_block,
        why="If a group of another kind has smaller blocks, a step that begins inside a state's "
        "block goes past the end of the block. The state in the block is then cached as the state "
        "of that end.",
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
        why="With a drafter of several MTP modules, upstream shortens a step that would end "
        "among the last tokens of a prompt. If the step would have ended with a block of states, "
        "the next step begins inside the block, must end with it, and is shortened to no token, "
        "for ever.",
        retire_when="upstream lets such a step end with a block",
        relies_on=(f"{_SCHEDULER}.schedule", f"{_SCHEDULER}._reserve_prefill_lookahead"),
        ascend=(
            f"{_ASCEND}.patch_balance_schedule:BalanceScheduler.__init__",
            f"{_ASCEND}.patch_balance_schedule:BalanceScheduler.schedule",
        ),
    ),
)
