# SPDX-License-Identifier: Apache-2.0
"""What every engine is asked, the facts that come back, and which of them count."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Literal

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
        copy_seconds: Seconds that the copies took, where the connector says so; else 0.
        num_bytes: Where the connector counts them; else 0.
        num_tokens: Where transfers are asked for in tokens; else 0.
        transfers: Number of transfers that have ended.
        failed: Number of those that came to nothing.
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
        cold_s: Time to the first token of the first request.
        warm_s: Time to the first token of the second request.
        cold_hit_tokens: What the first request did not compute.
        warm_hit_tokens: What the second request did not compute.
        store: Stores while and after it was cold.
        load: Loads when it was warm.
    """

    cold_s: float
    warm_s: float
    cold_hit_tokens: int
    warm_hit_tokens: int
    store: Moved
    load: Moved

    @property
    def why_not(self) -> str | None:
        """Why it does not count; None if it does.

        What was not stored would be the fastest store, and what was not loaded the fastest load.
        """
        if self.cold_hit_tokens:
            return f"the cold request hit {self.cold_hit_tokens} tokens"
        if self.warm_hit_tokens != OFFLOADED_TOKENS:
            return f"the warm request hit {self.warm_hit_tokens} tokens, not {OFFLOADED_TOKENS}"
        for name, moved in (("store", self.store), ("load", self.load)):
            if moved.failed:
                return f"{moved.failed} of {moved.transfers} {name}s failed"
            if not moved.transfers:
                return f"no {name} was seen"
            if moved.num_tokens not in (0, OFFLOADED_TOKENS):
                return f"the {name} was of {moved.num_tokens} tokens, not {OFFLOADED_TOKENS}"
        return None


@dataclass(frozen=True, slots=True)
class Step:
    """From one token of the decoding requests to the next.

    Attributes:
        seconds: By the clock.
        cpu_seconds: CPU time of the thread that runs the model. Other processes on its CPU do not
            count, nor does waiting; memory and caches that others use do.
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
        hit_tokens: What the visitor did not compute.
        steps: Steps from its arrival until some after its token.
        stores: Number of stores that ended meanwhile.
        loads: Number of loads that ended meanwhile.
    """

    hit_tokens: int
    steps: list[Step] = field(default_factory=list)
    stores: int = 0
    loads: int = 0

    @property
    def kind(self) -> VisitKind | None:
        """Where the visitor's prompt was; None if it was in parts here and there."""
        if self.hit_tokens == OFFLOADED_TOKENS:
            return "loaded" if self.loads else "local"
        return None if self.hit_tokens or self.loads else "new"


def decode_steps(visits: Iterable[Visit], has_transfer: bool) -> list[Step]:
    """Steps without a prefill, beside a transfer or beside none."""
    return [
        step
        for visit in visits
        for step in visit.steps
        if not step.has_prefill and step.has_transfer is has_transfer
    ]
