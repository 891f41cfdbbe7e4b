# SPDX-License-Identifier: Apache-2.0
"""Holes of requests that wait, parked, until these are computed.

A request with holes has its blocks, and what is stored is being loaded into them. Its holes are
computed by rows of a step that are not its own: the request itself begins behind the last hole, as
if all of it had been loaded::

    begin ── load ends ──────────────> note_loaded ─┐
       └── take_rows, step after step ── computed ──┴──> end_step names it

A hole reads all that lies before it. So only a hole at which the device's own rows end is computed
beside the load, and a hole that does not fit into a step is the last one in it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from vllm_ascend_kvext.holes.span_plan import Run


@dataclass(frozen=True, slots=True)
class HoleRow:
    """Tokens of a request that a step computes.

    Attributes:
        request_id: Whose they are.
        row_id: Of the row, and of no other request or row.
        run: The tokens.
    """

    request_id: str
    row_id: str
    run: Run


@dataclass(slots=True)
class _Parked:
    """A request with holes.

    Attributes:
        holes: That are not computed, ascending.
        after_tokens: Up to here, the device has all rows.
        is_loaded: Whether the rest has been loaded.
    """

    holes: list[Run]
    after_tokens: int
    is_loaded: bool = False


@dataclass(slots=True)
class HoleQueue:
    """The holes of one engine's requests, those that were parked first in front."""

    _parked: dict[str, _Parked] = field(default_factory=dict)
    _filled: list[str] = field(default_factory=list)
    _num_rows: int = 0

    def __len__(self) -> int:
        """Requests that wait, or are filled and not yet taken."""
        return len(self._parked) + len(self._filled)

    def begin(self, request_id: str, holes: Sequence[Run], after_tokens: int) -> None:
        """A request has got blocks, and its load begins."""
        self._parked[request_id] = _Parked(list(holes), after_tokens)

    def note_loaded(self, request_id: str) -> bool:
        """The load of a request has ended well; whether the request has to wait for its holes."""
        parked = self._parked.get(request_id)
        if parked is None:
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

    def end_step(self) -> list[str]:
        """The latest step has been handed to the workers: what comes next finds it computed.

        Returns:
            Requests all of whose holes are computed, and whose load has ended.
        """
        for request_id, parked in list(self._parked.items()):
            if parked.is_loaded and not parked.holes:
                del self._parked[request_id]
                self._filled.append(request_id)
        filled, self._filled = self._filled, []
        return filled

    def take_rows(self, most_tokens: int, most_rows: int) -> list[HoleRow]:
        """What the next step computes.

        Args:
            most_tokens: Of all rows together.
            most_rows: Their number.
        """
        rows: list[HoleRow] = []
        for request_id, parked in self._parked.items():
            while parked.holes and most_tokens > 0 and len(rows) < most_rows:
                hole = parked.holes[0]
                if not parked.is_loaded and hole.first_tokens != parked.after_tokens:
                    break
                end_tokens = min(hole.end_tokens, hole.first_tokens + most_tokens)
                run = Run(hole.first_tokens, end_tokens)
                most_tokens -= run.num_tokens
                self._num_rows += 1
                rows.append(HoleRow(request_id, f"{request_id}-hole-{self._num_rows}", run))
                parked.after_tokens = end_tokens
                if end_tokens < hole.end_tokens:
                    parked.holes[0] = Run(end_tokens, hole.end_tokens)
                    break
                del parked.holes[0]
            if most_tokens <= 0 or len(rows) >= most_rows:
                break
        return rows
