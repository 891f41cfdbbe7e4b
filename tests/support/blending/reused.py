# SPDX-License-Identifier: Apache-2.0
"""What of a prompt is reused, as the oracles are told."""

from __future__ import annotations

from typing import NamedTuple


class Reused(NamedTuple):
    """Tokens of a prompt whose keys and values are those of a segment that was computed alone.

    Attributes:
        first_tokens: Of the prompt.
        end_tokens: Behind the last of them.
        segment: First token of the segment that they are of, and its end, in the prompt.
    """

    first_tokens: int
    end_tokens: int
    segment: tuple[int, int]
