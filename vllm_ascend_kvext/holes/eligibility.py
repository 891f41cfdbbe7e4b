# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vllm-ascend-kvext project
"""Which requests may have holes. To a worker, the row of a hole is a plain text request."""

from __future__ import annotations

import enum
from typing import Any


class HoleRefusal(enum.Enum):
    """Why a request stops at the first hole."""

    ADAPTER = "adapter"
    INPUTS = "inputs"
    """The request has images, other media, or embeddings instead of tokens."""

    POOLING = "pooling"
    """The request asks for a pooled output of all its tokens."""

    PROMPT_LOGPROBS = "prompt_logprobs"
    """The request asks for log-probabilities of its prompt. Only the request's own row computes
    these."""

    SESSION = "session"
    """The request is a streaming session, whose tokens change."""

    ROOM = "room"
    """The pool is too small for the additional blocks that its holes need."""

    TOO_DEAR = "too_dear"
    """Loading what lies behind its holes was estimated to take longer than computing it."""


def why_no_holes(request: Any) -> HoleRefusal | None:
    """Why a row with only token ids cannot compute a part of a request; None if it can."""
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
