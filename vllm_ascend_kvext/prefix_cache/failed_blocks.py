# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vllm-ascend-kvext project
"""How far a failed load reaches: the requests that have read its blocks, and all wrong blocks."""

from __future__ import annotations

from collections.abc import Collection, Iterable
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Holder:
    """The block ids of one request in all groups, since one of its admissions.

    Attributes:
        hit: The blocks that it found in the prefix cache.
        own: The blocks that it loads or computes.
    """

    request_id: str
    hit: Collection[int]
    own: Collection[int]


def reach_of(
    failed_block_ids: Iterable[int],
    holders: Iterable[Holder],
    failed_request_ids: Collection[str] = (),
) -> tuple[set[str], set[int]]:
    """Follow failed loads through all requests that may have read their blocks.

    Returns:
        Requests that have to be computed again, and blocks that must not be hit any more.
    """
    block_ids = set(failed_block_ids)
    request_ids: set[str] = set()
    unreached = list(holders)
    while True:
        reached: list[Holder] = []
        others: list[Holder] = []
        for holder in unreached:
            is_reached = holder.request_id in failed_request_ids or not (
                block_ids.isdisjoint(holder.hit) and block_ids.isdisjoint(holder.own)
            )
            (reached if is_reached else others).append(holder)
        if not reached:
            return request_ids, block_ids
        for holder in reached:
            request_ids.add(holder.request_id)
            block_ids.update(holder.own)
        unreached = others
