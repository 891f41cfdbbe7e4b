# SPDX-License-Identifier: Apache-2.0
"""DeepSeek-V4 on Ascend: the layout that the real vllm-ascend plans, served by its own managers.

Import it only after vllm-ascend is activated; ``tests/ascend`` has what is needed for that.
"""

from __future__ import annotations

import math

import ascend_geometry

from retention.layouts import BenchLayout
from retention.losses import GroupNeeds

TEXTS = {32: (2.0, 0.45), 128: (5.0, 0.25)}
"""Per ``--block-size``: how much longer and how many fewer texts, so that hits are possible at its
unit of thousands of tokens, in not many more tokens than the other layouts are served."""

STEP_TOKENS = 2048
"""A step's compressor states take a block per 2 or 8 tokens, cached or not: with 8192 tokens the
smaller pools would not hold one step."""


def ascend_layout(name: str, block_size: int) -> BenchLayout:
    config = ascend_geometry.planned_config(block_size)
    scheduler_block_tokens, hash_block_tokens = ascend_geometry.resolved_block_sizes(
        config, block_size
    )
    groups = tuple(_needs(group.kv_cache_spec) for group in config.kv_cache_groups)
    stretch, thinning = TEXTS[block_size]
    return BenchLayout(
        name=name,
        config=lambda num_blocks: ascend_geometry.planned_config(block_size, num_blocks),
        groups=groups,
        unit_tokens=math.lcm(*(group.block_tokens for group in groups)),
        scheduler_block_tokens=scheduler_block_tokens,
        hash_block_tokens=hash_block_tokens,
        stretch=stretch,
        thinning=thinning,
        step_tokens=STEP_TOKENS,
    )


def _needs(spec) -> GroupNeeds:
    window_tokens = getattr(spec, "sliding_window", None)
    if window_tokens:
        return GroupNeeds(spec.block_size, window_tokens - 1)
    return GroupNeeds(spec.block_size * max(1, spec.compress_ratio), None)
