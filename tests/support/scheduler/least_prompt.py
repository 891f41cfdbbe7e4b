# SPDX-License-Identifier: Apache-2.0
"""Sends one prompt twice, to see from which length on it hits."""

from __future__ import annotations

import logging
import re

from support.scheduler.block_manager import BlockManager
from vllm_ascend_kvext.patches.retention.kv_cache_coordinator import log_least_prompt

_LINE = re.compile(r"hits on the device: prompts of (\d+) tokens or more, in multiples of (\d+)\.")


def printed_tokens(block_manager: BlockManager) -> tuple[int, int]:
    """The shortest prompt that hits and the unit, as an engine logs them."""
    lines: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: lines.append(record.getMessage())
    logger = logging.getLogger("vllm.ascend_kvext.retention")
    logger.addHandler(handler)
    try:
        log_least_prompt(block_manager.manager.coordinator)
    finally:
        logger.removeHandler(handler)
    (found,) = filter(None, map(_LINE.search, lines))
    return int(found[1]), int(found[2])


def hit_tokens_of_second(block_manager: BlockManager, num_tokens: int, chunk_tokens: int) -> int:
    """What a prompt hits that was answered with two tokens before, in an otherwise empty cache."""
    block_manager.reset()
    prompt = range(num_tokens)
    first = block_manager.request(prompt)
    block_manager.prefill(first, chunk_tokens)
    block_manager.decode(first, (1, 2))
    block_manager.finish(first)
    return block_manager.hit_tokens(block_manager.request(prompt))
