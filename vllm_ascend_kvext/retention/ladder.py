# SPDX-License-Identifier: Apache-2.0
"""Checkpoints at growing distances before the end of a prompt.

Who edits the last message, strips the reasoning from an answer or asks another question about the
same document shares all but the end of a prompt. Boundaries at distances that double lose at most
as many tokens as the part that differs. Pure arithmetic.
"""

from __future__ import annotations

from collections.abc import Iterator

from vllm_ascend_kvext.retention.geometry import HitGeometry


def ladder_boundaries(
    geometry: HitGeometry, top_tokens: int, after_tokens: int, budget_blocks: float
) -> Iterator[tuple[int, int]]:
    """Boundaries below ``top_tokens``, nearest first.

    Args:
        geometry: What a lookup can hit.
        top_tokens: The replay boundary of the prompt, whose tails are kept anyway.
        after_tokens: What the request hit: below it nothing is computed.
        budget_blocks: Blocks that the tails of all rungs may take besides those of the top.

    Yields:
        The rung, counted from 0, and its boundary in tokens.
    """
    above = geometry.tails(top_tokens)
    distance_tokens = geometry.unit_tokens
    rung = 0
    while (boundary := top_tokens - distance_tokens) > after_tokens:
        tails = geometry.tails(boundary)
        budget_blocks -= sum(
            group.num_groups * max(0, min(tail.stop, upper.start) - tail.start)
            for group, tail, upper in zip(geometry.groups, tails, above, strict=True)
        )
        if budget_blocks < 0:
            return
        if geometry.is_boundary(boundary):
            yield rung, boundary
        above = tails
        distance_tokens *= 2
        rung += 1
