# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vllm-ascend-kvext project
"""Estimates from measurements whether a load takes less time than computing.

A load costs its bytes at the measured bandwidth. It also costs a time that does not depend on its
size: the request stays parked until a step notices the end of the load. Computing costs the
measured time per prefill token. No load is refused before both are known.

If the KV of a preempted request is stored and loaded again, the store costs time, too, and the step
waits for it. Such KV is not stored before all costs are known, because an engine without
measurements does not know how long all its requests would wait.
"""

from __future__ import annotations

import math

from vllm_ascend_kvext.connector.common.messages import Direction

MIN_PREFILL_TOKENS = 64
"""Steps with fewer tokens are not measured, because their fixed cost hides the cost of prefill."""

_WEIGHT = 0.2
"""The weight of a new sample in a moving mean, which remembers some ten samples."""


class TransferCost:
    """The measurements of one engine.

    Args:
        is_ignored: Whether requests load, and preempted requests are stored, at any cost.

    Attributes:
        shares: The part of the bytes of stores and loads that one worker copies; 1 if not given.
            Workers that share host memory copy a part each.
    """

    def __init__(self, is_ignored: bool = False) -> None:
        self.is_ignored = is_ignored
        # Moving means. A mean that was not measured yet is None or missing.
        self._s_per_byte: dict[Direction, float] = {}
        self._s_per_token: float | None = None
        self._parked_s: float | None = None
        self.shares: dict[Direction, float] = {}

    def note_copies(self, direction: Direction, num_bytes: int, seconds: float) -> None:
        """Measure the time that all copies of some loads, or of some stores, took together."""
        if num_bytes > 0:
            before = self._s_per_byte.get(direction)
            self._s_per_byte[direction] = _mean(before, seconds / num_bytes)

    def note_load(self, num_bytes: int, seconds: float) -> None:
        """Measure the time from the step that began a load to the step that reported its end."""
        parked_s = max(0.0, seconds - self._copy_s(num_bytes))
        self._parked_s = _mean(self._parked_s, parked_s)

    def note_step(self, num_tokens: int, seconds: float) -> None:
        """Measure the time of a step that computed some tokens."""
        if num_tokens >= MIN_PREFILL_TOKENS:
            self._s_per_token = _mean(self._s_per_token, seconds / num_tokens)

    def is_slower_than_computing(self, num_bytes: int, num_tokens: int) -> bool:
        """Whether loading some bytes takes longer than computing some tokens."""
        if self.is_ignored or self._s_per_token is None:
            return False
        return self._load_s(num_bytes) > num_tokens * self._s_per_token

    def compute_s(self, num_tokens: int, unknown_s: float) -> float:
        """The time to compute some tokens; ``unknown_s`` if it was not measured yet."""
        return unknown_s if self._s_per_token is None else num_tokens * self._s_per_token

    @property
    def has_stored(self) -> bool:
        """Whether the speed of stores is known."""
        return "store" in self._s_per_byte

    def store_s(self, num_bytes: int) -> float:
        """The time to store some bytes; infinite before a store was measured."""
        if not self.has_stored:
            return math.inf
        return num_bytes * self.shares.get("store", 1.0) * self._s_per_byte["store"]

    def pays_out_and_back(self, num_bytes: int, num_tokens: int) -> bool:
        """Whether storing and loading some bytes is faster than computing some tokens.

        Before the first load, a load is assumed to take as long as a store.
        """
        if self.is_ignored:
            return True
        if self._s_per_token is None or not self.has_stored:
            return False
        out_s = self.store_s(num_bytes)
        back_s = self._load_s(num_bytes) if "load" in self._s_per_byte else out_s
        return out_s + back_s <= num_tokens * self._s_per_token

    def _load_s(self, num_bytes: int) -> float:
        return self._copy_s(num_bytes) + (self._parked_s or 0.0)

    def _copy_s(self, num_bytes: int) -> float:
        return num_bytes * self.shares.get("load", 1.0) * self._s_per_byte.get("load", 0.0)


def _mean(mean: float | None, sample: float) -> float:
    return sample if mean is None else mean + _WEIGHT * (sample - mean)
