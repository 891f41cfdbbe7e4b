# SPDX-License-Identifier: Apache-2.0
"""DeepSeek-V4 as vllm-ascend plans it, in the form in which the benchmark takes a layout.

Imported only where vllm-ascend is active, see ``tests/ascend/ascend_sources.py``.
"""

from __future__ import annotations

from dataclasses import dataclass

from ascend_geometry import planned_config, resolved_block_sizes
from support.scheduler.layouts import Attention, Group
from vllm.v1.kv_cache_interface import KVCacheConfig

BLOCK_SIZE = 128
"""``--block-size``."""


@dataclass(frozen=True, slots=True)
class AscendLayout:
    """The same attributes as those of `support.scheduler.layouts.Layout` that are asked for."""

    name: str
    groups: tuple[Group, ...]
    unit_tokens: int
    hash_block_size: int

    @classmethod
    def planned(cls) -> AscendLayout:
        config = planned_config(BLOCK_SIZE)
        unit_tokens, hash_block_size = resolved_block_sizes(config, BLOCK_SIZE)
        groups = []
        for group in config.kv_cache_groups:
            spec = group.kv_cache_spec
            window_tokens = getattr(spec, "sliding_window", None) or 0
            ratio = 1 if window_tokens else max(1, getattr(spec, "compress_ratio", None) or 1)
            attention = Attention.WINDOW_MLA if window_tokens else Attention.MLA
            groups.append(Group(attention, spec.block_size * ratio, window_tokens))
        return cls("DeepSeek-V4 on vllm-ascend", tuple(groups), unit_tokens, hash_block_size)

    def to_config(self, num_blocks: int) -> KVCacheConfig:
        return planned_config(BLOCK_SIZE, num_blocks)
