# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vllm-ascend-kvext project
"""Boundaries inside blocks: ``--prefix-match-unit`` lets a hit end there (since vLLM 0.30).

A request leaves a state inside a block if a step of its prompt ends there. The state is cached
under the hash of the prompt up to there, in the request's own block. The next step of the request
writes into that block. So vLLM moves the key to a new block, and has the state copied to the new
block before that step. A hit is copied in the same way, and so is the full-attention block that
the hit ends in.

::

      step k      [.......]          leaves a state, which is cached in block A
      step k + 1  A -> B   [.....]   A is copied to B, and B has the key; A is written
      step k + 2                     B is free, and cached

The copies of a step come before its forward. So the block of which a part is copied must not be
written in the same step:

- A state cannot be hit in the step that leaves it, and in the step that moves its key. vLLM sees to
  both.
- The rows of a step get keys inside blocks in the step after it.
- A block that is full after a step is cached in that step. A hit that ends inside it waits for the
  next step (`InsideBlocks.is_written`).

The module knows boundaries and lengths. `vllm_ascend_kvext.patches.retention` caches the blocks.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

from vllm_ascend_kvext.retention.geometry import HitGeometry
from vllm_ascend_kvext.retention.reasons import Origin, Reason


@dataclass(slots=True)
class InnerProgress:
    """The boundaries inside blocks of one request that has blocks.

    Attributes:
        planned: The boundaries at which it leaves a state, and why.
        left_tokens: The boundary whose state it has left and that is not kept yet; 0 if none.
        keyed_tokens: Full-attention rows up to here have keys inside blocks.
    """

    planned: Mapping[int, Reason]
    left_tokens: int = 0
    keyed_tokens: int = 0


@dataclass(slots=True)
class InsideBlocks:
    """The boundaries inside blocks of one coordinator.

    Attributes:
        geometry: What a lookup can hit, inside blocks as well. Its unit is ``prefix_match_unit``.
        block_tokens: The tokens of a block, in all groups.
        has_events: Whether KV events are emitted. Routers are told of each key. So a
            full-attention block then has no keys but those of planned boundaries.
        hits_tokens: The hits of requests that have blocks and are not admitted yet, by request id.
        progress: What requests that hold blocks have done, by request id.
    """

    geometry: HitGeometry
    block_tokens: int
    has_events: bool
    hits_tokens: dict[str, int] = field(default_factory=dict)
    progress: dict[str, InnerProgress] = field(default_factory=dict)
    _written_ids: set[int] = field(default_factory=set)

    @property
    def unit_tokens(self) -> int:
        return self.geometry.unit_tokens

    def ends_of_prompt(self, num_prompt_tokens: int) -> list[int]:
        """Where the same prompt resumes, and where a prompt that continues it does."""
        reachable_tokens = self.geometry.reachable_tokens
        ends = {reachable_tokens(num_prompt_tokens - 1), reachable_tokens(num_prompt_tokens)}
        return sorted(tokens for tokens in ends if tokens)

    def admit(
        self,
        request_id: str,
        hit_tokens: int,
        num_prompt_tokens: int,
        asked: Mapping[int, Reason],
    ) -> None:
        """A request begins behind a hit.

        Args:
            asked: Boundaries that requests ask for, and why. Those at the ends of blocks are left
                out.
        """
        reasons = dict.fromkeys(self.ends_of_prompt(num_prompt_tokens), Reason(Origin.PROMPT))
        reasons.update(asked)
        planned = {
            tokens: reason
            for tokens, reason in reasons.items()
            if tokens % self.block_tokens and tokens > hit_tokens
        }
        keyed_tokens = hit_tokens - hit_tokens % self.block_tokens
        self.progress[request_id] = InnerProgress(planned, keyed_tokens=keyed_tokens)

    def ends_to_key(self, progress: InnerProgress, upto_tokens: int) -> list[int]:
        """Where full-attention blocks get keys, once rows up to ``upto_tokens`` are computed.

        The ends of one block are in descending order: vLLM takes all keys from a block when it
        gets the key of more tokens.
        """
        unit_tokens = self.unit_tokens
        first_tokens = progress.keyed_tokens - progress.keyed_tokens % self.block_tokens
        upto_tokens -= upto_tokens % unit_tokens
        if upto_tokens <= progress.keyed_tokens:
            return []
        progress.keyed_tokens = upto_tokens
        ends: Iterable[int] = range(upto_tokens, first_tokens, -unit_tokens)
        if self.has_events:
            wanted = {max(self.geometry.full_tokens(tokens)) for tokens in progress.planned}
            ends = (tokens for tokens in ends if tokens in wanted)
        return [tokens for tokens in ends if tokens % self.block_tokens]

    def note_full(
        self, progress: InnerProgress, first_tokens: int, block_ids: Iterable[int]
    ) -> None:
        """Full-attention blocks are full after the step, and have lost their keys inside."""
        progress.keyed_tokens = min(progress.keyed_tokens, first_tokens)
        self._written_ids.update(block_ids)

    def is_written(self, block_id: int) -> bool:
        """Whether the step that is being planned writes a block that is cached already."""
        return block_id in self._written_ids

    def begin_step(self) -> None:
        self._written_ids.clear()
