# SPDX-License-Identifier: Apache-2.0
"""Which blocks of a range stock vLLM caches, as runs instead of one flag per block.

Knows lengths only. This is upstream's rule, boundary for boundary, including the boundaries that
nothing can hit; `vllm_ascend_kvext.retention` has this project's own.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class TailRule:
    """Where stock vLLM 0.23.0 keeps the tails of a sliding-window group.

    Attributes:
        unit_blocks: Blocks between two boundaries.
        segment_blocks: Blocks between two boundaries whose tail is kept; 0 for none.
        need_blocks: Blocks of a tail, the one that looks ahead included.
        ahead_blocks: How many blocks a tail reaches past its boundary: 0 or 1.
        keeps_replay: Whether the last boundary within the prompt is kept besides.
    """

    unit_blocks: int
    segment_blocks: int
    need_blocks: int
    ahead_blocks: int
    keeps_replay: bool

    def runs(self, blocks: range, replay_boundary_blocks: int) -> list[range]:
        """The runs to cache within ``blocks``, ordered and apart from each other.

        Args:
            blocks: Indices, ascending by one.
            replay_boundary_blocks: The last boundary that a repeated prompt can hit, in blocks.
        """
        segment, need, ahead = self.segment_blocks, self.need_blocks, self.ahead_blocks
        if segment and need >= segment:
            return [blocks] if blocks else []
        found: list[range] = []
        if segment and need:
            # The tail of the n-th boundary, n > 0, ends at n * segment + ahead.
            end = max(1, (blocks.start - ahead) // segment + 1) * segment + ahead
            while end - need < blocks.stop:
                found.append(_common(range(end - need, end), blocks))
                end += segment
        if self.keeps_replay:
            stop = replay_boundary_blocks + ahead
            found.append(_common(range(stop - need, stop), blocks))
        return joined(found)


def _common(one: range, other: range) -> range:
    return range(max(one.start, other.start), min(one.stop, other.stop))


def joined(runs: list[range]) -> list[range]:
    """The same indices as ordered runs with gaps between them."""
    result: list[range] = []
    for run in sorted((run for run in runs if run), key=lambda run: run.start):
        if result and run.start <= result[-1].stop:
            result[-1] = range(result[-1].start, max(result[-1].stop, run.stop))
        else:
            result.append(run)
    return result


def runs_between(holes: list[bool]) -> list[range]:
    """Maximal ranges of indices without a hole."""
    runs = []
    start = 0
    if True in holes:
        for hole in (index for index, is_hole in enumerate(holes) if is_hole):
            if start < hole:
                runs.append(range(start, hole))
            start = hole + 1
    if start < len(holes):
        runs.append(range(start, len(holes)))
    return runs
