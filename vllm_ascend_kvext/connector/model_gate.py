# SPDX-License-Identifier: Apache-2.0
"""Asks a model whether its segments may be reused, before any request of a client is served.

Knows what is asked, in which order, and what is made of the answers. Whoever drives the engine
answers: see ``patches.connector.model_check``.
"""

from __future__ import annotations

import bisect
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

from vllm_ascend_kvext.blending.errors import BlendingError
from vllm_ascend_kvext.blending.gate_prompts import GatePrompt, GatePrompts, make_prompts, parts_of
from vllm_ascend_kvext.blending.gate_verdict import Answer, GateVerdict, InPlace, Moved, judge
from vllm_ascend_kvext.blending.segments import Segment
from vllm_ascend_kvext.connector.blended_requests import BlendedRequests
from vllm_ascend_kvext.holes.span_plan import Run

_SALT = "kvext-check"
"""Of requests that store or reuse segments. Clients' requests never meet what is left of them."""

_OTHER_SALT = "kvext-check-whole"
"""Of requests that reuse nothing: with the same salt they would be found in the prefix cache."""

_POOL_SHARE = 4
"""One prompt takes at most this part of the pool: several are computed together."""


@dataclass(frozen=True, slots=True)
class GateQuestion:
    """A request that an engine is to compute.

    Attributes:
        token_ids: Of the prompt.
        cache_salt: Of the request.
        stores: Whether the prompt, behind the sink, is a segment that is to be stored.
        segments: What a request would name.
        reused: Which of their tokens are to be reused, and no others; ascending.
    """

    token_ids: tuple[int, ...]
    cache_salt: str = _OTHER_SALT
    stores: bool = False
    segments: tuple[Segment, ...] = ()
    reused: tuple[Run, ...] = ()


@dataclass(frozen=True, slots=True)
class GateReply:
    """What came of it.

    Attributes:
        answer: To the last token.
        params: ``kv_transfer_params`` of the response.
    """

    answer: Answer
    params: Mapping[str, object]


class AskedEngine(Protocol):
    """An engine that nobody else uses."""

    def ask(self, questions: Sequence[GateQuestion]) -> list[GateReply]:
        """Compute requests together, and wait until nothing is left to do."""

    def forget_cached(self) -> None:
        """Empty the local prefix cache."""


