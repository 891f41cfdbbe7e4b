# SPDX-License-Identifier: Apache-2.0
"""Which requests may have holes: to a worker, the row of a hole is a plain text request."""

from __future__ import annotations

import enum
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from typing_extensions import Self


class _Reason(enum.Enum):
    """Has a name, its value, and a sentence without its end, for people."""

    text: str

    def __new__(cls, name: str, text: str) -> Self:
        reason = object.__new__(cls)
        reason._value_ = name
        reason.text = text
        return reason


class HoleRefusal(_Reason):
    """Why a request stops at the first hole."""

    ADAPTER = "adapter", "it has a LoRA adapter"
    INPUTS = "inputs", "it has images, other media, or embeddings instead of tokens"
    POOLING = "pooling", "it asks for a pooled output of all its tokens"
    PROMPT_LOGPROBS = (
        "prompt_logprobs",
        "it asks for log-probabilities of its prompt, which are computed where the prompt is",
    )
    SESSION = "session", "it is a streaming session, whose tokens change"
    ROOM = "room", "the pool is too small for what its holes need besides"
    TOO_DEAR = (
        "too_dear",
        "loading what lies behind its holes was estimated to take longer than computing it",
    )


class EngineRefusal(_Reason):
    """Why all requests of an engine stop at the first hole; the log says so when it starts."""

    NO_ROWS = (
        "no_rows",
        "the model has no full attention: what lies before a window need not be computed",
    )
    STATES = "states", "the model has recurrent states, which are not kept where holes begin"
    SKIPPED_STATES = "skipped_states", "holes are exact, and state_policy=skip is not"
    DRAFTS = (
        "drafts",
        "draft tokens (EAGLE, MTP) would be computed beyond the end of a hole",
    )


def why_no_holes(request: Any) -> HoleRefusal | None:
    """Why a row that has nothing but token ids cannot compute a part of a request."""
    if request.pooling_params is not None or request.sampling_params is None:
        return HoleRefusal.POOLING
    if request.lora_request is not None:
        return HoleRefusal.ADAPTER
    if request.prompt_embeds is not None or request.mm_features:
        return HoleRefusal.INPUTS
    if getattr(request.sampling_params, "prompt_logprobs", None) is not None:
        return HoleRefusal.PROMPT_LOGPROBS
    if getattr(request, "resumable", False):
        return HoleRefusal.SESSION
    return None
