# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vllm-ascend-kvext project
"""Boundaries that a request names itself.

A client may know its prompts, for example where the system prompt ends. The client says so with
``SamplingParams(extra_args={"kvext_checkpoint_tokens": [1200]})``, or over HTTP with
``"vllm_xargs": {"kvext_checkpoint_tokens": "[1200]"}``. The first request then leaves a checkpoint
there, and the second one resumes from it.
"""

from __future__ import annotations

import logging
from bisect import bisect_right
from typing import TYPE_CHECKING, Any

from vllm_ascend_kvext.request_arguments import is_first_answer, is_integer, read_argument, shown
from vllm_ascend_kvext.retention.geometry import HitGeometry
from vllm_ascend_kvext.upstream_state import RequestState

if TYPE_CHECKING:
    from vllm_ascend_kvext.upstream_types import Request

HINT_ARGUMENT = "kvext_checkpoint_tokens"
MAX_HINTS = 16

logger = logging.getLogger("vllm.ascend_kvext.retention")


def hinted_boundaries(request: Request, geometry: HitGeometry) -> list[int]:
    """The boundaries, in tokens, at or below the positions that a request names."""
    usable, _ = _split(request, geometry)
    return sorted({geometry.reachable_tokens(position) for position in usable})


def report_unusable_hints(request: Request, geometry: HitGeometry) -> None:
    """Log the hints of a request that leave no checkpoint. A hint never fails a request.

    The message comes once per request, although retention and connector both read the hints, and
    although each of ``n`` answers has them.
    """
    usable, hints = _split(request, geometry)
    if len(usable) < len(hints) and not RequestState.of(request).has_reported_hints:
        RequestState.of(request).has_reported_hints = True
        if not is_first_answer(HINT_ARGUMENT, request.request_id):
            return
        num_tokens = request.num_prompt_tokens
        logger.warning(
            "Request %s: %s: expected at most %d numbers of tokens between %d, the first that can "
            "be resumed at, and the %d of the prompt, as a list, its JSON text, or one number, "
            "found %s. It leaves checkpoints at %s, and was computed as usual: correct the others.",
            request.request_id,
            HINT_ARGUMENT,
            MAX_HINTS,
            bisect_right(range(num_tokens + 1), 0, key=geometry.reachable_tokens),
            num_tokens,
            shown(hints),
            usable or "none of them",
        )


def _split(request: Request, geometry: HitGeometry) -> tuple[list[int], list[Any]]:
    """The hints of a request that are at or behind a boundary, and all hints of the request."""
    hints = read_argument(getattr(request.sampling_params, "extra_args", None), HINT_ARGUMENT)
    if hints is None:
        return [], []
    hints = list(hints) if isinstance(hints, list | tuple) else [hints]
    usable = [
        position
        for position in hints[:MAX_HINTS]
        if is_integer(position)
        and 0 < position <= request.num_prompt_tokens
        and geometry.reachable_tokens(position) > 0
    ]
    return usable, hints
