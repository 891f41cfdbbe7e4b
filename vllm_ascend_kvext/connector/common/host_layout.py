# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vllm-ascend-kvext project
"""What the scheduler side knows of the workers' pages: sizes, units, and the pages of a piece.

Rows of full-attention groups are stored by ranges of tokens. Window tails and states are stored
together, by boundaries.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from functools import lru_cache

from vllm_ascend_kvext.connector.common.messages import WorkerLayout
from vllm_ascend_kvext.errors import ConnectorError
from vllm_ascend_kvext.groups.model import GroupKind
from vllm_ascend_kvext.layout.host_arrangement import HostArrangement
from vllm_ascend_kvext.layout.model import KVLayout, LayoutGroup, StatePolicy
from vllm_ascend_kvext.layout.row_map import RowMap
from vllm_ascend_kvext.layout.rows import kept_rows, needed_rows
from vllm_ascend_kvext.layout.sharing import HostSharing
from vllm_ascend_kvext.layout.transfer_plan import PlacedChunk
from vllm_ascend_kvext.store.entries import Kind, Piece
from vllm_ascend_kvext.store.prefix import TierGeometry, cut_tokens_of
from vllm_ascend_kvext.token_range import TokenRange

_MAX_REMEMBERED = 4096
"""The number of pieces whose places are cached. Prompts are cut at the same tokens."""

MAX_HASH_TOKENS = 128
"""If vLLM hashes more tokens at once than this number, models with states get finer keys."""

MAX_FINE_TOKENS = 64
"""The most tokens of a unit with finer keys."""


class HostLayout:
    """How pieces of a prefix lie in pages and in host memory.

    Args:
        layout: The layout of any worker, see `common_layout`.
        hash_block_size: Tokens per hash of a request. Keys exist at multiples of it.
        chunk_tokens: A function from the unit to the tokens of a chunk.
        states: Whether state groups are kept.
        has_steps_for_states: Whether prefill steps end where a state is to be stored. A state can
            then be stored anywhere in its page.
        has_finer_keys: Whether keys can be had at other multiples than of ``hash_block_size``.
        sharing: How any worker shares its host memory; None if none does.

    Attributes:
        groups: The groups that are kept.
        all_groups: All groups of the layout, kept or not.
        tail_groups: The indices in the layout of the groups that have tails.
        max_continued_tokens: How far before a boundary the tails may end that those at the boundary
            continue. 0 for models with states, as a state at an earlier token of a page is another
            state, and for attention chunks that begin within a page.
        unit_tokens: Requests can resume at multiples of this number of tokens.
        lasting_unit_tokens: The state at a multiple of this number stays in its page when later
            tokens are computed. A state at another multiple of the unit is overwritten by the next
            step of its request. The number is a multiple of the unit.
        tokens_per_key: Keys are needed at multiples of this number of tokens.
        has_states: Whether state groups are kept.
        tokens_per_page: Tokens per page, by KV cache group.
        sharing: How any worker shares its host memory; None if none does.

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
        has_steps_for_states: bool = False,
        has_finer_keys: bool = False,
        sharing: HostSharing | None = None,
    ) -> None:
        self._layout = layout
        self.sharing = sharing
        self._arrangement = HostArrangement(layout, sharing)
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
        self.max_continued_tokens = 0
        if not self.has_states and not any(
            group.restart_tokens % group.tokens_per_page for group in self.groups
        ):
            self.max_continued_tokens = max(group.window_tokens for group in self.groups)
        self.tokens_per_key = hash_block_size
        self.unit_tokens = math.lcm(hash_block_size, *(each.tokens_per_row for each in self.groups))
        self.lasting_unit_tokens = self.unit_tokens
        if has_steps_for_states and any(group.is_snapshot for group in self.groups):
            self._choose_fine_unit(has_finer_keys)
        chunk = chunk_tokens(self.unit_tokens)
        self.geometry = TierGeometry(
            chunk_tokens=chunk,
            unit_tokens=self.unit_tokens,
            needs_rows=bool(self._row_groups),
            needs_tails=bool(self.tail_groups),
            cut_tokens=cut_tokens_of(self.unit_tokens, chunk),
        )
        self._placed = lru_cache(_MAX_REMEMBERED)(self._place)
        self.tokens_per_page = {
            group.kv_cache_group_id: group.tokens_per_page for group in self.all_groups
        }

    def _choose_fine_unit(self, has_finer_keys: bool) -> None:
        """Let requests resume within the pages of states, at the unit of all other groups."""
        rows_tokens = math.lcm(
            *(group.tokens_per_row for group in self.groups if not group.is_snapshot)
        )
        if has_finer_keys and self.tokens_per_key > MAX_HASH_TOKENS:
            fine = range(rows_tokens, MAX_FINE_TOKENS + 1, rows_tokens)
            divisors = [each for each in fine if self.tokens_per_key % each == 0]
            self.tokens_per_key = max(divisors, default=self.tokens_per_key)
        self.unit_tokens = math.lcm(self.tokens_per_key, rows_tokens)

    @property
    def stored_groups(self) -> frozenset[int]:
        """The indices in the layout of the groups that are kept."""
        return frozenset((*self._row_groups, *self.tail_groups))

    def keep_apart(self) -> None:
        """From now on, the workers that share host memory keep their bytes apart in it.

        Pieces become larger. The caller forgets what is stored, and all sizes.
        """
        if self.sharing is not None:
            self.sharing = self.sharing.apart()
            self._arrangement = HostArrangement(self._layout, self.sharing)
            self._placed.cache_clear()

    def share_of_worker(self, is_store: bool) -> float:
        """Which part of the bytes of a piece one worker moves, on average."""
        if self.sharing is None:
            return 1.0
        if is_store:
            return 1 / self.sharing.num_ranks
        own_bytes = all_bytes = 0
        for group, shares in zip(self.all_groups, self.sharing.planes, strict=True):
            for plane, share in zip(group.planes, shares, strict=True):
                own_bytes += plane.row_bytes
                all_bytes += plane.row_bytes * share.num_copies
        return own_bytes / all_bytes

    @property
    def tokens_per_row_page(self) -> dict[int, int]:
        """Tokens per page of the KV cache groups whose rows are stored."""
        groups = {self.all_groups[index].kv_cache_group_id for index in self._row_groups}
        return {group: self.tokens_per_page[group] for group in sorted(groups)}

    def num_bytes(self, piece: Piece) -> int:
        """The host bytes of a piece."""
        return self._placed(piece)[1]

    def chunk(self, piece: Piece, host_offset_bytes: int) -> PlacedChunk:
        """A piece in the form of a `StoreJob`."""
        is_rows = piece.kind is Kind.ROWS
        groups = self._row_groups if is_rows else self.tail_groups
        cut_tokens = self._cut_tokens_of(piece)
        return PlacedChunk(_tokens_of(piece), host_offset_bytes, groups, cut_tokens)

    def row_map(self, piece: Piece) -> RowMap:
        """The rows of a piece once it is stored. Its sections lie one behind the other.

        Rows are arranged cut by cut. So a piece without its last cuts has the row map of the
        shorter piece.
        """
        return self._placed(piece)[0]

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

    def _place(self, piece: Piece) -> tuple[RowMap, int]:
        kept = self._kept_rows(piece)
        sections, num_bytes = self._arrangement.place(kept, self._cut_tokens_of(piece))
        return RowMap.of(sections), num_bytes

    def _cut_tokens_of(self, piece: Piece) -> int:
        """The tokens of the cuts in which a piece is arranged. Tails are never cut."""
        return self.geometry.cut_tokens if piece.kind is Kind.ROWS else 0

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
    """The tokens of a piece. Whole tails at a boundary belong to all tokens before it."""
    is_part = piece.kind is Kind.ROWS or piece.continues
    return TokenRange(piece.first_tokens if is_part else 0, piece.end_tokens)


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
        copies = [
            None if each.sharing is None else each.sharing.num_copies for each in (first, other)
        ]
        if copies[0] != copies[1]:
            raise ConnectorError(
                f"KvextConnector: worker {rank} shares other planes than worker 0: expected copies "
                f"{copies[0]}, found {copies[1]}; start as many workers on each host"
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
            group.blocks_per_page,
            tuple(plane.row_bytes for plane in group.planes),
        )
        for group in layout.groups
    ]
