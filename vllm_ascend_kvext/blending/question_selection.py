# SPDX-License-Identifier: Apache-2.0
"""Which reused tokens are computed after all, because the question attends to them.

Behind the heads of segments, whose tokens are computed in any case::

    segments    [hhhh                         ][hhhh                  ]
    scores            1   0   9   2   0   1          0   0   7   3
    computed             [run at a time, the best of each segment first]
                          ^^^                            ^^^

Pure functions of scores.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise

import numpy as np
import numpy.typing as npt

from vllm_ascend_kvext.holes.span_plan import Run, union

Scores = npt.NDArray[np.float32]
"""How much the question attends to each of some tokens. shape: [num_tokens]."""


def select_runs(
    scored: Sequence[Run], scores: Scores, reused: Sequence[Run], ratio: float, run_tokens: int
) -> tuple[Run, ...]:
    """Choose runs by the sum of their tokens' scores.

    What is reused is cut into runs, from the first reused token of each segment on. The best run
    of each segment is chosen, then the best of all others for as long as the budget has room for
    them. Of two that are equally good, the earlier one comes first.

    Args:
        scored: Tokens that have scores, ascending and disjoint.
        scores: Of all of them, one after the other.
        reused: What is reused of each segment, ascending; each lies within one of ``scored``.
        ratio: Of the reused tokens: that are computed. Heads do not count; nor does the budget
            keep a segment from its best run.
        run_tokens: Of a run; the last one of a segment may be shorter.

    Returns:
        Ascending; runs that touch are one.
    """
    if not reused:
        return ()
    # before[i]: sum of the scores of the first i tokens.
    before = np.concatenate([[0.0], np.cumsum(scores, dtype=np.float64)])
    offsets = _offsets(scored, reused)
    pieces: list[Run] = []
    sums: list[npt.NDArray[np.float64]] = []
    best: list[int] = []
    for run, offset in zip(reused, offsets, strict=True):
        edges = np.append(np.arange(0, run.num_tokens, run_tokens), run.num_tokens)
        of_pieces = np.diff(before[offset + edges])
        best.append(len(pieces) + int(np.argmax(of_pieces)))
        sums.append(of_pieces)
        pieces += [
            Run(run.first_tokens + int(first), run.first_tokens + int(end))
            for first, end in pairwise(edges)
        ]
    left_tokens = int(ratio * sum(run.num_tokens for run in reused))
    left_tokens -= sum(pieces[index].num_tokens for index in best)
    chosen = [pieces[index] for index in best]
    is_best = set(best)
    for index in np.argsort(-np.concatenate(sums), kind="stable"):
        piece = pieces[index]
        if int(index) not in is_best and piece.num_tokens <= left_tokens:
            chosen.append(piece)
            left_tokens -= piece.num_tokens
    return union(chosen)


def _offsets(scored: Sequence[Run], reused: Sequence[Run]) -> list[int]:
    """Where the scores of each reused run begin."""
    offsets = []
    tokens_before = 0
    remaining = iter(reused)
    run = next(remaining, None)
    for each in scored:
        while run is not None and run.first_tokens < each.end_tokens:
            offsets.append(tokens_before + run.first_tokens - each.first_tokens)
            run = next(remaining, None)
        tokens_before += each.num_tokens
    return offsets
