# SPDX-License-Identifier: Apache-2.0
"""What is counted of segments, and why requests do without them."""

from __future__ import annotations

import enum
from dataclasses import dataclass, field


class BlendRefusal(enum.Enum):
    """Why the segments of a request are computed, or not stored."""

    WRONG_SEGMENTS = "wrong_segments"
    """They overlap, lie outside the prompt, or are no pairs of numbers."""

    UNSUITED_REQUEST = "unsuited_request"
    """A row that has nothing but token ids cannot compute a part of it; see ``HoleRefusal``."""

    TOO_LONG = "too_long"
    """A segment that is to be stored does not fit into the model's context behind the sink."""

    UNCHECKED_KEYS = "unchecked_keys"
    """It is not known yet that this model's keys turn with their positions alone."""

    NO_WINDOW = "no_window"
    """The model has windows, and host memory does not hold those at the end of what is exact."""

    ROOM = "room"
    """The device's pool, or host memory, is too small for it."""


class LearningDrop(enum.Enum):
    """Why a segment that was seen twice has not been stored."""

    QUEUE = "queue"
    """Too many others waited to be computed."""

    TOO_LONG = "too_long"
    """It does not fit into the model's context behind the sink."""

    BUSY = "busy"
    """Requests of clients needed the room of the one that computed it."""

    ROOM = "room"
    """The device's pool, or host memory, is too small for it."""

    FAILED = "failed"
    """Workers could not store it."""

    CANCELLED = "cancelled"
    """Caches were reset, or all requests ended, before it was stored."""


@dataclass(slots=True)
class BlendCounters:
    """What became of segments; counters never go down.

    Attributes:
        hit_segments: Of admitted requests, that were reused in part at least.
        missed_segments: That were not stored.
        reused_tokens: Prompt tokens that were loaded from segments.
        recomputed_tokens: Tokens of reused segments that were computed.
        stored_segments: That were stored.
        learned_segments: Those of them that no client has stored, see ``segment_learning``.
        learning_drops: Segments that were seen twice and are not stored, by reason.
        scored_probes: Questions that were compared with segments.
        lost_probes: Questions that were to be, and were not.
        probed_tokens: That were computed for it, and for nothing else.
        refusals: Of requests, by reason.
    """

    hit_segments: int = 0
    missed_segments: int = 0
    reused_tokens: int = 0
    recomputed_tokens: int = 0
    stored_segments: int = 0
    learned_segments: int = 0
    learning_drops: dict[LearningDrop, int] = field(
        default_factory=lambda: dict.fromkeys(LearningDrop, 0)
    )
    scored_probes: int = 0
    lost_probes: int = 0
    probed_tokens: int = 0
    refusals: dict[BlendRefusal, int] = field(
        default_factory=lambda: dict.fromkeys(BlendRefusal, 0)
    )
