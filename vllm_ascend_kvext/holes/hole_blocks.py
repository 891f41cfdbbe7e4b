# SPDX-License-Identifier: Apache-2.0
"""Blocks in which holes of models with windows are computed, and tokens that are only looked at.

A request that is parked has the blocks of its windows only before the place where it goes on. What
a hole reads and writes of windows lies in blocks of its own, which are nobody else's and are not
cached. They begin with what is loaded, the tails at the hole's first token, and move on with the
rows that compute it::

    tokens           ........[ tails ][ hole ......................]........[ tails ]
    begin            null     T  T                                            R  R
    first row        null     T  T    n  n  n                                 R  R
    second row       null               n  n  n  n                            R  R

``T`` is loaded, ``n`` is new, ``R`` is the request's. What a row leaves is freed before the next
step is planned, as upstream frees what leaves a window.

Where what lies between holes is no tails but tokens of segments, all rows of a request share one
table without gaps, which ends with the request's own blocks.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from vllm_ascend_kvext.layout.model import NULL_PAGE
from vllm_ascend_kvext.token_range import TokenRange


class Blocks(Protocol):
    """Where blocks come from, and go to."""

    def allocate(self, num_blocks: int) -> Iterator[Any] | None: ...

    def take(self, blocks: Sequence[Any]) -> None: ...

    def release(self, blocks: Sequence[Any]) -> None: ...


@dataclass(slots=True)
class WindowTable:
    """Part of a block table.

    Attributes:
        first_page: Pages before this part are null.
        own_ids: Ids of the request's own blocks behind them.
    """

    first_page: int
    blocks: list[Any]
    own_ids: tuple[int, ...] = ()

    @property
    def end_page(self) -> int:
        return self.first_page + len(self.blocks)

    @property
    def block_ids(self) -> tuple[int, ...]:
        return (*[block.block_id for block in self.blocks], *self.own_ids)

    @property
    def all_block_ids(self) -> list[int]:
        """From the request's first page on."""
        return [NULL_PAGE] * self.first_page + list(self.block_ids)


WindowTables = dict[int, WindowTable]
"""By KV cache group with windows."""


