# SPDX-License-Identifier: Apache-2.0
"""Which boundaries are worth keeping, as a pure function of lengths.

Knows no blocks: `HitGeometry` turns a boundary into blocks, `TailKeeper` acts on them.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from vllm_ascend_kvext.retention.geometry import HitGeometry


@dataclass(frozen=True, slots=True)
class RetentionPolicy:
    """The meaning of ``VLLM_PREFIX_CACHE_RETENTION_INTERVAL``.

    Attributes:
        geometry: What a lookup can hit.
        interval_tokens: 0 keeps the replay boundary only; a positive multiple of
            ``geometry.unit_tokens`` keeps every multiple of it as well.
    """

    geometry: HitGeometry
    interval_tokens: int

    def replay_boundary_tokens(self, num_prompt_tokens: int) -> int:
        """Where a request with the same prompt hits: its last token is always computed."""
        return self.geometry.reachable_tokens(num_prompt_tokens - 1)

    def lasting_boundaries(
        self, num_prompt_tokens: int, after_tokens: int, upto_tokens: int
    ) -> list[int]:
        """Boundaries in ``(after_tokens, upto_tokens]`` whose tails outlive the request, sorted."""
        boundaries = {self.replay_boundary_tokens(num_prompt_tokens)}
        if self.interval_tokens:
            first = (after_tokens // self.interval_tokens + 1) * self.interval_tokens
            boundaries.update(
                boundary
                for boundary in range(first, upto_tokens + 1, self.interval_tokens)
                if self.geometry.is_boundary(boundary)
            )
        return sorted(tokens for tokens in boundaries if after_tokens < tokens <= upto_tokens)


def parse_interval(text: str, unit_tokens: int, check_unit: bool = True) -> int:
    """Validate an interval given as text.

    Args:
        text: The value of ``VLLM_PREFIX_CACHE_RETENTION_INTERVAL``.
        unit_tokens: The granularity of prefix-cache hits.
        check_unit: Whether a multiple of the unit is required.

    Returns:
        The interval in tokens.

    Raises:
        ValueError: If it is not an integer, is negative, or is not a multiple of the unit.
    """
    try:
        interval_tokens = int(text)
    except ValueError:
        problem, nearby_tokens = "not an integer", _integer_near(text)
    else:
        if interval_tokens >= 0 and not (check_unit and interval_tokens % unit_tokens):
            return interval_tokens
        problem = "negative" if interval_tokens < 0 else f"not a multiple of {unit_tokens}"
        nearby_tokens = max(0, interval_tokens)
    below = nearby_tokens // unit_tokens * unit_tokens
    raise ValueError(
        f"VLLM_PREFIX_CACHE_RETENTION_INTERVAL={text!r} is {problem}. Expected 0 or a multiple of "
        f"{unit_tokens} tokens, the unit at which this model's prefix cache can hit. "
        f"The nearest valid values are {below} and {below + unit_tokens}; "
        "unset the variable to cache densely."
    )


def _integer_near(text: str) -> int:
    """The non-negative integer below a number; 0 where the text is no finite number."""
    try:
        return max(0, math.floor(float(text)))
    except (ValueError, OverflowError):
        return 0
