# SPDX-License-Identifier: Apache-2.0
"""Holes of requests that wait, parked, until these are computed.

A request with holes has its blocks, and what is stored is being loaded into them. Its holes are
computed by rows of a step that are not its own: the request itself begins behind the last hole, as
if all of it had been loaded. A hole reads all that lies before it. So only a hole at which the
device's own rows end is computed beside the load, and not if it reads windows that are loaded; and
a hole that does not fit into a step is the last one in it.

A request may have a *probe*: a row behind all others that is computed only to be looked at, with
what is missing before it. All that is thrown away, and what is learnt from it makes further holes::

    begin ── load ends ──> what is missing, and the probe ──> end_probe: all holes ──> end_step

A probe is given up where there is no room for it, or where nothing is learnt, for many steps.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from vllm_ascend_kvext.holes.hole_blocks import HoleBlocks, WindowTables
from vllm_ascend_kvext.token_range import TokenRange, union

_NOWHERE = -1

MAX_PROBE_STEPS = 64
"""So many steps a probe waits for room, and then again for what is learnt from it: more than there
are steps in flight."""


@dataclass(frozen=True, slots=True)
class HoleRow:
    """Tokens of a request that a step computes.

    Attributes:
        row_id: The id of the row, which no request and no other row has.
        window_ids: Block ids from the first page on, by KV cache group with windows. All other
            groups have those of the request.
        behind_ids: Block ids behind these, by KV cache group; for a probe.
        is_probe: Whether it is a probe: as many of the request's last tokens, at the places from
            ``run`` on.
        is_kept: Whether it is not computed again.
    """

    request_id: str
    row_id: str
    run: TokenRange
    window_ids: Mapping[int, Sequence[int]]
    behind_ids: Mapping[int, Sequence[int]] = field(default_factory=dict)
    is_probe: bool = False
    is_kept: bool = True

    def tables(self, request_ids: Sequence[Sequence[int]]) -> tuple[list[int], ...]:
        """The row's block ids by KV cache group, from those of its request."""
        return tuple(
            [*self.window_ids.get(group, ids), *self.behind_ids.get(group, ())]
            for group, ids in enumerate(request_ids)
        )


class ProbePlan(NamedTuple):
    """The ``run`` behind all holes that is only looked at, and what no load brings before it."""

    run: TokenRange
    missing: tuple[TokenRange, ...]


@dataclass(slots=True)
class _Probe:
    """A probe from which nothing has been learnt yet."""

    run: TokenRange
    holes: tuple[TokenRange, ...]  # What is computed whatever is learnt.
    num_pages: tuple[int, ...]  # Pages of the request, by KV cache group.
    row_id: str = ""  # Empty before it is in a step.
    num_steps: int = 0  # How long it has waited.


@dataclass(slots=True)
class _Parked:
    """A request with holes, ascending; before a probe, these are what the probe needs."""

    holes: list[TokenRange]
    after_tokens: int  # Up to here, the device has all rows.
    is_loaded: bool = False
    probe: _Probe | None = None


