# SPDX-License-Identifier: Apache-2.0
"""What the scheduler side knows of the workers' pages: sizes, units, and the pages of a piece.

Rows of full-attention groups are stored by ranges of tokens. Window tails and states are stored
together, by boundaries.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

from vllm_ascend_kvext.connector.common.messages import WorkerLayout
from vllm_ascend_kvext.errors import ConnectorError
from vllm_ascend_kvext.groups.model import GroupKind
from vllm_ascend_kvext.layout.host_arrangement import HostArrangement
from vllm_ascend_kvext.layout.model import KVLayout, LayoutGroup, StatePolicy
from vllm_ascend_kvext.layout.row_map import RowMap
from vllm_ascend_kvext.layout.rows import kept_rows, needed_rows
from vllm_ascend_kvext.layout.transfer_plan import PlacedChunk
from vllm_ascend_kvext.store.entries import Kind, Piece
from vllm_ascend_kvext.store.prefix import TierGeometry
from vllm_ascend_kvext.token_range import TokenRange


class HostLayout:
    """How pieces of a prefix lie in pages and in host memory.

    Args:
        layout: The layout of any worker, see `common_layout`.
        hash_block_size: Tokens per hash of a request. Keys exist at multiples of it.
        chunk_tokens: A function from the unit to the tokens of a chunk.
        states: Whether state groups are kept.

    Attributes:
        groups: The groups that are kept.
        all_groups: All groups of the layout, kept or not.
        tail_groups: The indices in the layout of the groups that have tails.
        unit_tokens: Requests can resume at multiples of this number of tokens.
        has_states: Whether state groups are kept.
        tokens_per_page: Tokens per page, by KV cache group.

    Raises:
        ConnectorError: If the model has nothing to store.
        TierError: If the chunk is not a multiple of the unit.
    """

    def __init__(
        self,
        layout: KVLayout,
        hash_block_size: int,
        chunk_tokens: Callable[[int], int],
        states: StatePolicy,
    ) -> None:
        self._arrangement = HostArrangement(layout)
        self._states = states
        self.all_groups = layout.groups
        kept = [
            (index, group)
            for index, group in enumerate(layout.groups)
            if not (group.holds_states and states is StatePolicy.SKIP)
        ]
        self._row_groups = tuple(i for i, group in kept if group.kind is GroupKind.FULL)
        self.tail_groups = tuple(i for i, group in kept if group.kind is not GroupKind.FULL)
        self.groups = tuple(group for _, group in kept)
        if not kept:
            raise ConnectorError(
                "KvextConnector: expected KV cache groups to offload, found none but states that "
                "state_policy=skip leaves out; start without the connector"
            )
        self.has_states = any(group.holds_states for group in self.groups)
        self.unit_tokens = math.lcm(hash_block_size, *(each.tokens_per_row for each in self.groups))
        self.geometry = TierGeometry(
            chunk_tokens=chunk_tokens(self.unit_tokens),
            unit_tokens=self.unit_tokens,
            needs_rows=bool(self._row_groups),
            needs_tails=bool(self.tail_groups),
        )
        self.tokens_per_page = {
            group.kv_cache_group_id: group.tokens_per_page for group in self.all_groups
        }

    def num_bytes(self, piece: Piece) -> int:
        """The host bytes of a piece."""
        return sum(
            self._arrangement.section(index, len(rows)).num_bytes
            for index, rows in self._kept_rows(piece)
        )

    def chunk(self, piece: Piece, host_offset_bytes: int) -> PlacedChunk:
        """A piece in the form of a `StoreJob`."""
        is_rows = piece.kind is Kind.ROWS
        return PlacedChunk(
            _tokens_of(piece), host_offset_bytes, self._row_groups if is_rows else self.tail_groups
        )

    def row_map(self, piece: Piece) -> RowMap:
        """The rows of a piece once it is stored. Its sections lie one behind the other."""
        return RowMap.of(self._arrangement.place(self._kept_rows(piece))[0])

    def rows_within(self, row_map: RowMap, first_tokens: int, end_tokens: int) -> RowMap:
        """The rows of a map within a range of tokens. The range is cut at units."""
        kept = []
        for rows in row_map:
            tokens_per_row = self.all_groups[rows.group].tokens_per_row
            first_row = max(rows.first_row, first_tokens // tokens_per_row)
            end_row = min(rows.end_row, end_tokens // tokens_per_row)
            if first_row < end_row:
                kept.append(rows._replace(first_row=first_row, end_row=end_row))
        return RowMap.of(kept)

    def pages(self, piece: Piece) -> tuple[tuple[int, int, int], ...]:
        """The pages that a piece reads: KV cache group, first page, end page.

        No page may be null.
        """
        kept = [(self.all_groups[index], rows) for index, rows in self._kept_rows(piece)]
        return tuple((group.kv_cache_group_id, *_pages_of(group, rows)) for group, rows in kept)

    def window_pages(self, boundary_tokens: int) -> dict[int, tuple[int, int]]:
        """The pages of windows and states that a resume at a boundary reads.

        Returns:
            The first and the end page, by KV cache group with tails.
        """
        found: dict[int, tuple[int, int]] = {}
        for index in self.tail_groups:
            group = self.all_groups[index]
            first, end = self._tail_pages(group, boundary_tokens) if boundary_tokens else (0, 0)
            of_others = found.get(group.kv_cache_group_id, (first, end))
            found[group.kv_cache_group_id] = min(first, of_others[0]), max(end, of_others[1])
        return found

    def pages_that_leave(
        self, boundary_tokens: int, upto_tokens: int
    ) -> tuple[tuple[int, int, int], ...]:
        """The `pages` of a boundary's tails that may be freed before a later token is computed."""
        leaving = []
        for index in self.tail_groups:
            group = self.all_groups[index]
            first, end = self._tail_pages(group, boundary_tokens)
            if not group.is_snapshot:
                # Pages in the window of the later token stay.
                end = min(end, self._tail_pages(group, upto_tokens)[0])
            if first < end:
                leaving.append((group.kv_cache_group_id, first, end))
        return tuple(leaving)

    def _tail_pages(self, group: LayoutGroup, boundary_tokens: int) -> tuple[int, int]:
        rows = needed_rows(group, TokenRange(0, boundary_tokens), self._states)
        if not rows:
            page = boundary_tokens // group.tokens_per_page
            return page, page
        return _pages_of(group, rows)

    def _kept_rows(self, piece: Piece) -> list[tuple[int, range]]:
        """Pairs of a group's index in the layout and its rows, as `TransferPlanner` stores them."""
        groups = self._row_groups if piece.kind is Kind.ROWS else self.tail_groups
        tokens = _tokens_of(piece)
        kept = [
            (index, kept_rows(self.all_groups[index], tokens, self._states)) for index in groups
        ]
        return [(index, rows) for index, rows in kept if rows]


