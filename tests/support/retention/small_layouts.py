# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vllm-ascend-kvext project
"""The groups of small models of the current family, for tests that try every length."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator
from typing import Any

from support import family
from support.scheduler.block_manager import full, window

Specs = tuple[Any, ...]
"""The ``KVCacheSpec`` of each group."""


def _layouts() -> dict[str, Specs]:
    if family.IS_ASCEND:
        from ascend_geometry import small_layout

        return {"DeepSeek-V4": small_layout().specs}
    return {
        "one full, one window": (full(4), window(4, 9)),
        "one full, two windows": (full(4), window(4, 13), window(4, 13, head_size=2)),
        "window of half a unit": (full(8), window(4, 5), window(2, 5)),
        "three block sizes": (full(8), window(4, 7), window(2, 5)),
        "window wider than the unit": (full(8), window(2, 23)),
        "two wide windows": (full(8), window(2, 19), window(4, 30)),
        "window only": (window(4, 11),),
        "compressor states": (full(16), window(4, 8), window(2, 4), window(4, 16)),
    }


LAYOUTS = _layouts()

LIVES_OF = 4 if family.IS_ASCEND else 1
"""For each choice of groups that look ahead, one in so many lengths has a whole life."""
"""For each choice of groups that look ahead, one length in ``LIVES_OF`` is given a whole life."""
PREEMPT_EVERY = 9 if family.IS_ASCEND else 5
"""The number of tokens between two preemptions in a whole life."""


def tokens_per_block(spec: Any) -> int:
    return spec.block_size * (getattr(spec, "compress_ratio", 1) or 1)


def unit_of(specs: Specs) -> int:
    """The unit of hits, in tokens."""
    return math.lcm(*map(tokens_per_block, specs))


def longest_window(specs: Specs) -> int:
    return max(getattr(spec, "sliding_window", None) or 0 for spec in specs)


def eagle_sets(specs: Specs) -> Iterator[frozenset[int]]:
    """Every choice of groups that look ahead. A lookup treats groups of equal specs as one."""
    told_apart = [index for index, spec in enumerate(specs) if spec not in specs[:index]]
    for size in range(len(told_apart) + 1):
        yield from map(frozenset, itertools.combinations(told_apart, size))


def some_eagle_sets(specs: Specs) -> list[frozenset[int]]:
    """Choices of groups that look ahead. With many groups: none, one of them, and all."""
    chosen = list(eagle_sets(specs))
    if len(chosen) <= 16:
        return chosen
    return [*(each for each in chosen if len(each) < 2), chosen[-1]]
