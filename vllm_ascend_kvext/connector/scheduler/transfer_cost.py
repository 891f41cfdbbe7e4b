# SPDX-License-Identifier: Apache-2.0
"""Whether loading costs less than computing, estimated from what was measured.

A load costs its bytes at the measured bandwidth, and the time that a request is parked for whatever
the size: until a step takes note of its end. Computing costs the measured time per prefill token.
No load is refused before both are known. KV of a preempted request that would go out and come back
costs a store, too, for which the step waits. It does not go before all of that is known: an engine
that has measured nothing cannot say for how long everybody would wait.
"""

from __future__ import annotations

from vllm_ascend_kvext.connector.common.messages import Direction

MIN_PREFILL_TOKENS = 64
"""A step with fewer tokens says more about its fixed cost than about prefill."""

_WEIGHT = 0.2
"""The weight of a new sample in a moving mean: some ten samples are remembered."""


class TransferCost:
    """Measurements of one engine.

    With ``is_ignored``, loads are made, and preempted requests stored, whatever they cost.
    """

    def __init__(self, is_ignored: bool = False) -> None:
        self.is_ignored = is_ignored
        # Moving means; None, or not there, before anything was measured.
        self._s_per_byte: dict[Direction, float] = {}
        self._s_per_token: float | None = None
        self._parked_s: float | None = None

    def note_copies(self, direction: Direction, num_bytes: int, seconds: float) -> None:
        """Copies of loads, or of stores, took so long, all of them together."""
        if num_bytes > 0:
            before = self._s_per_byte.get(direction)
            self._s_per_byte[direction] = _mean(before, seconds / num_bytes)

    def note_load(self, num_bytes: int, seconds: float) -> None:
        """From the step that began a load to the one that reported it, so much time passed."""
        parked_s = max(0.0, seconds - self._copy_s(num_bytes))
        self._parked_s = _mean(self._parked_s, parked_s)

    def note_step(self, num_tokens: int, seconds: float) -> None:
        """A step computed so many tokens."""
        if num_tokens >= MIN_PREFILL_TOKENS:
            self._s_per_token = _mean(self._s_per_token, seconds / num_tokens)

    def is_slower_than_computing(self, num_bytes: int, num_tokens: int) -> bool:
        """Whether computing so many tokens is faster than loading so many bytes."""
        if self.is_ignored or self._s_per_token is None:
            return False
        return self._load_s(num_bytes) > num_tokens * self._s_per_token

    def compute_s(self, num_tokens: int, unknown_s: float) -> float:
        """How long computing so many tokens takes; ``unknown_s`` before that was measured."""
        return unknown_s if self._s_per_token is None else num_tokens * self._s_per_token

    def pays_out_and_back(self, num_bytes: int, num_tokens: int) -> bool:
        """Whether storing and loading so many bytes is faster than computing so many tokens.

        Before anything was loaded, the way back is estimated as the way out.
        """
        if self.is_ignored:
            return True
        if self._s_per_token is None or "store" not in self._s_per_byte:
            return False
        out_s = num_bytes * self._s_per_byte["store"]
        back_s = self._load_s(num_bytes) if "load" in self._s_per_byte else out_s
        return out_s + back_s <= num_tokens * self._s_per_token

    def _load_s(self, num_bytes: int) -> float:
        return self._copy_s(num_bytes) + (self._parked_s or 0.0)

    def _copy_s(self, num_bytes: int) -> float:
        return num_bytes * self._s_per_byte.get("load", 0.0)


def _mean(mean: float | None, sample: float) -> float:
    return sample if mean is None else mean + _WEIGHT * (sample - mean)
