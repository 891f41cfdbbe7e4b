# SPDX-License-Identifier: Apache-2.0
"""Which blocks of a range stock vLLM caches, as runs instead of one flag per block.

Knows lengths only. This is upstream's rule, boundary for boundary, including the boundaries that
nothing can hit; `vllm_ascend_kvext.retention` has this project's own.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class TailRule:
    """Where stock vLLM keeps the tails of a sliding-window group, without an interval.

    A tail of ``need_blocks`` blocks ends ``ahead_blocks`` (0 or 1) past every ``unit_blocks``.
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