class ModelGate:
    """The check of one engine's model.

    Args:
        requests: Of the engine.
        sink_ids: What segments are computed behind.
        pages_of: How many blocks so many tokens take.
        page_tokens: Of the largest blocks.
        num_blocks: In the pool.
        most_request_tokens: Of a prompt and its answer.
        has_windows: Whether the model has sliding windows.
        why_wrong_keys: What was wrong with the keys of stored segments; empty if nothing was.
    """

    def __init__(
        self,
        requests: BlendedRequests,
        sink_ids: tuple[int, ...],
        pages_of: Callable[[int], int],
        page_tokens: int,
        num_blocks: int,
        most_request_tokens: int,
        has_windows: bool,
        why_wrong_keys: Callable[[], str],
    ) -> None:
        self._requests = requests
        self._sink_ids = sink_ids
        self._pages_of = pages_of
        self._page_tokens = page_tokens
        self._num_blocks = num_blocks
        self._most_request_tokens = most_request_tokens
        self._has_windows = has_windows
        self._why_wrong_keys = why_wrong_keys

    def check(self, engine: AskedEngine, vocabulary_tokens: int, dtype: str) -> GateVerdict:
        """Check the model.

        Args:
            engine: Computes what is asked.
            vocabulary_tokens: Of the model.
            dtype: Of the model, by torch's name without its module.

        Raises:
            BlendingError: It cannot be asked: there is too little room.
        """
        options = self._requests.options
        prompts = make_prompts(
            self._sink_ids,
            vocabulary_tokens,
            max(options.head_tokens, options.least_head_tokens),
            options.min_tokens,
            self._page_tokens,
            self._most_prompt_tokens(),
        )
        self._store(engine, prompts)
        if self._why_wrong_keys():
            return GateVerdict(False, self._why_wrong_keys())
        in_place = self._ask_in_place(engine, prompts)
        moved = self._ask_moved(engine, prompts) if self._has_windows else []
        return judge(in_place, moved, dtype)

    def _most_prompt_tokens(self) -> int:
        """Of one prompt: with the engine's context, and its pool."""
        most_pages = self._num_blocks // _POOL_SHARE
        lengths = range(self._most_request_tokens)
        too_long = bisect.bisect_right(lengths, most_pages, key=self._pages_of)
        return max(0, too_long - 1)

    def _store(self, engine: AskedEngine, prompts: GatePrompts) -> None:
        for segment in prompts.segments:
            question = GateQuestion((*self._sink_ids, *segment), _SALT, stores=True)
            (reply,) = engine.ask([question])
            if reply.params.get("kvext_stored_tokens") != len(segment):
                raise BlendingError(
                    f"model check: expected a segment of {len(segment)} tokens to be stored, found "
                    "no room for it. Give the connector more host_memory_gib, or the engine more "
                    "KV blocks."
                )
        if not (self._requests.keys_are_checked or self._why_wrong_keys()):
            raise BlendingError(
                "model check: expected the keys of stored segments to be compared, found that they "
                "were not: the store has failed. The log says why; serve without blending."
            )

    def _ask_in_place(self, engine: AskedEngine, prompts: GatePrompts) -> list[InPlace]:
        whole = [GateQuestion(prompt.token_ids) for prompt in prompts.in_place]
        reused = [_reusing(prompt, parts_of(*prompt.segments)) for prompt in prompts.in_place]
        others = [
            GateQuestion(prompt.without(question.reused, prompts.others))
            for prompt, question in zip(prompts.in_place, reused, strict=True)
        ]
        alone = [self._whole(engine, [question])[0] for question in whole]
        beside = self._whole(engine, whole)
        other = self._whole(engine, others)
        found = self._reused(engine, reused)
        return [InPlace(*each) for each in zip(alone, beside, found, other, strict=True)]

    def _ask_moved(self, engine: AskedEngine, prompts: GatePrompts) -> list[Moved]:
        as_stored = [
            _reusing(prompt, tuple(Run(*segment) for segment in prompt.segments))
            for prompt in prompts.moved
        ]
        repaired = [
            _reusing(
                prompt,
                tuple(
                    run
                    for segment in prompt.segments
                    if (run := self._requests.reusable(segment, segment.num_tokens)) is not None
                ),
            )
            for prompt in prompts.moved
        ]
        if repaired == as_stored:  # Nothing is to be repaired.
            return []
        alone = self._whole(engine, [GateQuestion(prompt.token_ids) for prompt in prompts.moved])
        return [
            Moved(*each)
            for each in zip(
                alone,
                self._reused(engine, as_stored),
                self._reused(engine, repaired),
                strict=True,
            )
        ]

    def _whole(self, engine: AskedEngine, questions: Sequence[GateQuestion]) -> list[Answer]:
        """Answers without any reuse."""
        engine.forget_cached()
        return [reply.answer for reply in engine.ask(questions)]

    def _reused(self, engine: AskedEngine, questions: Sequence[GateQuestion]) -> list[Answer]:
        """Answers with what is asked for reused, and nothing else."""
        engine.forget_cached()
        replies = engine.ask(questions)
        for question, reply in zip(questions, replies, strict=True):
            expected_tokens = sum(run.num_tokens for run in question.reused)
            found_tokens = reply.params.get("kvext_reused_tokens", 0)
            if found_tokens != expected_tokens:
                raise BlendingError(
                    f"model check: expected {expected_tokens} tokens of a prompt of "
                    f"{len(question.token_ids)} to be reused, found {found_tokens}. Give the "
                    "engine more KV blocks, and the connector more host_memory_gib."
                )
        return [reply.answer for reply in replies]


def _reusing(prompt: GatePrompt, runs: Sequence[Run]) -> GateQuestion:
    return GateQuestion(prompt.token_ids, _SALT, segments=prompt.segments, reused=tuple(runs))
