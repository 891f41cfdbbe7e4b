# SPDX-License-Identifier: Apache-2.0
"""Whether loading costs less than computing, estimated from what was measured.

A load costs its bytes at the measured bandwidth, and the time that a request is parked for whatever
the size: until a step takes note of its end. Computing costs the measured time per prefill token.
Nothing is refused before both are known.
"""

from __future__ import annotations

LEAST_PREFILL_TOKENS = 64
"""A step with fewer tokens says more about its fixed cost than about prefill."""

_WEIGHT = 0.2
"""Of a new sample: some ten samples are remembered."""


class _Mean:
    """A moving mean."""

    __slots__ = ("value",)

    def __init__(self) -> None:
        self.value: float | None = None

    def add(self, sample: float) -> None:
        self.value = sample if self.value is None else self.value + _WEIGHT * (sample - self.value)


class LoadCost:
    """Measurements of one engine."""

    __slots__ = ("_parked_s", "_s_per_byte", "_s_per_token")

    def __init__(self) -> None:
        self.forget()

    def forget(self) -> None:
        """Nothing has been measured."""
        self._s_per_byte = _Mean()
        self._s_per_token = _Mean()
        self._parked_s = _Mean()

    def note_copies(self, num_bytes: int, seconds: float) -> None:
        """Copies of loads took so long, all of them together."""
        if num_bytes > 0:
            self._s_per_byte.add(seconds / num_bytes)

    def note_load(self, num_bytes: int, seconds: float) -> None:
        """From the step that began a load to the one that reported it, so much time passed."""
        self._parked_s.add(max(0.0, seconds - self._copy_s(num_bytes)))

    def note_step(self, num_tokens: int, seconds: float) -> None:
        """A step computed so many tokens."""
        if num_tokens >= LEAST_PREFILL_TOKENS:
            self._s_per_token.add(seconds / num_tokens)

    def load_s(self, num_bytes: int) -> float:
        """Estimated seconds of a load; 0 if nothing was measured."""
        return self._copy_s(num_bytes) + (self._parked_s.value or 0.0)

    def compute_s(self, num_tokens: int) -> float | None:
        """Estimated seconds of computing tokens; None if nothing was measured."""
        per_token = self._s_per_token.value
        return None if per_token is None else per_token * num_tokens

    def is_too_dear(self, num_bytes: int, num_tokens: int) -> bool:
        """Whether computing so many tokens is faster than loading so many bytes."""
        compute_s = self.compute_s(num_tokens)
        return compute_s is not None and self.load_s(num_bytes) > compute_s

    def _copy_s(self, num_bytes: int) -> float:
        return num_bytes * (self._s_per_byte.value or 0.0)
