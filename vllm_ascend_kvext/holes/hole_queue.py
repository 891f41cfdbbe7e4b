# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vllm-ascend-kvext project
"""The holes of requests that wait, parked, until the holes are computed.

A request with holes has its blocks, and what is stored is being loaded into them. Separate rows of
steps compute the holes. The request itself begins behind its last hole, as if everything before had
been loaded. A hole reads all that lies before it. So a hole is computed beside the load only if it
begins where the device's own rows end, if it reads no windows that are being loaded, and if no
drafts are written behind it (`HoleQueue.waits_for_load`). A hole that does not fit into a step is
the last one of its request in this step.

An extension may have a `Preview` computed first. All rows of the preview are thrown away. The
result of the preview decides on the further holes::

    park ── load ends ──> the preview's holes, its row ──> end_preview: all holes ──> end_step
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import NamedTuple

from vllm_ascend_kvext.holes.hole_blocks import (
    HoleBlocks,
    HoleTables,
    RowTables,
    WindowTables,
)
from vllm_ascend_kvext.token_range import TokenRange, union

_NOWHERE = -1


@dataclass(frozen=True, slots=True)
class HoleRow:
    """Tokens of a request that a step computes.

    Attributes:
        row_id: The id of the row, which no request and no other row has.
        window_ids: Block ids from the first page on, by KV cache group with windows. All other
            groups have the block ids of the request.
        behind_ids: For a preview, the block ids behind these, by KV cache group.
        has_last_tokens: Whether its tokens are the last tokens of the request, computed at the
            positions of ``run``.
        is_kept: Whether its rows are kept, and not computed again.
    """

    request_id: str
    row_id: str
    run: TokenRange
    window_ids: Mapping[int, Sequence[int]]
    behind_ids: Mapping[int, Sequence[int]] = field(default_factory=dict)
    has_last_tokens: bool = False
    is_kept: bool = True

    def tables(self, request_ids: Sequence[Sequence[int]]) -> tuple[list[int], ...]:
        """The row's block ids by KV cache group, made from the block ids of its request."""
        return tuple(
            [*self.window_ids.get(group, ids), *self.behind_ids.get(group, ())]
            for group, ids in enumerate(request_ids)
        )


class NewHoles(NamedTuple):
    """Holes of a request that the scheduler's statistics do not know yet.

    Attributes:
        is_planned: Whether the load leaves the holes out by plan. If not, the load has failed to
            bring their rows, or has brought them in vain.
    """

    request_id: str
    num_tokens: int
    is_planned: bool


class Preview(ABC):
    """A row behind a request's holes that is computed only to be looked at.

    Until `HoleQueue.end_preview`, its request waits, and has only the holes that the preview needs.
    """

    @property
    @abstractmethod
    def is_begun(self) -> bool:
        """Whether its row is in a step."""

    @abstractmethod
    def take_row(
        self,
        new_row_id: Callable[[], str],
        window_ids_of: Callable[[TokenRange], Mapping[int, Sequence[int]] | None],
        max_tokens: int,
        max_row_tokens: int,
    ) -> HoleRow | None:
        """The preview's row in the step that is being planned; None if the step has no room for it.

        Args:
            new_row_id: Makes the row's id.
            window_ids_of: Gives ``HoleRow.window_ids`` for a run; None if there are no blocks.
            max_tokens: The tokens that are left of the step.
            max_row_tokens: The most tokens of one row.
        """

    @abstractmethod
    def note_row(self, num_tokens: int) -> None:
        """A row that the preview needs is in the step that is being planned."""

    @abstractmethod
    def end_step(self) -> None:
        """The latest step was handed to the workers."""


@dataclass(slots=True)
class _Parked:
    """A request with holes.

    Attributes:
        holes: Its holes, ascending. Until its preview ends, only the holes that the preview needs.
        after_tokens: The device has all rows up to here.
    """

    holes: list[TokenRange]
    after_tokens: int
    is_loaded: bool = False
    preview: Preview | None = None


