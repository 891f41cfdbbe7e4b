# SPDX-License-Identifier: Apache-2.0
"""The load plan of a prompt in which segments are reused."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from vllm_ascend_kvext.holes.load_plan import LoadPlan, Span


@dataclass(frozen=True)
class BlendedPlan(LoadPlan):
    """A plan whose rows are exact up to a token, and reused or computed behind it.

    Attributes:
        first_blended_tokens: Where rows of segments begin, or rows that are computed behind them.
        segments_end_tokens: Where the last segment of the prompt ends, reused or not.
        window_blocks: See ``num_window_blocks``: windows are dense from ``first_blended_tokens``.
    """

    first_blended_tokens: int
    segments_end_tokens: int
    window_blocks: int

    @property
    def exact_tokens(self) -> int:
        return self.first_blended_tokens

    @property
    def num_window_blocks(self) -> int:
        return self.window_blocks

    @property
    def segment_spans(self) -> Iterator[Span]:
        """Loaded rows of segments, those included that are computed all the same."""
        for span in self.spans:
            if span.entry is not None and span.first_tokens >= self.exact_tokens:
                yield span
