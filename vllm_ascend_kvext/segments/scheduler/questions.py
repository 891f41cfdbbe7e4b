# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vllm-ascend-kvext project
"""Chooses reused tokens that are computed nevertheless, because the question attends to them.

There are two passes. The first pass computes the missing tokens between the segments, and then the
question. The question attends to the segments as they are stored, heads included. The results of
the first pass are thrown away. The second pass computes the holes of the request, and more holes
that the question has chosen::

    segments          [hhhh              ]     [hhhh              ] question
    first pass                            =====                     ========    scores
    second pass        ====      ===      ========      ===
    the request                                                     ========

The question is the text behind the last segment, whether this segment is stored or not.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import NamedTuple

import numpy as np

from vllm_ascend_kvext.connector.common.scheduler_view import Request, SchedulerView
from vllm_ascend_kvext.holes.load_plan import Span
from vllm_ascend_kvext.segments.counters import SegmentCounters
from vllm_ascend_kvext.segments.question_selection import Scores, select_runs
from vllm_ascend_kvext.segments.scheduler.blended_plan import BlendedPlan
from vllm_ascend_kvext.segments.scheduler.question_preview import PreviewPlan
from vllm_ascend_kvext.token_range import TokenRange, union, without

MAX_PROBED_TOKENS = 256
"""The maximum length of the first pass's question. If a question is longer, only its end is
computed, as if the end stood right behind the segments."""

CHOSEN_RUN_TOKENS = 8
"""The length of the runs that the question chooses. The measurements in docs/blending.md used this
length."""


class _Compared(NamedTuple):
    """The loaded range of each segment, and the reused ranges from which the question may choose.

    The last ``num_queries`` tokens of the first pass are the question.
    """

    num_queries: int
    scored: tuple[TokenRange, ...]
    reused: tuple[TokenRange, ...]


class Questions:
    """The questions of one engine's requests. They choose the share ``ratio`` behind heads."""

    def __init__(self, view: SchedulerView, ratio: float, counters: SegmentCounters) -> None:
        self._view = view
        self.ratio = ratio
        self._counters = counters
        self._compared: dict[str, _Compared] = {}

    def begin(self, request: Request, plan: BlendedPlan) -> PreviewPlan | None:
        """Plan the first pass of a request that has blocks; None if the request has no room."""
        first_tokens = plan.boundary_tokens
        num_tokens = min(
            request.num_tokens - first_tokens,
            MAX_PROBED_TOKENS,
            # Half of a step, so that the question finds room beside running requests.
            max(1, self._view.max_num_batched_tokens // 2),
            # The prompt of the question's row is one token longer, and has to fit as well.
            self._view.max_model_len - 1 - first_tokens,
        )
        if num_tokens <= 0:
            return None
        scored = list(plan.segment_spans)
        question_tokens = request.num_tokens - max(first_tokens, plan.segments_end_tokens)
        self._compared[request.request_id] = _Compared(
            min(num_tokens, question_tokens) if question_tokens > 0 else num_tokens,
            _by_segment(scored),
            _by_segment(span for span in scored if not (span.is_computed or span.is_exact)),
        )
        loaded = union(TokenRange(span.first_tokens, span.end_tokens) for span in scored)
        missing = without(plan.holes, loaded)
        return PreviewPlan(TokenRange(first_tokens, first_tokens + num_tokens), missing)

    def scored(self, request_id: str) -> tuple[TokenRange, ...]:
        """The tokens that the question of a request is compared with."""
        return self._compared[request_id].scored

    def queries(self, request_id: str, run: TokenRange) -> TokenRange:
        """The tokens of the question within ``run``, the last run of the first pass."""
        num_queries = self._compared[request_id].num_queries
        return TokenRange(run.end_tokens - num_queries, run.end_tokens)

    def choose(self, request_id: str, scores: Scores | None) -> tuple[TokenRange, ...]:
        """The runs that the question chooses, by the scores of the tokens of `scored`.

        Without scores (None), or with scores that are not finite, the question chooses no run.
        """
        compared = self._compared.pop(request_id)
        if scores is None or not np.isfinite(scores).all():
            self._counters.lost_probes += 1
            return ()
        self._counters.scored_probes += 1
        return select_runs(compared.scored, scores, compared.reused, self.ratio, CHOSEN_RUN_TOKENS)

    def forget(self, request_id: str) -> None:
        """Forget a request that has ended, or that reuses nothing any more."""
        self._compared.pop(request_id, None)


def _by_segment(ascending: Iterable[Span]) -> tuple[TokenRange, ...]:
    """The loaded range of each segment. The spans of one segment have no gaps between them."""
    found: dict[int, TokenRange] = {}
    for span in ascending:
        segment_tokens = span.first_tokens - span.entry_tokens
        first_tokens = found.get(segment_tokens, span).first_tokens
        found[segment_tokens] = TokenRange(first_tokens, span.end_tokens)
    return tuple(found.values())
