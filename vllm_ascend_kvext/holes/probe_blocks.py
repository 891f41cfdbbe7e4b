# SPDX-License-Identifier: Apache-2.0
"""Blocks behind the table of a parked request, for tokens that are computed only to be looked at.

They are nobody else's and are not cached. They are freed before the next step is planned: what lies
in them is read by their own step only.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from vllm_ascend_kvext.holes.window_blocks import Blocks


class ProbeBlocks:
    """Of one engine.

    Args:
        blocks: Of the pool.
        tokens_per_page: By KV cache group.
    """

    def __init__(self, blocks: Blocks, tokens_per_page: Mapping[int, int]) -> None:
        self._blocks = blocks
        self._tokens_per_page = tokens_per_page
        self._leaving: list[Any] = []

    def __len__(self) -> int:
        """Blocks that are held."""
        return len(self._leaving)

    def take(self, num_pages: Sequence[int], end_tokens: int) -> dict[int, list[int]] | None:
        """Take blocks up to a token, until `end_step`.

        Args:
            num_pages: That the request has, by KV cache group.
            end_tokens: Of what is computed.

        Returns:
            Block ids behind its tables, by KV cache group; None, and nothing is taken, if there are
            too few.
        """
        missing = {
            group: max(0, -(-end_tokens // tokens) - num_pages[group])
            for group, tokens in self._tokens_per_page.items()
        }
        num_blocks = sum(missing.values())
        if num_blocks > self._blocks.num_free:
            return None
        new = self._blocks.allocate(num_blocks) if num_blocks else []
        self._leaving += new
        ids = iter([block.block_id for block in new])
        return {group: [next(ids) for _ in range(count)] for group, count in missing.items()}

    def end_step(self) -> None:
        """The latest step has been handed to the workers: its blocks can be used by the next."""
        leaving, self._leaving = self._leaving, []
        if leaving:
            self._blocks.release(leaving)
