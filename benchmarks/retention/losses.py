# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vllm-ascend-kvext project
"""Splits the computed tokens that a later request did not hit by their causes.

``ideal`` is the longest prefix that any request has computed before, without the prompt's last
token. The difference ``ideal - hit`` is split from the ideal down to the hit:

``granularity``
    The loss down to the layout's hit unit. No policy can avoid it. A cache that keeps every block
    and evicts none hits the rest.
``never_kept``
    The loss down to the best boundary whose blocks have all been cached at some time. The policy
    has this loss also in an infinite pool.
``evicted``
    The rest of the loss: tokens that were cached and then evicted.

The module counts tokens. It knows neither vLLM nor policies.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Container, Sequence
from dataclasses import dataclass, fields

from retention.texts import Text


@dataclass(slots=True)
class Losses:
    """The lost tokens by cause, see the module."""

    granularity: int = 0
    never_kept: int = 0
    evicted: int = 0

    def add(self, other: Losses) -> None:
        for field in fields(self):
            total = getattr(self, field.name) + getattr(other, field.name)
            setattr(self, field.name, total)


class ComputedPrefixes:
    """Records how far each passage has been computed by any request."""

    def __init__(self) -> None:
        self._computed_tokens: defaultdict[int, int] = defaultdict(int)

    def longest(self, text: Text) -> int:
        """The length of the longest prefix of ``text`` that has been computed."""
        for part in text.path():
            computed_tokens = self._computed_tokens[part.passage.index]
            if computed_tokens < part.used_tokens:
                return part.passage.start + computed_tokens
        return len(text)

    def extend(self, text: Text, start: int, end: int) -> None:
        """Note that the positions from ``start`` to ``end`` of ``text`` have been computed."""
        for part in text.backwards():
            passage = part.passage
            if passage.start < end:
                reached = min(part.used_tokens, end - passage.start)
                if reached > self._computed_tokens[passage.index]:
                    self._computed_tokens[passage.index] = reached
            if passage.start <= start:
                return


@dataclass(frozen=True, slots=True)
class GroupNeeds:
    """The blocks of a group that must be cached for a hit at a boundary.

    Attributes:
        block_tokens: Tokens per block, as the lookup counts them.
        tail_tokens: The number of tokens before the boundary that a hit reads; None for all.
    """

    block_tokens: int
    tail_tokens: int | None

    def tail_blocks(self, boundary_tokens: int) -> range:
        """The blocks of the tail that a hit at the boundary reads, the last block first."""
        assert self.tail_tokens is not None
        first = max(0, boundary_tokens - self.tail_tokens) // self.block_tokens
        return range(-(-boundary_tokens // self.block_tokens) - 1, first - 1, -1)


class CachedOnce:
    """Whether all blocks that a hit at a boundary of a prompt reads were cached at some time.

    Args:
        hashes: The chained hashes of the prompt. The hash of a block's last tokens identifies it.
        ever_cached: The hash and group id of every block that was ever cached.
    """

    def __init__(
        self,
        groups: Sequence[GroupNeeds],
        hash_block_tokens: int,
        hashes: Sequence[bytes],
        ever_cached: Container[bytes],
    ) -> None:
        self._groups = groups
        self._hash_block_tokens = hash_block_tokens
        self._hashes = hashes
        self._ever_cached = ever_cached
        self._full_tokens: int | None = None

    def at(self, boundary_tokens: int) -> bool:
        return all(
            self._was_cached(group_id, min((block + 1) * group.block_tokens, boundary_tokens))
            for group_id, group in enumerate(self._groups)
            if group.tail_tokens is not None
            for block in group.tail_blocks(boundary_tokens)
        ) and self._is_in_full_groups(boundary_tokens)

    def _is_in_full_groups(self, boundary_tokens: int) -> bool:
        whole_tokens = self._longest_of_whole_blocks(boundary_tokens)
        for group_id, group in enumerate(self._groups):
            rest_tokens = boundary_tokens % group.block_tokens
            if group.tail_tokens is None and (
                boundary_tokens - rest_tokens > whole_tokens
                or (rest_tokens and not self._was_cached(group_id, boundary_tokens))
            ):
                return False
        return True

    def _longest_of_whole_blocks(self, boundary_tokens: int) -> int:
        """The longest prefix of whole blocks in full-attention groups.

        The first call asks for the highest boundary. Its answer serves the lower boundaries, too.
        """
        if self._full_tokens is None:
            self._full_tokens = boundary_tokens
            for group_id, group in enumerate(self._groups):
                if group.tail_tokens is None:
                    for block in range(self._full_tokens // group.block_tokens):
                        if not self._was_cached(group_id, (block + 1) * group.block_tokens):
                            self._full_tokens = block * group.block_tokens
                            break
        return self._full_tokens

    def _was_cached(self, group_id: int, end_tokens: int) -> bool:
        """Whether a block, or the beginning of one, was cached that ends there."""
        last_hash = self._hashes[end_tokens // self._hash_block_tokens - 1]
        return last_hash + group_id.to_bytes(4, "big") in self._ever_cached


def split_losses(
    hit_tokens: int,
    ideal_tokens: int,
    unit_tokens: int,
    history: CachedOnce,
) -> Losses:
    """The losses of one request.

    Args:
        hit_tokens: The tokens of its hit.
        ideal_tokens: The longest prefix that was computed before, shorter than the prompt.
        unit_tokens: The unit of hits.
        history: The history of the prompt's boundaries before this request is admitted.
    """
    reachable_tokens = ideal_tokens // unit_tokens * unit_tokens
    kept_tokens = reachable_tokens
    while kept_tokens > hit_tokens and not history.at(kept_tokens):
        kept_tokens -= unit_tokens
    return Losses(
        granularity=ideal_tokens - reachable_tokens,
        never_kept=reachable_tokens - kept_tokens,
        evicted=kept_tokens - hit_tokens,
    )
