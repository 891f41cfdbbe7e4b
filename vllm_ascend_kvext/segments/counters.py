# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vllm-ascend-kvext project
"""The counters of segments, which are reported as metrics; see ``counted``."""

from __future__ import annotations

import enum
from dataclasses import dataclass, field
from functools import partial
from typing import Annotated

from vllm_ascend_kvext.counted import Counted, MetricTable, Reporting, zeros


class SegmentRefusal(enum.Enum):
    """Why the segments of a request are computed instead of reused, or are not stored."""

    WRONG_SEGMENTS = "wrong_segments"
    """The named segments overlap, lie outside the prompt, or are no pairs of numbers."""

    UNSUITED_REQUEST = "unsuited_request"
    """A part of the request cannot be computed from token ids alone; see ``HoleRefusal``."""

    TOO_LONG = "too_long"
    """A segment that is to be stored does not fit into the model's context behind the sink."""

    UNCHECKED_KEYS = "unchecked_keys"
    """The keys of this model have not yet been found to depend on positions by rotation alone."""

    NO_WINDOW = "no_window"
    """Host memory lacks the windows at the end of the exact beginning of the prompt."""

    ROOM = "room"
    """The device's pool, or host memory, is too small for the segment."""


@dataclass(slots=True)
class SegmentCounters(Reporting):
    """What became of segments. Counters never go down."""

    hit_segments: Annotated[
        int,
        Counted(
            "Segments of admitted requests, by whether they were stored and reused.",
            "result",
            "hit",
            "blend_segments",
        ),
    ] = 0
    missed_segments: Annotated[int, Counted("", "result", "missed", "blend_segments")] = 0
    reused_tokens: Annotated[
        int,
        Counted(
            "Prompt tokens of reused segments: reused, or computed because they are in a head, or "
            "what the question attends to.",
            "result",
            "reused",
            "blend_tokens",
        ),
    ] = 0
    recomputed_tokens: Annotated[int, Counted("", "result", "recomputed", "blend_tokens")] = 0
    stored_segments: Annotated[int, Counted("Segments stored in host memory.")] = 0
    learned_segments: Annotated[int, Counted("Segments stored because two requests had them.")] = 0
    learning_drops: Annotated[
        int, Counted("Segments that two requests had and that are not stored.")
    ] = 0
    scored_probes: Annotated[
        int,
        Counted(
            "Questions compared with segments, and those that could not be.",
            "result",
            "scored",
            "blend_probes",
        ),
    ] = 0
    lost_probes: Annotated[int, Counted("", "result", "lost", "blend_probes")] = 0
    probed_tokens: Annotated[
        int, Counted("Tokens computed only to compare a question with segments.")
    ] = 0
    refusals: Annotated[
        dict[SegmentRefusal, int],
        Counted("Requests whose segments were computed, or not stored, by reason.", "reason"),
    ] = field(default_factory=partial(zeros, SegmentRefusal))


SEGMENT_METRICS = SegmentCounters.metrics = MetricTable(SegmentCounters, prefix="blend_")
