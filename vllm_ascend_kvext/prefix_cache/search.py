# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vllm-ascend-kvext project
"""The longest hit of one group: what vLLM's ``find_longest_cache_hit`` finds, with fewer probes.

A table maps the key of a cached block to the block, or to a dictionary of blocks with the same
content. Any of these could be used; like upstream, the search takes the first one. The module knows
tables and keys, but no requests.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from vllm_ascend_kvext.prefix_cache.keys import GroupKeys

Get = Callable[[bytes], Any]
"""``dict.get`` of a table."""

_FIRST_BATCH = 16
_LARGEST_BATCH = 1024


def first_blocks(values: list[Any]) -> list[Any]:
    """The block that stands for each value of a table."""
    if dict in set(map(type, values)):
        return [next(iter(v.values())) if type(v) is dict else v for v in values]
    return values


def blocks_at(
    get: Get, keys: Sequence[GroupKeys], hashes: Sequence[bytes], blocks: range
) -> list[list[Any]]:
    """The blocks at these indices, per group. All of them must be cached."""
    return [first_blocks(list(map(get, group.of(hashes, blocks)))) for group in keys]


def leading_blocks(
    get: Get, keys: Sequence[GroupKeys], hashes: Sequence[bytes], max_blocks: int
) -> list[list[Any]]:
    """The leading blocks that are cached in all groups, per group."""
    found: list[list[Any]] = []
    count = max_blocks
    for group in keys:
        values = _leading_values(get, group, hashes, count)
        count = len(values)
        found.append(values)
    for values in found:
        del values[count:]
    return [first_blocks(values) for values in found]


def _leading_values(
    get: Get, keys: GroupKeys, hashes: Sequence[bytes], max_blocks: int
) -> list[Any]:
    if max_blocks <= 0 or get(keys.at(hashes, 0)) is None:
        return []
    values: list[Any] = []
    size = _FIRST_BATCH
    while len(values) < max_blocks:
        start = len(values)
        batch = range(start, min(start + size, max_blocks))
        values += map(get, keys.of(hashes, batch))
        size = min(4 * size, _LARGEST_BATCH)
        missing = _first_missing(values, start)
        if missing is not None:
            del values[missing:]
            break
    return values


def _first_missing(values: list[Any], start: int = 0) -> int | None:
    # list.index would be slow, because it compares all fields of vLLM's blocks.
    part = values[start:] if start else values
    if all(part):
        return None
    return next(index for index, value in enumerate(part, start) if value is None)


def window_end(
    get: Get,
    keys: Sequence[GroupKeys],
    hashes: Sequence[bytes],
    max_blocks: int,
    need_blocks: int,
    unit_blocks: int,
    ahead_blocks: int,
) -> int:
    """Where the longest hit of a sliding-window group ends, the block that looks ahead included.

    An end is good if two conditions hold. The ``need_blocks`` blocks before it, or all blocks if
    there are fewer, are cached in all groups. And the boundary ``ahead_blocks`` before it is a
    multiple of ``unit_blocks``. If a window is not cached, its leftmost missing block is searched.
    No other window with this block is looked at. So a group that has lost its blocks costs one
    probe per window.

    Returns:
        The largest good end up to ``max_blocks``; 0 if there is none.
    """
    stride = -(-need_blocks // unit_blocks) * unit_blocks
    end = _aligned(max_blocks, unit_blocks, ahead_blocks)
    probed_from = end
    while end > 0:
        if probed_from >= end:
            end = _skip_lost(get, keys[0], hashes, end, need_blocks, stride)
            if end <= 0:
                break
            probed_from = end
        left = max(0, end - need_blocks)
        missing = _leftmost_missing(get, keys, hashes, range(left, min(end, probed_from)))
        if missing is None:
            return end
        end = _aligned(missing, unit_blocks, ahead_blocks)
        probed_from = left
        if end <= left:
            probed_from = end
    return 0


def _aligned(blocks: int, unit_blocks: int, ahead_blocks: int) -> int:
    """The largest end up to ``blocks`` whose boundary is a multiple of the unit."""
    return (blocks - ahead_blocks) // unit_blocks * unit_blocks + ahead_blocks


def _skip_lost(
    get: Get, keys: GroupKeys, hashes: Sequence[bytes], end: int, need_blocks: int, stride: int
) -> int:
    """The first end, going left, whose window is not known to lack its leftmost block."""
    size = 1
    while end > need_blocks:
        lefts = range(end - need_blocks, 0, -stride)[:size]
        values = list(map(get, keys.of(hashes, lefts)))
        if any(values):
            hit = next(index for index, value in enumerate(values) if value is not None)
            return end - hit * stride
        end -= len(lefts) * stride
        size = min(4 * size, _LARGEST_BATCH)
    return end


def _leftmost_missing(
    get: Get, keys: Sequence[GroupKeys], hashes: Sequence[bytes], blocks: range
) -> int | None:
    missing: int | None = None
    for group in keys:
        values = list(map(get, group.of(hashes, blocks)))
        found = _first_missing(values)
        if found is not None:
            missing = blocks.start + found
            blocks = range(blocks.start, missing)
    return missing


def window_hit_blocks(end: int, need_blocks: int, unit_blocks: int, ahead_blocks: int) -> int:
    """The number of blocks that upstream keeps of a hit that ends at ``end``.

    A hit that starts at the first token and is shorter than a window is aligned first, and then
    loses its last block. So with a block that looks ahead, it loses a whole unit.
    """
    if end >= need_blocks:
        return end - ahead_blocks
    blocks = end // unit_blocks * unit_blocks
    if blocks and ahead_blocks:
        blocks = (blocks - 1) // unit_blocks * unit_blocks
    return blocks


def state_end(
    get: Get,
    keys: Sequence[GroupKeys],
    hashes: Sequence[bytes],
    max_blocks: int,
    unit_blocks: int,
) -> int:
    """The number of blocks up to the last aligned one that is cached in all groups; 0 for none."""
    end = max_blocks // unit_blocks * unit_blocks
    size = 1
    while end > 0:
        lasts = range(end - 1, -1, -unit_blocks)[:size]
        columns = [list(map(get, group.of(hashes, lasts))) for group in keys]
        for index, row in enumerate(zip(*columns, strict=True)):
            if all(row):
                return end - index * unit_blocks
        end -= len(lasts) * unit_blocks
        size = min(4 * size, _LARGEST_BATCH)
    return 0