@dataclass
class HoleQueue:
    """The holes of one engine's requests, in the order in which the requests were parked.

    Attributes:
        blocks: The blocks for windows of holes.
        on_parked: Called when a request begins to wait, because steps have to compute its holes.
        waits_for_load: Whether no hole is computed beside the load of its request. Draft layers are
            written behind a hole, and the load writes there, too: which of them comes last would
            differ between ranks.
        lacks_room: Whether the latest step had no room for a hole or a preview that could be
            computed.
    """

    blocks: HoleBlocks
    on_parked: Callable[[], object] = lambda: None
    waits_for_load: bool = False
    lacks_room: bool = False
    _parked: dict[str, _Parked] = field(default_factory=dict)
    _tables: dict[str, RowTables] = field(default_factory=dict)
    _filled: list[str] = field(default_factory=list)
    _new_holes: list[NewHoles] = field(default_factory=list)
    _num_rows: int = 0

    def __len__(self) -> int:
        """The number of requests that wait, or that `end_step` has not returned yet."""
        return len(self._parked) + len(self._filled)

    def begin(
        self, request_id: str, holes: Sequence[TokenRange], after_tokens: int
    ) -> Sequence[WindowTables]:
        """A request has got blocks, and its load begins.

        Returns:
            For each hole, and by KV cache group with windows, the tables into which the tails at
            the hole's beginning are to be loaded. If there are too few blocks, the result is empty,
            and the load has to fail.
        """
        tables = self.blocks.begin([hole.first_tokens for hole in holes])
        if tables is None:
            return []
        self.park(request_id, holes, after_tokens, tables, reads_loaded_windows=True)
        return tables.by_hole

    def park(
        self,
        request_id: str,
        holes: Sequence[TokenRange],
        after_tokens: int,
        tables: RowTables,
        reads_loaded_windows: bool,
        preview: Preview | None = None,
    ) -> None:
        """A request has got its blocks, including the blocks in ``tables``, and its load begins.

        Args:
            holes: The holes that are computed, or that a preview needs.
            after_tokens: The device has all rows up to here.
            reads_loaded_windows: Whether a hole at ``after_tokens`` reads windows that the load
                brings.
        """
        reads_what_is_loaded = after_tokens and self.blocks.has_windows and reads_loaded_windows
        if reads_what_is_loaded or self.waits_for_load:
            after_tokens = _NOWHERE
        self._park(request_id, _Parked(list(holes), after_tokens, preview=preview), tables)

    def add(self, request_id: str, holes: Sequence[TokenRange]) -> None:
        """Add holes for what the load of a request has left out. Call it before `note_load_ended`.

        Only models without windows may use this, because the blocks of windows are allocated when
        the load begins.
        """
        assert not self.blocks.has_windows
        parked = self._parked.get(request_id)
        if parked is None:
            parked = _Parked([], _NOWHERE)
            self._park(request_id, parked, HoleTables(self.blocks, []))
        parked.holes = list(union([*parked.holes, *holes]))

    def _park(self, request_id: str, parked: _Parked, tables: RowTables) -> None:
        self._parked[request_id] = parked
        self._tables[request_id] = tables
        self.on_parked()

    def note_load_ended(self, request_id: str) -> bool:
        """A load has ended. If it failed, the request was dropped before.

        Returns:
            Whether the request has holes.
        """
        parked = self._parked.get(request_id)
        if parked is None:
            self._release(request_id)
            return False
        parked.is_loaded = True
        return True

    def drop(self, request_id: str) -> None:
        """A request has ended, or its load has failed.

        If its load has ended, the next `end_step` returns the request. Its rows in the latest step
        are computed for nothing.
        """
        parked = self._parked.pop(request_id, None)
        if parked is not None and parked.is_loaded:
            self._filled.append(request_id)
            self._release(request_id)

    def restart(self, request_id: str) -> bool:
        """Forget a request whose blocks are taken away. While its load runs, the request stays.

        Returns:
            Whether the request was forgotten.
        """
        parked = self._parked.get(request_id)
        if parked is None or not parked.is_loaded:
            return False
        del self._parked[request_id]
        self._release(request_id)
        self._new_holes = [new for new in self._new_holes if new.request_id != request_id]
        return True

    def end_step(self) -> list[str]:
        """The latest step was handed to the workers.

        Returns:
            The requests that have all their KV after this step.
        """
        self.blocks.end_step()
        for request_id, parked in list(self._parked.items()):
            if parked.preview is not None and parked.preview.is_begun:
                parked.preview.end_step()
            if parked.is_loaded and not parked.holes and parked.preview is None:
                del self._parked[request_id]
                self._filled.append(request_id)
                self._release(request_id)
        filled, self._filled = self._filled, []
        return filled

    def take_rows(
        self,
        max_tokens: int,
        max_rows: int,
        max_row_tokens: int,
        other_ids: Collection[str] = (),
    ) -> list[HoleRow]:
        """The rows that the next step computes.

        Args:
            other_ids: Ids that no row may have.
        """
        rows: list[HoleRow] = []
        self.lacks_room = True
        for request_id, parked in self._parked.items():
            while parked.holes:
                hole = parked.holes[0]
                if not parked.is_loaded and hole.first_tokens != parked.after_tokens:
                    break
                if max_tokens <= 0 or len(rows) >= max_rows:
                    return rows
                num_tokens = min(hole.num_tokens, max_tokens, max_row_tokens)
                end_tokens = hole.first_tokens + num_tokens
                run = TokenRange(hole.first_tokens, end_tokens)
                window_ids = self._window_ids(request_id, run)
                # While requests wait, a step has few free blocks. A short row is better than none.
                while window_ids is None and run.num_tokens > 1:
                    end_tokens = run.first_tokens + run.num_tokens // 2
                    run = TokenRange(run.first_tokens, end_tokens)
                    window_ids = self._window_ids(request_id, run)
                if window_ids is None:
                    return rows  # Later requests leave the free blocks to this request.
                max_tokens -= run.num_tokens
                row_id = self._new_row_id(request_id, other_ids)
                is_kept = parked.preview is None
                rows.append(HoleRow(request_id, row_id, run, window_ids, is_kept=is_kept))
                if parked.preview is not None:
                    parked.preview.note_row(run.num_tokens)
                parked.after_tokens = end_tokens
                is_end_of_hole = end_tokens == hole.end_tokens
                self._tables[request_id].leave(end_tokens, is_end_of_hole)
                if not is_end_of_hole:
                    parked.holes[0] = TokenRange(end_tokens, hole.end_tokens)
                    break
                del parked.holes[0]
            preview = parked.preview
            if preview is None or preview.is_begun or parked.holes or not parked.is_loaded:
                continue
            if max_tokens <= 0 or len(rows) >= max_rows:
                return rows
            row = preview.take_row(
                partial(self._new_row_id, request_id, other_ids),
                partial(self._window_ids, request_id),
                max_tokens,
                max_row_tokens,
            )
            if row is None:
                return rows
            max_tokens -= row.run.num_tokens
            rows.append(row)
        self.lacks_room = False
        return rows

    def preview_of(self, request_id: str) -> Preview | None:
        """The preview that a request waits for; None if it waits for no preview."""
        parked = self._parked.get(request_id)
        return None if parked is None else parked.preview

    def end_preview(self, request_id: str, holes: Sequence[TokenRange]) -> None:
        """The preview of a request has been looked at, or is given up.

        Args:
            holes: The holes of the request.
        """
        parked = self._parked[request_id]
        parked.holes = list(holes)
        parked.preview = None

    def note_new_holes(
        self, request_id: str, holes: Sequence[TokenRange], is_planned: bool = False
    ) -> None:
        """Have the scheduler's statistics corrected; see `NewHoles`."""
        num_tokens = sum(hole.num_tokens for hole in holes)
        self._new_holes.append(NewHoles(request_id, num_tokens, is_planned))

    def take_new_holes(self) -> list[NewHoles]:
        """The holes that were noted since the last call."""
        new, self._new_holes = self._new_holes, []
        return new

    def _new_row_id(self, request_id: str, other_ids: Collection[str]) -> str:
        while True:
            self._num_rows += 1
            row_id = f"{request_id}-hole-{self._num_rows}"
            if row_id not in other_ids:
                return row_id

    def _window_ids(self, request_id: str, run: TokenRange) -> Mapping[int, Sequence[int]] | None:
        """``HoleRow.window_ids`` of a run; None if there are no blocks."""
        tables = self._tables[request_id].extend(run)
        if tables is None:
            return None
        return {group: table.all_block_ids for group, table in tables.items()}

    def _release(self, request_id: str) -> None:
        tables = self._tables.pop(request_id, None)
        if tables is not None:
            tables.release()