@dataclass(slots=True)
class HoleQueue:
    """The holes of one engine's requests, those that were parked first in front.

    Attributes:
        blocks: For probes, and for what holes read and write of windows.
        on_parked: Called when a request begins to wait: steps have to compute its holes.
        lacks_room: Whether a hole or a probe that could be computed had no room in the latest step.
    """

    blocks: HoleBlocks
    on_parked: Callable[[], object] = lambda: None
    lacks_room: bool = False
    _parked: dict[str, _Parked] = field(default_factory=dict)
    _filled: list[str] = field(default_factory=list)
    _num_rows: int = 0
    _lost_probes: int = 0

    def __len__(self) -> int:
        """Requests that wait, or are filled and not yet taken."""
        return len(self._parked) + len(self._filled)

    def begin(
        self, request_id: str, holes: Sequence[TokenRange], after_tokens: int
    ) -> list[WindowTables]:
        """A request has got blocks, and its load begins.

        Returns:
            By hole, and by KV cache group with windows: where the tails at its beginning are to be
            loaded. Nothing if there are no blocks for them: the load has to fail then.
        """
        tables = self.blocks.begin(request_id, [hole.first_tokens for hole in holes])
        if after_tokens and self.blocks.has_windows:
            after_tokens = _NOWHERE  # The window before it is loaded.
        if tables is None:
            return []
        self._park(request_id, _Parked(list(holes), after_tokens))
        return tables

    def begin_dense(
        self,
        request_id: str,
        holes: Sequence[TokenRange],
        after_tokens: int,
        first_tokens: int,
        own_ids: Sequence[Sequence[int]],
        probe: ProbePlan | None = None,
    ) -> WindowTables | None:
        """The same where segments lie between the holes, whose windows have no tails.

        Args:
            first_tokens: Where the request is exact no more.
            probe: Before these are computed.

        Returns:
            By KV cache group with windows: where windows are loaded and computed. None if there are
            no blocks for them: the load has to fail then.
        """
        if after_tokens and self.blocks.has_windows and not self.blocks.is_held(request_id):
            after_tokens = _NOWHERE  # The window before it is loaded.
        tables = self.blocks.begin_dense(request_id, first_tokens, own_ids)
        if tables is None:
            return None
        parked = _Parked(list(holes), after_tokens)
        if probe is not None:
            parked.holes = list(probe.missing)
            parked.probe = _Probe(probe.run, tuple(holes), tuple(map(len, own_ids)))
        self._park(request_id, parked)
        return tables

    def add(self, request_id: str, holes: Sequence[TokenRange]) -> None:
        """The load of a request, which has ended, has left something out; call before its end.

        Only where a model has no windows, whose blocks were given when the load began.
        """
        assert not self.blocks.has_windows
        parked = self._parked.get(request_id)
        if parked is None:
            parked = _Parked([], _NOWHERE)
            self._park(request_id, parked)
        parked.holes = list(union([*parked.holes, *holes]))

    def _park(self, request_id: str, parked: _Parked) -> None:
        self._parked[request_id] = parked
        self.on_parked()

    def note_load_ended(self, request_id: str) -> bool:
        """A load has ended, well if it was not dropped before; whether its request has holes."""
        parked = self._parked.get(request_id)
        if parked is None:
            self.blocks.drop(request_id)
            return False
        parked.is_loaded = True
        return True

    def drop(self, request_id: str) -> None:
        """A request has ended, or its load has failed. If it waits for nothing else, it is filled.

        What it has in the latest step is computed for nothing.
        """
        parked = self._parked.pop(request_id, None)
        if parked is not None and parked.is_loaded:
            self._filled.append(request_id)
            self.blocks.drop(request_id)

    def restart(self, request_id: str) -> bool:
        """Forget a request whose blocks are taken; False, and it stays, while it is loaded."""
        parked = self._parked.get(request_id)
        if parked is None or not parked.is_loaded:
            return False
        del self._parked[request_id]
        self.blocks.drop(request_id)
        return True

    def end_step(self) -> list[str]:
        """The latest step was handed to the workers; returns requests that have all KV then."""
        self.blocks.end_step()
        for request_id, parked in list(self._parked.items()):
            if parked.probe is not None and parked.probe.row_id:
                self._note_wait(request_id, parked.probe)
            if parked.is_loaded and not parked.holes and parked.probe is None:
                del self._parked[request_id]
                self._filled.append(request_id)
                self.blocks.drop(request_id)
        filled, self._filled = self._filled, []
        return filled

    def take_rows(
        self,
        max_tokens: int,
        max_rows: int,
        max_row_tokens: int,
        other_ids: Collection[str] = (),
    ) -> list[HoleRow]:
        """What the next step computes.

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
                window_ids = self._extend_windows(request_id, run)
                # Where requests are waiting, free blocks are few in each step: better a short row.
                while window_ids is None and run.num_tokens > 1:
                    end_tokens = run.first_tokens + run.num_tokens // 2
                    run = TokenRange(run.first_tokens, end_tokens)
                    window_ids = self._extend_windows(request_id, run)
                if window_ids is None:
                    return rows  # Later requests do not take what this one waits for.
                max_tokens -= run.num_tokens
                row_id = self._new_row_id(request_id, other_ids)
                is_kept = parked.probe is None
                rows.append(HoleRow(request_id, row_id, run, window_ids, is_kept=is_kept))
                parked.after_tokens = end_tokens
                is_end_of_hole = end_tokens == hole.end_tokens
                self.blocks.leave(request_id, end_tokens, is_end_of_hole)
                if not is_end_of_hole:
                    parked.holes[0] = TokenRange(end_tokens, hole.end_tokens)
                    break
                del parked.holes[0]
            probe = parked.probe
            if probe is None or probe.row_id or parked.holes or not parked.is_loaded:
                continue
            if max_tokens <= 0 or len(rows) >= max_rows:
                return rows
            row_tokens = min(probe.run.num_tokens, max_row_tokens)
            row = None
            if row_tokens <= max_tokens:
                row = self._probe_row(request_id, probe, row_tokens, other_ids)
            if row is None:
                self._note_wait(request_id, probe)
                return rows
            max_tokens -= row_tokens
            rows.append(row)
        self.lacks_room = False
        return rows

    def probed_request(self, row_id: str) -> str | None:
        """The request that waits for what is learnt from a probe; None if it does not any more."""
        for request_id, parked in self._parked.items():
            if parked.probe is not None and parked.probe.row_id == row_id:
                return request_id
        return None

    def end_probe(self, request_id: str, holes: Sequence[TokenRange]) -> None:
        """The probe of a request has been looked at.

        Args:
            holes: Beside those with which the request was parked.
        """
        parked = self._parked[request_id]
        assert parked.probe is not None
        parked.holes = list(union([*parked.probe.holes, *holes]))
        parked.probe = None

    def take_lost_probes(self) -> int:
        """Probes that were given up since the last call."""
        lost, self._lost_probes = self._lost_probes, 0
        return lost

    def _probe_row(
        self, request_id: str, probe: _Probe, num_tokens: int, other_ids: Collection[str]
    ) -> HoleRow | None:
        """None if there are no blocks."""
        run = TokenRange(probe.run.first_tokens, probe.run.first_tokens + num_tokens)
        window_ids = self._extend_windows(request_id, run)
        behind_ids = self.blocks.take_probe(probe.num_pages, run.end_tokens)
        if window_ids is None or behind_ids is None:
            return None
        probe.row_id = self._new_row_id(request_id, other_ids)
        probe.num_steps = 0
        return HoleRow(
            request_id,
            probe.row_id,
            run,
            window_ids,
            behind_ids,
            is_probe=True,
            is_kept=False,
        )

    def _note_wait(self, request_id: str, probe: _Probe) -> None:
        probe.num_steps += 1
        if probe.num_steps > MAX_PROBE_STEPS:
            self.end_probe(request_id, ())
            self._lost_probes += 1

    def _new_row_id(self, request_id: str, other_ids: Collection[str]) -> str:
        while True:
            self._num_rows += 1
            row_id = f"{request_id}-hole-{self._num_rows}"
            if row_id not in other_ids:
                return row_id

    def _extend_windows(
        self, request_id: str, run: TokenRange
    ) -> Mapping[int, Sequence[int]] | None:
        """None if there are no blocks."""
        tables = self.blocks.extend(request_id, run)
        if tables is None:
            return None
        return {group: table.all_block_ids for group, table in tables.items()}
