# SPDX-License-Identifier: Apache-2.0
"""What of reused segments is computed after all, because the question attends to it.

Two passes. The first one is thrown away: it computes the question behind the segments as they are
stored, heads included, and what is missing between them. The second one is that of a request whose
question is not looked at, with more holes::

    segments          [hhhh              ]     [hhhh              ] question
    first pass                            =====                     ========    scores
    second pass        ====      ===      ========      ===
    the request                                                     ========
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from vllm_ascend_kvext.blending.question_selection import Scores, select_runs
from vllm_ascend_kvext.connector.blend_counters import BlendCounters
from vllm_ascend_kvext.connector.engine import Engine, Request
from vllm_ascend_kvext.holes.hole_queue import ProbePlan
from vllm_ascend_kvext.holes.span_plan import Run, union, without
from vllm_ascend_kvext.store.lookup import Hit, PlacedRows

MOST_PROBED_TOKENS = 256
"""Of a question. Of a longer one its end is looked at, as if it stood right behind the segments."""


@dataclass(frozen=True, slots=True)
class QuestionOptions:
    """How much is computed; see ``ConnectorOptions``.

    Attributes:
        ratio: Of the tokens behind heads.
        run_tokens: That are chosen together.
    """

    ratio: float
    run_tokens: int


class _Compared(NamedTuple):
    """What a question is compared with.

    Attributes:
        scored: Tokens that are loaded, of each segment.
        reused: Those of them that are not computed, of each segment.
    """

    scored: tuple[Run, ...]
    reused: tuple[Run, ...]


class Questions:
    """The questions of one engine's requests.

    Args:
        engine: The scheduler's parts.
        options: How much is computed.
        counters: Of the engine.
    """

    def __init__(self, engine: Engine, options: QuestionOptions, counters: BlendCounters) -> None:
        self._engine = engine
        self._options = options
        self._counters = counters
        self._compared: dict[str, _Compared] = {}

    def begin(self, request: Request, hit: Hit) -> ProbePlan | None:
        """A request has got blocks for what was found.

        Returns:
            Its first pass; None if its question is not looked at.
        """
        first_tokens = hit.boundary_tokens
        num_tokens = min(
            request.num_tokens - first_tokens,
            MOST_PROBED_TOKENS,
            # So that it finds room beside requests that run.
            max(1, self._engine.step_tokens // 2),
            # The prompt of its row has one token more.
            self._engine.most_request_tokens - 1 - first_tokens,
        )
        if num_tokens <= 0:
            return None
        loaded = sorted((*hit.heads, *hit.placed), key=lambda rows: rows.first_tokens)
        self._compared[request.request_id] = _Compared(_by_segment(loaded), _by_segment(hit.placed))
        missing = without(
            [Run(*hole) for hole in hit.holes],
            union(Run(rows.first_tokens, rows.end_tokens) for rows in hit.heads),
        )
        return ProbePlan(Run(first_tokens, first_tokens + num_tokens), missing)

    def scored(self, request_id: str) -> tuple[Run, ...]:
        """The tokens that the question of a request is compared with."""
        return self._compared[request_id].scored

    def choose(self, request_id: str, scores: Scores | None) -> tuple[Run, ...]:
        """What is computed after all of what would be reused.

        Args:
            scores: Of the tokens of `scored`, one after the other; None if there are none.
        """
        compared = self._compared.pop(request_id)
        if scores is None or not np.isfinite(scores).all():
            self._counters.lost_probes += 1
            return ()
        self._counters.scored_probes += 1
        options = self._options
        return select_runs(
            compared.scored, scores, compared.reused, options.ratio, options.run_tokens
        )

    def forget(self, request_id: str) -> None:
        """A request has ended, or nothing of it is reused any more."""
        self._compared.pop(request_id, None)


def _by_segment(ascending: Iterable[PlacedRows]) -> tuple[Run, ...]:
    """What is placed of each segment. Of one, nothing is left out between two rows."""
    found: dict[int, Run] = {}
    for rows in ascending:
        segment_tokens = rows.first_tokens - rows.entry_tokens
        first_tokens = found.get(segment_tokens, rows).first_tokens
        found[segment_tokens] = Run(first_tokens, rows.end_tokens)
    return tuple(found.values())