def _pages_of(group: LayoutGroup, rows: range) -> tuple[int, int]:
    """The first and the end page of some rows."""
    return rows.start // group.rows_per_page, -(-rows.stop // group.rows_per_page)


def _tokens_of(piece: Piece) -> TokenRange:
    """The tokens of a piece. The tails at a boundary belong to all tokens before it."""
    return TokenRange(piece.first_tokens if piece.kind is Kind.ROWS else 0, piece.end_tokens)


def common_layout(workers: Sequence[WorkerLayout]) -> WorkerLayout:
    """The layout that all workers share. A piece has the same size and place on every worker.

    Raises:
        ConnectorError: If the layouts of workers differ in more than addresses.
    """
    first, *others = workers
    for rank, other in enumerate(others, 1):
        if other.host_bytes != first.host_bytes or _shape(other.layout) != _shape(first.layout):
            raise ConnectorError(
                f"KvextConnector: worker {rank} has other pages than worker 0: expected "
                f"{first.host_bytes} host bytes and groups {_shape(first.layout)}, found "
                f"{other.host_bytes} and {_shape(other.layout)}; host places are chosen for all "
                "workers at once, so start with a parallel size at which they are equal"
            )
    return first


def _shape(layout: KVLayout) -> list[tuple[object, ...]]:
    return [
        (
            group.kv_cache_group_id,
            group.kind.value,
            group.tokens_per_page,
            group.tokens_per_row,
            group.window_tokens,
            group.restart_tokens,
            tuple(plane.row_bytes for plane in group.planes),
        )
        for group in layout.groups
    ]
