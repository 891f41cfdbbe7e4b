# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vllm-ascend-kvext project
"""Blocks in which holes of models with windows are computed.

A request that is parked has the blocks of its windows only before the place where it goes on. So a
hole reads and writes its windows in blocks of its own. No other request has these blocks, and they
are not cached. The blocks begin with the loaded tails at the hole's first token. They move on with
the rows that compute the hole::

    tokens           ........[ tails ][ hole ......................]........[ tails ]
    begin            null     T  T                                            R  R
    first row        null     T  T    n  n  n                                 R  R
    second row       null               n  n  n  n                            R  R

``T`` is loaded, ``n`` is new, and ``R`` belongs to the request. The blocks that a row leaves are
freed before the next step is planned, as upstream frees blocks that leave a window.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from vllm_ascend_kvext.layout.model import NULL_PAGE
from vllm_ascend_kvext.token_range import TokenRange


class Blocks(Protocol):
    """The pool from which blocks are taken, and to which they return."""

    def allocate(self, num_blocks: int) -> Iterator[Any] | None: ...

    def take(self, blocks: Sequence[Any]) -> None: ...

    def release(self, blocks: Sequence[Any]) -> None: ...


@dataclass(slots=True)
class WindowTable:
    """Part of a block table.

    Attributes:
        first_page: Pages before this part are null.
        own_ids: The ids of the request's own blocks behind ``blocks``.
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
        """The block ids from the request's first page on."""
        return [NULL_PAGE] * self.first_page + list(self.block_ids)


WindowTables = dict[int, WindowTable]
"""The tables of one hole, by KV cache group with windows."""


class RowTables(ABC):
    """The blocks of windows in which the rows of one request's holes are computed."""

    @abstractmethod
    def extend(self, run: TokenRange) -> WindowTables | None:
        """Take blocks for a row of the first hole.

        Returns:
            The row's tables. If there are too few blocks, nothing is taken, and None is returned.
        """

    @abstractmethod
    def leave(self, end_tokens: int, is_end_of_hole: bool) -> None:
        """A row up to ``end_tokens`` is in the step that is being planned.

        The blocks that the row leaves are released after this step.
        """

    @abstractmethod
    def release(self) -> None:
        """Release all blocks. The request has no holes any more, and no load fills the blocks."""


class HoleBlocks:
    """Makes the tables of requests with holes of one engine.

    Args:
        window_pages: Called with a token. Returns the first and the end page of the windows that
            are read to compute from this token on, by KV cache group with windows.
        tokens_per_page: The tokens of a page, by KV cache group.

    Attributes:
        has_windows: Whether the model has windows.
    """

    def __init__(
        self,
        blocks: Blocks,
        window_pages: Callable[[int], Mapping[int, tuple[int, int]]],
        tokens_per_page: Mapping[int, int],
    ) -> None:
        self.blocks = blocks
        self.window_pages = window_pages
        self.has_windows = bool(window_pages(0))
        self.tokens_per_page = tokens_per_page
        self._leaving: list[Any] = []

    def begin(self, first_tokens: Iterable[int]) -> HoleTables | None:
        """Take blocks for the tails at which the holes of a request begin.

        Returns:
            The request's tables. If there are too few blocks, nothing is taken, and None is
            returned.
        """
        if not self.has_windows:
            return HoleTables(self, [])
        of_holes = [self.window_pages(tokens) for tokens in first_tokens]
        num_blocks = sum(end - first for pages in of_holes for first, end in pages.values())
        new = self.blocks.allocate(num_blocks)
        if new is None:
            return None
        by_hole = [
            {
                group: WindowTable(first, [next(new) for _ in range(first, end)])
                for group, (first, end) in pages.items()
            }
            for pages in of_holes
        ]
        return HoleTables(self, by_hole)

    def release_after_step(self, blocks: Iterable[Any]) -> None:
        """Release blocks that the step which is being planned reads for the last time."""
        self._leaving += blocks

    def end_step(self) -> None:
        """The latest step has been handed to the workers. Release the blocks that its rows left."""
        leaving, self._leaving = self._leaving, []
        self.blocks.release(leaving)


class HoleTables(RowTables):
    """The tables of one request, hole by hole. They are empty for a model without windows.

    Attributes:
        by_hole: The tables of the holes that are not computed yet. The tails at the beginning of
            each hole are loaded into them.
    """

    def __init__(self, hole_blocks: HoleBlocks, by_hole: list[WindowTables]) -> None:
        self._hole_blocks = hole_blocks
        self.by_hole = by_hole

    def extend(self, run: TokenRange) -> WindowTables | None:
        if not self._hole_blocks.has_windows:
            return {}
        tables = self.by_hole[0]
        tokens_per_page = self._hole_blocks.tokens_per_page
        missing = {
            group: max(0, -(-run.end_tokens // tokens_per_page[group]) - table.end_page)
            for group, table in tables.items()
        }
        new = self._hole_blocks.blocks.allocate(sum(missing.values()))
        if new is None:
            return None
        for group, table in tables.items():
            table.blocks += [next(new) for _ in range(missing[group])]
        return tables

    def leave(self, end_tokens: int, is_end_of_hole: bool) -> None:
        if not self._hole_blocks.has_windows:
            return
        tables = self.by_hole[0]
        if is_end_of_hole:
            for table in tables.values():
                self._hole_blocks.release_after_step(table.blocks)
            del self.by_hole[0]
            return
        for group, (first_page, _) in self._hole_blocks.window_pages(end_tokens).items():
            table = tables[group]
            num_blocks = first_page - table.first_page
            self._hole_blocks.release_after_step(table.blocks[:num_blocks])
            del table.blocks[:num_blocks]
            table.first_page = first_page

    def release(self) -> None:
        by_hole, self.by_hole = self.by_hole, []
        for tables in by_hole:
            for table in tables.values():
                self._hole_blocks.blocks.release(table.blocks)
