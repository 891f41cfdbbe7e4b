# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vllm-ascend-kvext project
"""The requests to every engine, the facts of their answers, and which of them are valid."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Literal

Direction = Literal["store", "load"]

VisitKind = Literal["loaded", "local", "new"]
"""Where the KV of a visitor's prompt is: in host memory, on the device, or nowhere."""

OFFLOADED_TOKENS = 4096
COMPUTED_TOKENS = 14
PROMPT_TOKENS = OFFLOADED_TOKENS + COMPUTED_TOKENS
"""The length of a prompt. It is no whole number of blocks or chunks, so 4,096 tokens can be hit,
and a few are computed."""

STEP_TOKENS = 5120
"""The tokens of a step. A step has room for a whole prompt and the decoding requests, so that no
store runs beside a prefill."""

NUM_DECODERS = 4
DECODER_PROMPT_TOKENS = 64
DECODER_OUTPUT_TOKENS = 2048
STEPS_BETWEEN_VISITS = 16
"""The number of steps between visits. The last of them run without a transfer."""


@dataclass(slots=True)
class Moved:
    """The transfers of one direction.

    Attributes:
        seconds: The seconds by the clock, from the submission to the end.
        copy_seconds: The seconds of the copies, if the connector reports them; otherwise 0.
        num_bytes: The moved bytes, if the connector counts them; otherwise 0.
        num_tokens: The moved tokens, if transfers are counted in tokens; otherwise 0.
        transfers: The number of ended transfers.
        failed: The number of failed transfers among them.
    """

    seconds: float = 0.0
    copy_seconds: float = 0.0
    num_bytes: int = 0
    num_tokens: int = 0
    transfers: int = 0
    failed: int = 0


@dataclass(frozen=True, slots=True)
class Prompt:
    """A prompt that is not cached, and that is asked again when only the host tier has it.

    Attributes:
        cold_s: The time to the first token of the first request.
        warm_s: The time to the first token of the second request.
        cold_hit_tokens: The tokens that the first request did not compute.
        warm_hit_tokens: The tokens that the second request did not compute.
        store: The stores during and after the first request.
        load: The loads of the second request.
        offloaded_tokens: The tokens that the second request could hit.
    """

    cold_s: float
    warm_s: float
    cold_hit_tokens: int
    warm_hit_tokens: int
    store: Moved
    load: Moved
    offloaded_tokens: int = OFFLOADED_TOKENS

    @property
    def why_not(self) -> str | None:
        """Why the prompt is not valid; None if it is.

        Without this check, a missing store or load would count as the fastest of all.
        """
        if self.cold_hit_tokens:
            return f"the cold request hit {self.cold_hit_tokens} tokens"
        if self.warm_hit_tokens != self.offloaded_tokens:
            return (
                f"the warm request hit {self.warm_hit_tokens} tokens, not {self.offloaded_tokens}"
            )
        for name, moved in (("store", self.store), ("load", self.load)):
            if moved.failed:
                return f"{moved.failed} of {moved.transfers} {name}s failed"
            if not moved.transfers:
                return f"no {name} was seen"
            if moved.num_tokens not in (0, self.offloaded_tokens):
                return f"the {name} was of {moved.num_tokens} tokens, not {self.offloaded_tokens}"
        return None


@dataclass(frozen=True, slots=True)
class Step:
    """The time from one token of the decoding requests to the next.

    Attributes:
        seconds: The seconds by the clock.
        cpu_seconds: The CPU time of the thread that runs the model. Waiting and other processes on
            this CPU do not count, but their use of memory and caches has an effect.
        has_prefill: Whether the step also computed tokens of a prompt.
        has_transfer: Whether a transfer was under way during the step.
    """

    seconds: float
    cpu_seconds: float
    has_prefill: bool
    has_transfer: bool


@dataclass(frozen=True, slots=True)
class Visit:
    """One long prompt, the visitor, beside requests that decode.

    Attributes:
        hit_tokens: The tokens that the visitor did not compute.
        steps: The steps from its arrival until some steps after its token.
        stores: The number of stores that ended during these steps.
        loads: The number of loads that ended during these steps.
    """

    hit_tokens: int
    steps: list[Step] = field(default_factory=list)
    stores: int = 0
    loads: int = 0

    @property
    def kind(self) -> VisitKind | None:
        """Where the visitor's KV was; None if it was in several places."""
        if self.hit_tokens == OFFLOADED_TOKENS:
            return "loaded" if self.loads else "local"
        return None if self.hit_tokens or self.loads else "new"


def decode_steps(visits: Iterable[Visit], has_transfer: bool) -> list[Step]:
    """The steps without a prefill, either with a transfer or without one."""
    return [
        step
        for visit in visits
        for step in visit.steps
        if not step.has_prefill and step.has_transfer is has_transfer
    ]


def steps_after_prompts(visits: Iterable[Visit], num_steps: int) -> list[Step]:
    """The first steps that only decode, after each visitor's prompt was computed."""
    found: list[Step] = []
    for visit in visits:
        last = max(number for number, step in enumerate(visit.steps) if step.has_prefill)
        found += visit.steps[last + 1 : last + 1 + num_steps]
    return found
