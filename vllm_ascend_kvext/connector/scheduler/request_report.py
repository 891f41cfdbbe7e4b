# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vllm-ascend-kvext project
"""What became of one request's prompt: for one line of the log, and for its response."""

from __future__ import annotations

import enum
from dataclasses import dataclass
from typing import Any

from vllm_ascend_kvext.holes.eligibility import HoleRefusal
from vllm_ascend_kvext.store.lookup import Shortfall

PARAMETER = "kvext_report"
"""The field of ``kv_transfer_params`` that holds a report."""


class Decision(enum.Enum):
    """Why a request loads what it loads."""

    LOADED = "loaded"
    """The request loads all that it can load from host memory."""

    NOTHING_FOUND = "nothing_found"
    """Host memory has nothing behind what the device has."""

    SLOWER = "slower"
    """Loading was estimated to take longer than computing."""

    NO_ROOM = "no_room"
    """The device's pool, or what is pinned of host memory, leaves no room for the load."""

    FAILED_LOADS = "failed_loads"
    """The request is computed, because its loads have failed before."""

    NOT_LOOKED_UP = "not_looked_up"
    """The request asks not to read a cache, or its prompt is a segment that is to be stored."""


@dataclass(frozen=True, slots=True)
class RequestReport:
    """A request's latest admission.

    Attributes:
        prompt_tokens: The tokens of the request, including answers before a preemption.
        device_tokens: The number of first tokens that the device had.
        host_tokens: The tokens behind these that were loaded from host memory.
        tier_tokens: The tokens that a shared tier has brought into host memory for it.
        hole_tokens: The computed tokens between loaded tokens.
        num_holes: The number of runs of such tokens.
        shortfall: Why host memory has no more; None if it has all that could be of use.
        hole_refusal: Why the load stops at the first hole; None if it does not.
    """

    prompt_tokens: int
    device_tokens: int
    host_tokens: int
    tier_tokens: int
    hole_tokens: int
    num_holes: int
    shortfall: Shortfall | None
    hole_refusal: HoleRefusal | None
    decision: Decision

    def params(self) -> dict[str, Any]:
        """The report in the form of a response: numbers and words."""
        return {
            "prompt_tokens": self.prompt_tokens,
            "device_tokens": self.device_tokens,
            "host_tokens": self.host_tokens,
            "tier_tokens": self.tier_tokens,
            "hole_tokens": self.hole_tokens,
            "holes": self.num_holes,
            "shortfall": None if self.shortfall is None else self.shortfall.value,
            "hole_refusal": None if self.hole_refusal is None else self.hole_refusal.value,
            "decision": self.decision.value,
        }

    def __str__(self) -> str:
        return ", ".join(f"{name}={value}" for name, value in self.params().items())
