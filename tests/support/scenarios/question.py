# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vllm-ascend-kvext project
"""Blended prompts whose questions select what is reused.

There are three engines, one after the other. The first has no connector, and the second reuses
segments. The third also has asynchronous scheduling and a compiled model, and its requests end
while their question is probed.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

from support.scenarios import blending, scenario
from support.scenarios.documents import MISSING, documents, in_order, random_tokens
from support.scenarios.engine import STORED, Prompt, Tokens, sampling_of

HEAD_TOKENS = 16
STEP_TOKENS = 256
ORDERS = ((2, 0, 1), (1, 3, 0, 2), (3, 1), (0, MISSING, 2), (1, 0, 1), (2, 0, MISSING))
"""The orders of documents. One order has a document twice."""
QUESTION_TOKENS = (23, 40, 23, 1, 200, 23)
"""The length of each order's question. One is longer than half a step."""
CROWD = (0, 1, 2, 3, 4, 0, 2, 3)
MAX_STEPS = 400

_rng = random.Random(3)
DOCUMENTS = documents(_rng)
INSTRUCTIONS = random_tokens(_rng, 37)
PROMPTS = [
    in_order(_rng, DOCUMENTS, order, INSTRUCTIONS, num_tokens)
    for order, num_tokens in zip(ORDERS, QUESTION_TOKENS, strict=True)
]
PLAIN = [prompt._replace(is_named=False) for prompt in PROMPTS]
IN_CROWD = [PROMPTS[place] for place in CROWD]


class Engine(blending.Engine):
    """An engine with the selector ``question``, or without a connector."""

    def __init__(self, plan: dict[str, Any]) -> None:
        super().__init__(plan)
        self._scores: dict[tuple[int, ...], dict[str, Any]] = {}
        if self.has_connector:
            self.questions = self.segments.questions
            self._watch_scores()

    def ask(self, label: str, prompts: Any, *args: Any, **more: Any) -> list[Tokens]:
        replies = super().ask(label, prompts, *args, **more)
        answers = self.asked[label]["answers"][-len(replies) :]
        for answer in answers:
            answer["probe"] = self._scores.get(tuple(answer["prompt"]))
        return replies

    def ask_and(self, do: Callable[[], Any], name: str, prompt: Prompt) -> None:
        """Send a prompt, act once its question is computed, and report the result.

        At this time, the scheduler has not been told yet, as with several steps in flight.
        """
        update = self.scheduler.update_from_output
        done = []

        def update_once(*arguments: Any) -> Any:
            parked = self.side.holes._parked.values()
            if not done and any(each.preview and each.preview.is_begun for each in parked):
                done.append(do())
            return update(*arguments)

        self.scheduler.update_from_output = update_once
        self.llm.llm_engine.add_request(name, prompt.inputs, sampling_of(4, prompt.arguments))
        self.run_out()
        del self.scheduler.update_from_output
        self.note(name, done)
        self.note(f"left after {name}", self.left())

    def run_out(self) -> None:
        """Step until there is nothing left to do."""
        for _ in range(MAX_STEPS):
            if not self.llm.llm_engine.has_unfinished_requests() and not self.side.has_work:
                self.llm.llm_engine.step()
                return
            self.llm.llm_engine.step()
        raise RuntimeError("something is left to do for ever")

    @contextmanager
    def ratio(self, ratio: float) -> Iterator[None]:
        """Let the engine work with another ``ratio``."""
        before, self.questions.ratio = self.questions.ratio, ratio
        yield
        self.questions.ratio = before

    @contextmanager
    def without_scores(self) -> Iterator[None]:
        """Let workers see no question."""
        probe = self.worker_side._extension._probe
        compare = probe._compare
        probe._compare = lambda queries: None
        yield
        probe._compare = compare

    def _watch_scores(self) -> None:
        choose = self.segments.blended._choose

        def watched(request_id: str, scores: Any) -> Any:
            scored = self.segments.questions.scored(request_id)
            runs = choose(request_id, scores)
            prompt = self.scheduler.requests[request_id].prompt_token_ids
            self._scores[tuple(prompt)] = {
                "scored": [list(run) for run in scored],
                "scores": None if scores is None else scores.tolist(),
                "runs": [list(run) for run in runs],
            }
            return runs

        self.segments.blended._choose = watched


def num_compiled_graphs() -> int:
    """The number of compiled graphs of the model."""
    from torch._dynamo.utils import counters

    return int(counters["stats"]["unique_graphs"])


@scenario
def cold(engine: Engine) -> None:
    """Prompts without any reuse."""
    engine.ask("cold", PLAIN)


@scenario
def reused(engine: Engine) -> None:
    """Prompts: with everything computed, alone, beside others, and with hidden questions."""
    engine.store(DOCUMENTS[:MISSING], STORED)
    with engine.ratio(1.0):
        engine.ask("everything", PROMPTS)
    for prompt in PROMPTS:
        engine.reset()
        engine.ask("solo", [prompt])
    engine.ask("crowd", IN_CROWD)
    with engine.without_scores():
        engine.ask("no scores", PROMPTS)
    engine.ask("plain", PLAIN)


@scenario
def interrupted(engine: Engine) -> None:
    """Requests that are aborted or begin again while their question is probed."""
    engine.note("compiled graphs", num_compiled_graphs())
    engine.store(DOCUMENTS[:MISSING], STORED)
    engine.ask("async", IN_CROWD)
    abort = partial(engine.llm.llm_engine.abort_request, ["aborted"])
    engine.ask_and(abort, "aborted", PROMPTS[1])
    reset = partial(engine.scheduler.reset_prefix_cache, reset_running_requests=True)
    engine.ask_and(reset, "reset", PROMPTS[1])
    engine.ask("async again", IN_CROWD)
