# SPDX-License-Identifier: Apache-2.0
"""Which requests may have holes: to a worker, the row of a hole is a plain text request."""

from __future__ import annotations

from typing import Any


def can_have_holes(request: Any) -> bool:
    """Whether tokens of a request can be computed by a row that has nothing but token ids.

    Args:
        request: ``vllm.v1.request.Request``.
    """
    return (
        request.sampling_params is not None
        and request.pooling_params is None
        and request.lora_request is None
        and request.prompt_embeds is None
        and not request.mm_features
        and not getattr(request, "resumable", False)
    )
