# SPDX-License-Identifier: Apache-2.0
"""How far a failed load reaches: which requests have read it, which blocks hold what came of it.

A block that failed to load is read by the request that loads it and by every request that has hit
it since. What these have loaded and computed is wrong too, and others may have hit that.

    load ──failed──> block 5 ──held by──> request A ──computed──> block 9 ──hit by──> request B …

Knows block ids and request ids; nothing of groups, tokens or vLLM.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Holder:
    """The blocks of one request, of all groups, from one admission on.

    Attributes:
        request_id: The request. It has several holders if it was admitted several times.
        hit: Block ids that it found in the prefix cache: what others have computed or loaded.
        own: Block ids that it has loaded or computed itself, or is about to.
    """

    request_id: str
    hit: Collection[int]
    own: Collection[int]


@dataclass(frozen=True, slots=True)
class Reach:
    """What a failed load has spoiled.

    Attributes:
        request_ids: Requests that have to be computed again.
        block_ids: Blocks that must not be hit any more.
    """

    request_ids: frozenset[str]
    block_ids: frozenset[int]


def reach_of(
    failed_block_ids: Iterable[int],
    holders: Iterable[Holder],
    failed_request_ids: Collection[str] = (),
) -> Reach:
    """Follow failed loads through all requests that hold their blocks.

    Args:
        failed_block_ids: Blocks whose load failed, of any group.
        holders: All requests that may have read them.
        failed_request_ids: Requests whose load failed, whichever blocks they hold.
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
            return Reach(frozenset(request_ids), frozenset(block_ids))
        for holder in reached:
            request_ids.add(holder.request_id)
            block_ids.update(holder.own)
        unreached = others
