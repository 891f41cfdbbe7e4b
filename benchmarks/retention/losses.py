# SPDX-License-Identifier: Apache-2.0
"""Why a request hit fewer tokens than it shares with what was computed before.

With ``ideal`` the longest prefix that any request has computed before, at most all but the
prompt's last token, the difference ``ideal - hit`` is split from the ideal down to the hit:

``granularity``
    down to the layout's hit unit; no policy can avoid it. What is left is what a cache hits that
    keeps every block and evicts none.
``never_kept``
    down to the best boundary all of whose blocks have been cached at some time: what this policy
    loses in an infinite pool.
``evicted``
    the rest: it had been cached, and was gone.

Counts tokens; knows neither vLLM nor policies.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Container, Sequence
from dataclasses import dataclass, fields

from retention.texts import Text


@dataclass(slots=True)
class Losses:
    """Tokens by cause; see the module."""

    granularity: int = 0
    never_kept: int = 0
    evicted: int = 0

    def add(self, other: Losses) -> None:
        for field in fields(self):
            total = getattr(self, field.name) + getattr(other, field.name)
            setattr(self, field.name, total)


class ComputedPrefixes:
    """How far each passage has been computed by anyone."""

    def __init__(self) -> None:
        self._computed_tokens: defaultdict[int, int] = defaultdict(int)

    def longest(self, text: Text) -> int:
        """Length of the longest prefix of ``text`` that has been computed."""
        for part in text.path():
            computed_tokens = self._computed_tokens[part.passage.index]
            if computed_tokens < part.used_tokens:
                return part.passage.start + computed_tokens
        return len(text)

    def extend(self, text: Text, start: int, end: int) -> None:
        """The positions from ``start`` to ``end`` of ``text`` have been computed."""
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
    """What of a group has to be cached for a hit at a boundary.

    Attributes:
        block_tokens: Tokens per block, as the lookup counts them.
        tail_tokens: Tokens before the boundary that are read; None where all of them are.
    """

    block_tokens: int
    tail_tokens: int | None

    def tail_blocks(self, boundary_tokens: int) -> range:
        """The blocks of the tail that a hit at the boundary reads, last first."""
        assert self.tail_tokens is not None
        first = max(0, boundary_tokens - self.tail_tokens) // self.block_tokens
        return range(boundary_tokens // self.block_tokens - 1, first - 1, -1)


class CachedOnce:
    """Whether all blocks that a hit at a boundary of a prompt reads were cached at some time.

    Args:
        hashes: Chained hashes of the prompt; that of a block's last tokens stands for the block.
        ever_cached: Hash and group id of every block that was ever cached.
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
            self._was_cached(group_id, block)
            for group_id, group in enumerate(self._groups)
            if group.tail_tokens is not None
            for block in group.tail_blocks(boundary_tokens)
        ) and boundary_tokens <= self._longest_in_full_groups(boundary_tokens)

    def _longest_in_full_groups(self, boundary_tokens: int) -> int:
        """The first answer is for the highest boundary asked for: it serves the lower ones too."""
        if self._full_tokens is None:
            self._full_tokens = boundary_tokens
            for group_id, group in enumerate(self._groups):
                if group.tail_tokens is None:
                    for block in range(self._full_tokens // group.block_tokens):
                        if not self._was_cached(group_id, block):
                            self._full_tokens = block * group.block_tokens
                            break
        return self._full_tokens

    def _was_cached(self, group_id: int, block: int) -> bool:
        ratio = self._groups[group_id].block_tokens // self._hash_block_tokens
        key = self._hashes[(block + 1) * ratio - 1] + group_id.to_bytes(4, "big")
        return key in self._ever_cached


def split_losses(
    hit_tokens: int,
    ideal_tokens: int,
    unit_tokens: int,
    history: CachedOnce,
) -> Losses:
    """The losses of one request.

    Args:
        hit_tokens: What it hit.
        ideal_tokens: The longest prefix computed before, less than the prompt.
        unit_tokens: Hits are multiples of it.
        history: Of the prompt's boundaries, before this request is admitted.
    """
    reachable_tokens = kept_tokens = ideal_tokens // unit_tokens * unit_tokens
    while kept_tokens > hit_tokens and not history.at(kept_tokens):
        kept_tokens -= unit_tokens
    return Losses(
        granularity=ideal_tokens - reachable_tokens,
        never_kept=reachable_tokens - kept_tokens,
        evicted=kept_tokens - hit_tokens,
    )
