# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vllm-ascend-kvext project
"""The row that computes a question behind segments, only to find the tokens it attends to."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple

from vllm_ascend_kvext.holes.hole_queue import HoleQueue, HoleRow, Preview
from vllm_ascend_kvext.segments.counters import SegmentCounters
from vllm_ascend_kvext.segments.scheduler.dense_windows import DenseWindows
from vllm_ascend_kvext.token_range import TokenRange, union

MAX_STEPS = 64
"""The maximum number of steps that a question waits for room, and then again for its scores. This
number is larger than the number of steps in flight."""


class PreviewPlan(NamedTuple):
    """The ``run`` of the question, and the ``missing`` tokens before it, which no load brings."""

    run: TokenRange
    missing: tuple[TokenRange, ...]


class QuestionPreview(Preview):
    """The question of one request. It is given up after it has waited for `MAX_STEPS` steps.

    Args:
        holes: The holes of the request, which are computed whatever the question attends to.
        num_pages: The pages of the request, by KV cache group.
        on_row: Called with the row when it is in a step.

    Attributes:
        row_id: The id of its row; empty before the row is in a step.
    """

    def __init__(
        self,
        request_id: str,
        plan: PreviewPlan,
        holes: Sequence[TokenRange],
        num_pages: Sequence[int],
        queue: HoleQueue,
        windows: DenseWindows,
        counters: SegmentCounters,
        on_row: Callable[[HoleRow], None],
    ) -> None:
        self._request_id = request_id
        self._run = plan.run
        self._holes = holes
        self._num_pages = num_pages
        self._queue = queue
        self._windows = windows
        self._counters = counters
        self._on_row = on_row
        self.row_id = ""
        self._num_steps = 0  # The steps that it has waited.

    @property
    def is_begun(self) -> bool:
        return bool(self.row_id)

    def take_row(
        self,
        new_row_id: Callable[[], str],
        window_ids_of: Callable[[TokenRange], Mapping[int, Sequence[int]] | None],
        max_tokens: int,
        max_row_tokens: int,
    ) -> HoleRow | None:
        num_tokens = min(self._run.num_tokens, max_row_tokens)
        row = None
        if num_tokens <= max_tokens:
            row = self._row(new_row_id, window_ids_of, num_tokens)
        if row is None:
            self._note_wait()
            return None
        self.row_id = row.row_id
        self._num_steps = 0
        self.note_row(num_tokens)
        self._on_row(row)
        return row

    def _row(
        self,
        new_row_id: Callable[[], str],
        window_ids_of: Callable[[TokenRange], Mapping[int, Sequence[int]] | None],
        num_tokens: int,
    ) -> HoleRow | None:
        """The row of the question; None if there are too few blocks."""
        run = TokenRange(self._run.first_tokens, self._run.first_tokens + num_tokens)
        window_ids = window_ids_of(run)
        behind_ids = self._windows.take_behind(self._num_pages, run.end_tokens)
        if window_ids is None or behind_ids is None:
            return None
        return HoleRow(
            self._request_id,
            new_row_id(),
            run,
            window_ids,
            behind_ids,
            has_last_tokens=True,
            is_kept=False,
        )

    def note_row(self, num_tokens: int) -> None:
        self._counters.probed_tokens += num_tokens

    def end_step(self) -> None:
        self._note_wait()

    def end(self, chosen: Sequence[TokenRange]) -> None:
        """End the preview: these runs are computed in addition to the holes."""
        self._queue.end_preview(self._request_id, union([*self._holes, *chosen]))

    def _note_wait(self) -> None:
        self._num_steps += 1
        if self._num_steps > MAX_STEPS:
            self._counters.lost_probes += 1
            self.end(())
