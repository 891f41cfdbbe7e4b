# SPDX-License-Identifier: Apache-2.0
"""Boundaries that a request names itself.

A client that knows its prompts, for example where the system prompt ends, says so with
``SamplingParams(extra_args={"kvext_checkpoint_tokens": [1200]})``, over HTTP with
``"vllm_xargs": {"kvext_checkpoint_tokens": [1200]}``. The first request then leaves a checkpoint
there, and the second resumes from it.
"""

from __future__ import annotations

import logging
from typing import Any

from vllm_ascend_kvext.retention.geometry import HitGeometry
from vllm_ascend_kvext.retention.protocols import Prompt

HINT_ARGUMENT = "kvext_checkpoint_tokens"
MOST_HINTS = 16

logger = logging.getLogger("vllm.ascend_kvext.retention")


def hinted_boundaries(request: Prompt, geometry: HitGeometry) -> list[int]:
    """The boundaries, in tokens, at or below the positions that a request names."""
    usable, _ = _split(request)
    return sorted({geometry.reachable_tokens(position) for position in usable} - {0})


def report_unusable_hints(request: Prompt) -> None:
    """Log what is no position within a request's prompt: a hint never fails a request."""
    usable, hints = _split(request)
    if len(usable) < len(hints):
        logger.warning(
            "Request %s: of %s=%r only %r are used: expected at most %d token counts between 1 "
            "and the length of the prompt, %d.",
            request.request_id,
            HINT_ARGUMENT,
            hints,
            usable,
            MOST_HINTS,
            request.num_prompt_tokens,
        )


def _split(request: Prompt) -> tuple[list[int], list[Any]]:
    """The usable hints of a request, and all of them."""
    arguments = getattr(request.sampling_params, "extra_args", None) or {}
    hints = arguments.get(HINT_ARGUMENT)
    if hints is None:
        return [], []
    hints = list(hints) if isinstance(hints, list | tuple) else [hints]
    usable = [
        position
        for position in hints[:MOST_HINTS]
        if isinstance(position, int)
        and not isinstance(position, bool)
        and 0 < position <= request.num_prompt_tokens
    ]
    return usable, hints
