# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vllm-ascend-kvext project
"""Window blocks of requests that reuse segments.

Tokens of segments, and not only tails, lie between the holes of such a request. So all rows of the
request share one table per group without gaps. The table begins with the window before the first
blended token. This window is loaded or cached. The table ends with the request's own blocks.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from vllm_ascend_kvext.holes.hole_blocks import HoleBlocks, RowTables, WindowTable, WindowTables
from vllm_ascend_kvext.layout.model import NULL_PAGE
from vllm_ascend_kvext.token_range import TokenRange


class DenseTables(RowTables):
    """The tables of one request. They are complete from the beginning.

    Attributes:
        by_group: The tables into which windows are loaded and computed, by KV cache group with
            windows.
    """

    def __init__(self, hole_blocks: HoleBlocks, by_group: WindowTables) -> None:
        self._hole_blocks = hole_blocks
        self.by_group = by_group

    def extend(self, run: TokenRange) -> WindowTables | None:
        return self.by_group

    def leave(self, end_tokens: int, is_end_of_hole: bool) -> None:
        """Keep all blocks, because a later row may read what this row leaves."""

    def release(self) -> None:
        by_group, self.by_group = self.by_group, {}
        for table in by_group.values():
            self._hole_blocks.blocks.release(table.blocks)


class DenseWindows:
    """Makes the dense tables of one engine's requests, and holds their first cached blocks."""

    def __init__(self, hole_blocks: HoleBlocks) -> None:
        self._hole_blocks = hole_blocks
        self._held: dict[str, Mapping[int, Sequence[Any]]] = {}

    @property
    def has_windows(self) -> bool:
        """Whether the model has windows."""
        return self._hole_blocks.has_windows

    def hold(self, request_id: str, cached: Mapping[int, Sequence[Any]]) -> None:
        """Keep cached blocks until `begin`, or until `release_held`.

        The request's own blocks are allocated before `begin`. Without a hold, the allocation could
        take the cached blocks.

        Args:
            cached: The blocks of the whole window before the request's beginning, by KV cache
                group. They are only read.
        """
        assert request_id not in self._held
        for blocks in cached.values():
            self._hole_blocks.blocks.take(blocks)
        self._held[request_id] = cached

    def is_held(self, request_id: str) -> bool:
        """Whether blocks are held for a request that has not begun."""
        return request_id in self._held

    def release_held(self) -> None:
        """Release held blocks after a step is planned. Their requests got no blocks in the step."""
        for cached in self._held.values():
            for blocks in cached.values():
                self._hole_blocks.blocks.release(blocks)
        self._held.clear()

    def num_blocks(self, first_tokens: int, end_tokens: int) -> int:
        """The blocks for windows of these tokens, including the window before the first token."""
        tokens_per_page = self._hole_blocks.tokens_per_page
        return sum(
            -(-end_tokens // tokens_per_page[group]) - first
            for group, (first, _) in self._hole_blocks.window_pages(first_tokens).items()
        )

    def begin(
        self, request_id: str, first_tokens: int, own_ids: Sequence[Sequence[int]]
    ) -> DenseTables | None:
        """Take blocks for all windows from one token on, up to the request's own blocks.

        The blocks that are held for the request become part of the tables.

        Args:
            first_tokens: The first token of the tables; the window before it is in them, too.
            own_ids: The request's block ids, by KV cache group, null blocks included.

        Returns:
            The tables. None if there are too few blocks; then nothing is taken.
        """
        blocks = self._hole_blocks.blocks
        ranges: dict[int, tuple[int, int]] = {}
        for group, (first_page, _) in self._hole_blocks.window_pages(first_tokens).items():
            ids = own_ids[group]
            first_own = next((page for page, own in enumerate(ids) if own != NULL_PAGE), len(ids))
            ranges[group] = min(first_page, first_own), first_own
        held = self._held.pop(request_id, {})
        kept: dict[int, list[Any]] = {}
        for group, (first, end) in ranges.items():
            of_group = list(held.get(group, ()))
            kept[group] = of_group[: end - first]
            blocks.release(of_group[end - first :])
        num_blocks = sum(end - first - len(kept[group]) for group, (first, end) in ranges.items())
        new = blocks.allocate(num_blocks)
        if new is None:
            for of_group in kept.values():
                blocks.release(of_group)
            return None
        by_group = {
            group: WindowTable(
                first,
                [*kept[group], *(next(new) for _ in range(first + len(kept[group]), end))],
                tuple(own_ids[group][end:]),
            )
            for group, (first, end) in ranges.items()
        }
        return DenseTables(self._hole_blocks, by_group)

    def take_behind(self, num_pages: Sequence[int], end_tokens: int) -> dict[int, list[int]] | None:
        """Take blocks behind a request's own blocks, up to a token. Only the next step reads them.

        Returns:
            The ids of these blocks, by KV cache group. None if there are too few blocks; then
            nothing is taken.
        """
        missing = {
            group: max(0, -(-end_tokens // tokens) - num_pages[group])
            for group, tokens in self._hole_blocks.tokens_per_page.items()
        }
        new = self._hole_blocks.blocks.allocate(sum(missing.values()))
        if new is None:
            return None
        taken = {group: [next(new) for _ in range(count)] for group, count in missing.items()}
        for blocks in taken.values():
            self._hole_blocks.release_after_step(blocks)
        return {group: [block.block_id for block in blocks] for group, blocks in taken.items()}
