# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vllm-ascend-kvext project
"""``vllm/config/vllm.py``: an engine starts although its steps are shorter than a state's block."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

from vllm_ascend_kvext.patching.declaration import BEFORE_0_30, Patch

if TYPE_CHECKING:
    from vllm.config import VllmConfig


def accept_steps_within_blocks(wrapped: Callable[[], None], vllm_config: VllmConfig) -> None:
    """Check everything except whether prefill steps can be as long as a block."""
    scheduler_config = vllm_config.scheduler_config
    threshold_tokens = scheduler_config.long_prefill_token_threshold
    scheduler_config.long_prefill_token_threshold = 0  # To this check, 0 means no limit.
    try:
        wrapped()
    finally:
        scheduler_config.long_prefill_token_threshold = threshold_tokens


PATCHES = (
    Patch(
        id="KVX-172",
        target="vllm.config.vllm:VllmConfig.validate_block_size",
        feature="aligned-steps",
        vllm=BEFORE_0_30,
        wrapper=accept_steps_within_blocks,
        why="Upstream's steps do not end inside a block of states. An engine whose "
        "long_prefill_token_threshold is less than a block ends at its start, with an "
        "AssertionError without a message.",
        retire_when="0.23 is not supported any more",
    ),
)
