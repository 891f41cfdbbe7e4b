# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vllm-ascend-kvext project
"""Workloads: requests and their arrivals, and events of the engine."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from .layouts import Layout
from .options import EngineOptions
from .token_stream import Image, TokenStream


@dataclass(frozen=True, slots=True, kw_only=True)
class RequestPlan:
    """One request.

    Attributes:
        request_id: ``<name>-<number>``. The connector uses the number.
        arrival_step: The request is added before this step of the engine.
        priority: With the priority policy, lower values are scheduled first.
        adapter: The name of a LoRA adapter.
        checkpoint_tokens: Boundaries that the request names for adaptive retention.
        extra_args: More arguments of the request, by name.
    """

    request_id: str
    arrival_step: int
    prompt: tuple[int, ...]
    max_tokens: int
    stop_tokens: tuple[int, ...] = ()
    priority: int = 0
    adapter: str | None = None
    cache_salt: str | None = None
    images: tuple[Image, ...] = ()
    checkpoint_tokens: tuple[int, ...] = ()
    extra_args: tuple[tuple[str, Any], ...] = ()

    @property
    def seed(self) -> str:
        """Other facts that the request's KV depends on."""
        return f"{self.adapter}/{self.cache_salt}"

    def new_stream(self) -> TokenStream:
        """A stream that holds the prompt."""
        return TokenStream(self.prompt, self.seed, self.images)

    def expected_output(self) -> list[int]:
        """The tokens that this request generates, in whatever way it is scheduled."""
        return self.new_stream().generate(self.max_tokens, self.stop_tokens)


@dataclass(frozen=True, slots=True)
class Abort:
    """A request that is aborted before a step."""

    step: int
    request_id: str


@dataclass(frozen=True, slots=True)
class ResetPrefixCache:
    """``reset_prefix_cache`` is called before a step."""

    step: int
    reset_running_requests: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class Workload:
    """Everything that determines a run."""

    name: str
    layout: Layout
    options: EngineOptions
    requests: tuple[RequestPlan, ...]
    aborts: tuple[Abort, ...] = ()
    resets: tuple[ResetPrefixCache, ...] = ()