class HoleBlocks:
    """The blocks of all requests with holes of one engine, beside their own.

    They are nobody else's, but for what is held, and are not cached.

    Args:
        window_pages: First and end page that going on from a token reads, by KV cache group with
            windows.
        tokens_per_page: By KV cache group.

    Attributes:
        has_windows: Whether the model has some.
    """

    def __init__(
        self,
        blocks: Blocks,
        window_pages: Callable[[int], Mapping[int, tuple[int, int]]],
        tokens_per_page: Mapping[int, int],
    ) -> None:
        self._blocks = blocks
        self.window_pages = window_pages
        self.has_windows = bool(window_pages(0))
        self._tokens_per_page = tokens_per_page
        self._holes: dict[str, list[WindowTables]] = {}
        self._dense: dict[str, WindowTables] = {}
        self._held: dict[str, Mapping[int, Sequence[Any]]] = {}
        self._leaving: list[Any] = []

    def hold(self, request_id: str, cached: Mapping[int, Sequence[Any]]) -> None:
        """Keep cached blocks until `begin_dense`, or until `release_held`.

        The request's own blocks are allocated first, and would be taken from what is free.

        Args:
            cached: By KV cache group: blocks that have the whole window where it will begin. They
                are only read.
        """
        assert request_id not in self._held
        for blocks in cached.values():
            self._blocks.take(blocks)
        self._held[request_id] = cached

    def is_held(self, request_id: str) -> bool:
        """Whether `hold` was called for a request that has not begun."""
        return request_id in self._held

    def release_held(self) -> None:
        """A step is planned: whoever has not begun in it has got no blocks."""
        for cached in self._held.values():
            for blocks in cached.values():
                self._blocks.release(blocks)
        self._held.clear()

    def begin_dense(
        self, request_id: str, first_tokens: int, own_ids: Sequence[Sequence[int]]
    ) -> WindowTables | None:
        """Take blocks for all windows from a token on, as far as a request has none of its own.

        What is held for the request becomes part of the tables.

        Args:
            first_tokens: Where it begins; the window before it is in the tables, too.
            own_ids: The request's block ids, by KV cache group, nulls included.

        Returns:
            By KV cache group with windows; None, and nothing is taken, if there are too few blocks.
        """
        ranges: dict[int, tuple[int, int]] = {}
        for group, (first_page, _) in self.window_pages(first_tokens).items():
            ids = own_ids[group]
            first_own = next((page for page, own in enumerate(ids) if own != NULL_PAGE), len(ids))
            ranges[group] = min(first_page, first_own), first_own
        held = self._held.pop(request_id, {})
        kept: dict[int, list[Any]] = {}
        for group, (first, end) in ranges.items():
            blocks = list(held.get(group, ()))
            kept[group] = blocks[: end - first]
            self._blocks.release(blocks[end - first :])
        num_blocks = sum(end - first - len(kept[group]) for group, (first, end) in ranges.items())
        new = self._blocks.allocate(num_blocks)
        if new is None:
            for blocks in kept.values():
                self._blocks.release(blocks)
            return None
        self._dense[request_id] = {
            group: WindowTable(
                first,
                [*kept[group], *(next(new) for _ in range(first + len(kept[group]), end))],
                tuple(own_ids[group][end:]),
            )
            for group, (first, end) in ranges.items()
        }
        return self._dense[request_id]

    def num_blocks(self, first_tokens: int, end_tokens: int) -> int:
        """Blocks for windows of some tokens, what is read before the first of them included."""
        return sum(
            -(-end_tokens // self._tokens_per_page[group]) - first
            for group, (first, _) in self.window_pages(first_tokens).items()
        )

    def begin(self, request_id: str, first_tokens: Iterable[int]) -> list[WindowTables] | None:
        """Take blocks for the tails at which the holes of a request begin.

        Returns:
            By hole, tables of those blocks, none of them without windows; None, and nothing is
            taken, if there are too few.
        """
        if not self.has_windows:
            return []
        of_holes = [self.window_pages(tokens) for tokens in first_tokens]
        num_blocks = sum(end - first for pages in of_holes for first, end in pages.values())
        new = self._blocks.allocate(num_blocks)
        if new is None:
            return None
        self._holes[request_id] = [
            {
                group: WindowTable(first, [next(new) for _ in range(first, end)])
                for group, (first, end) in pages.items()
            }
            for pages in of_holes
        ]
        return self._holes[request_id]

    def extend(self, request_id: str, run: TokenRange) -> WindowTables | None:
        """Take blocks for a row of a request's first hole.

        Returns:
            The hole's tables up to the row's end; None, and nothing is taken, if there are too few.
        """
        if not self.has_windows or request_id in self._dense:
            return self._dense.get(request_id, {})
        tables = self._holes[request_id][0]
        missing = {
            group: max(0, -(-run.end_tokens // self._tokens_per_page[group]) - table.end_page)
            for group, table in tables.items()
        }
        new = self._blocks.allocate(sum(missing.values()))
        if new is None:
            return None
        for group, table in tables.items():
            table.blocks += [next(new) for _ in range(missing[group])]
        return tables

    def leave(self, request_id: str, end_tokens: int, is_end_of_hole: bool) -> None:
        """A row up to there is in the step that is being planned: what it leaves goes after it."""
        if not self.has_windows or request_id in self._dense:
            return
        tables = self._holes[request_id][0]
        if is_end_of_hole:
            for table in tables.values():
                self._leaving += table.blocks
            del self._holes[request_id][0]
            return
        for group, (first_page, _) in self.window_pages(end_tokens).items():
            table = tables[group]
            num_blocks = first_page - table.first_page
            self._leaving += table.blocks[:num_blocks]
            del table.blocks[:num_blocks]
            table.first_page = first_page

    def take_probe(self, num_pages: Sequence[int], end_tokens: int) -> dict[int, list[int]] | None:
        """Take blocks behind a request's own up to a token; only the next step reads them.

        Returns:
            Block ids behind the request's, by KV cache group; None, and nothing is taken, if there
            are too few.
        """
        missing = {
            group: max(0, -(-end_tokens // tokens) - num_pages[group])
            for group, tokens in self._tokens_per_page.items()
        }
        new = self._blocks.allocate(sum(missing.values()))
        if new is None:
            return None
        taken = {group: [next(new) for _ in range(count)] for group, count in missing.items()}
        self._leaving += (block for blocks in taken.values() for block in blocks)
        return {group: [block.block_id for block in blocks] for group, blocks in taken.items()}

    def end_step(self) -> None:
        """The latest step has been handed to the workers: what it left can be used by the next."""
        leaving, self._leaving = self._leaving, []
        self._blocks.release(leaving)

    def drop(self, request_id: str) -> None:
        """A request has no holes any more, and no load fills its blocks."""
        for tables in (*self._holes.pop(request_id, ()), self._dense.pop(request_id, {})):
            for table in tables.values():
                self._blocks.release(table.blocks)
