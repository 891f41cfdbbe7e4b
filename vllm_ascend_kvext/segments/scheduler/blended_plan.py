# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vllm-ascend-kvext project
"""The load plan of a prompt in which segments are reused."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from vllm_ascend_kvext.holes.load_plan import LoadPlan, Span


@dataclass(frozen=True)
class BlendedPlan(LoadPlan):
    """A plan whose rows are exact up to one token. The rows behind it are reused or computed.

    Attributes:
        first_blended_tokens: The end of the exact rows. Behind it are rows of segments, and rows
            that are computed behind segments.
        segments_end_tokens: Where the last segment of the prompt ends, reused or not.
        window_blocks: See ``num_window_blocks``. These blocks are dense from
            ``first_blended_tokens`` on.
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
        """The loaded rows of segments, including rows that are computed nevertheless."""
        for span in self.spans:
            if span.entry is not None and span.first_tokens >= self.exact_tokens:
                yield span
