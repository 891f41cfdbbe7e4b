# SPDX-License-Identifier: Apache-2.0
"""What every engine is asked, and the facts that come back."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, Literal

Direction = Literal["store", "load"]

VisitKind = Literal["loaded", "local", "new"]
"""Where a visitor's prompt is: in host memory, on the device, or nowhere."""

OFFLOADED_TOKENS = 4096
PROMPT_TOKENS = OFFLOADED_TOKENS + 14
"""Not a whole number of blocks or chunks: 4,096 tokens can be hit, and a few are computed."""

STEP_TOKENS = 5120
"""A whole prompt and the decoding requests in one step: a store then runs beside no prefill."""

NUM_DECODERS = 4
DECODER_PROMPT_TOKENS = 64
DECODER_OUTPUT_TOKENS = 2048
STEPS_BETWEEN_VISITS = 16
"""Of those after a visitor's token, the last ones run beside no transfer."""


@dataclass(slots=True)
class Moved:
    """What was moved in one direction.

    Attributes:
        seconds: By the clock, from handing over to done.
        copy_seconds: That the copies took, where the connector says so; else 0.
        num_bytes: Where the connector counts them; else 0.
        num_tokens: Where transfers are asked for in tokens; else 0.
        transfers: That have ended.
        failed: Those of them that came to nothing.
    """

    seconds: float = 0.0
    copy_seconds: float = 0.0
    num_bytes: int = 0
    num_tokens: int = 0
    transfers: int = 0
    failed: int = 0


@dataclass(frozen=True, slots=True)
class Prompt:
    """A prompt that nothing knows, and again when only the host tier knows it.

    Attributes:
        cold_s: To the first token.
        warm_s: To the first token.
        cold_hit_tokens: Not computed.
        warm_hit_tokens: Not computed.
        store: While and after it was cold.
        load: When it was warm.
    """

    cold_s: float
    warm_s: float
    cold_hit_tokens: int
    warm_hit_tokens: int
    store: Moved
    load: Moved

    @classmethod
    def from_dict(cls, found: dict[str, Any]) -> Prompt:
        moved = {name: Moved(**found[name]) for name in ("store", "load")}
        return cls(**{**found, **moved})


@dataclass(frozen=True, slots=True)
class Step:
    """From one token of the decoding requests to the next.

    Attributes:
        seconds: By the clock.
        cpu_seconds: Of the thread that runs the model. Other processes on its CPU do not count,
            nor does waiting; memory and caches that others use do.
        has_prefill: Whether it also computed tokens of a prompt.
        has_transfer: Whether some transfer was under way meanwhile.
    """

    seconds: float
    cpu_seconds: float
    has_prefill: bool
    has_transfer: bool


@dataclass(frozen=True, slots=True)
class Visit:
    """One long prompt beside requests that decode.

    Attributes:
        hit_tokens: That the visitor did not compute.
        steps: From its arrival to some steps after its token.
        stores: Transfers that ended meanwhile.
        loads: Transfers that ended meanwhile.
    """

    hit_tokens: int
    steps: list[Step] = field(default_factory=list)
    stores: int = 0
    loads: int = 0

    @classmethod
    def from_dict(cls, found: dict[str, Any]) -> Visit:
        return cls(**{**found, "steps": [Step(**step) for step in found["steps"]]})
