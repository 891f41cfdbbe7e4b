# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vllm-ascend-kvext project
"""The blocks of a range that stock vLLM caches, as runs instead of one flag per block.

The module knows lengths, and the hashes of a request. It has upstream's rule, boundary for
boundary, including boundaries that nothing can hit. `vllm_ascend_kvext.retention` has this
project's own rule.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from vllm_ascend_kvext.upstream_types import Request


@dataclass(frozen=True, slots=True)
class TailRule:
    """Where stock vLLM keeps the tails of a sliding-window group if no interval is set.

    Each tail has ``need_blocks`` blocks, and ends ``ahead_blocks`` (0 or 1) past a multiple of
    ``unit_blocks``.
    """

    unit_blocks: int
    need_blocks: int
    ahead_blocks: int

    def runs(self, blocks: range) -> list[range]:
        """The runs to cache within consecutive blocks, ordered and apart from each other."""
        unit, need, ahead = self.unit_blocks, self.need_blocks, self.ahead_blocks
        if need >= unit:
            return [blocks] if blocks else []
        # The tail of the n-th boundary, n > 0, ends at n * unit + ahead.
        first = max(1, (blocks.start - ahead) // unit + 1) * unit + ahead
        tails = (
            range(max(end - need, blocks.start), min(end, blocks.stop))
            for end in range(first, blocks.stop + need, unit)
        )
        return [tail for tail in tails if tail]


def runs_between(holes: list[bool]) -> list[range]:
    """Maximal ranges of indices without a hole."""
    stops = [index for index, is_hole in enumerate(holes) if is_hole]
    starts = [0, *(stop + 1 for stop in stops)]
    runs = (range(start, stop) for start, stop in zip(starts, [*stops, len(holes)], strict=True))
    return [run for run in runs if run]


class _HashesUpTo:
    """The first ``length`` hashes of a request, without copying them.

    Upstream slices "from here to the end" for every range that it caches. On a long prompt, this
    slice costs more than everything else.
    """

    __slots__ = ("_hashes", "_length")

    def __init__(self, hashes: Sequence[bytes], length: int) -> None:
        self._hashes = hashes
        self._length = min(length, len(hashes))

    def __len__(self) -> int:
        return self._length

    def __getitem__(self, index: Any) -> Any:
        if isinstance(index, slice):
            start, stop, step = index.indices(self._length)
            return self._hashes[start:stop:step]
        return self._hashes[index]


class RequestUpTo:
    """A request whose block hashes end where a run ends. All other attributes are the request's."""

    __slots__ = ("_request", "block_hashes")

    def __init__(self, request: Request, num_hashes: int) -> None:
        self._request = request
        self.block_hashes = _HashesUpTo(request.block_hashes, num_hashes)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._request, name)
