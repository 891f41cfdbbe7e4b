# SPDX-License-Identifier: Apache-2.0
"""Steps of running requests that change nothing: who says when something is cached."""

from __future__ import annotations

from typing import Any, Protocol


class CachingRule(Protocol):
    """Says instead of upstream when a step of a running request caches something."""

    def quiet_until_tokens(self, request: Any) -> int:
        """The smallest number of tokens at which something is cached; 0 if it is not known."""

    def note_quiet_step(self, request: Any, num_computed_tokens: int) -> None:
        """A step below that number was scheduled: caching was not called for it."""
