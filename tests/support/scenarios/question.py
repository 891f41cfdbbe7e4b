# SPDX-License-Identifier: Apache-2.0
"""Blended prompts of which what is reused is chosen by their questions.

Three engines follow each other: one without a connector, one that blends, and one that blends with
asynchronous scheduling, whose requests end while their question is looked at.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

from support.scenarios import blending, scenario
from support.scenarios.engine import STORED, Prompt, Tokens, sampling_of

HEAD_TOKENS = 16
RATIO = 0.1
STEP_TOKENS = 256
SYSTEM_TOKENS = 37
STORED_LENGTHS = (137, 203, 90, 300)
MISSING_LENGTH = 71
MISSING = len(STORED_LENGTHS)
"""The document that is not stored."""
ORDERS = ((2, 0, 1), (1, 3, 0, 2), (3, 1), (0, MISSING, 2), (1, 0, 1))
"""Of documents; one stands in two places."""
QUESTION_TOKENS = (23, 40, 23, 1, 200)
"""Of each order. The last one is longer than half a step."""
SEPARATOR_TOKENS = (3, 0, 3, 3, 3)
CROWD = (0, 1, 2, 3, 4, 0, 2, 3)
MAX_STEPS = 400


def make_prompts() -> tuple[list[Tokens], list[Prompt]]:
    """Documents, the last of which is not stored, and what is asked about them."""
    rng = random.Random(3)

    def tokens(number: int) -> Tokens:
        return [rng.randrange(4, 512) for _ in range(number)]

    documents = [tokens(number) for number in (*STORED_LENGTHS, MISSING_LENGTH)]
    for document in documents:
        document[40:60] = document[5:25]  # Keys are compared before they are reused.
    system = tokens(SYSTEM_TOKENS)
    prompts = []
    for order, num_question, num_between in zip(
        ORDERS, QUESTION_TOKENS, SEPARATOR_TOKENS, strict=True
    ):
        prompt, segments = list(system), []
        for place, number in enumerate(order):
            prompt += tokens(num_between if place else 0)
            segments.append([len(prompt), len(prompt) + len(documents[number])])
            prompt += documents[number]
        prompts.append(Prompt(prompt + tokens(num_question), segments))
    return documents, prompts


DOCUMENTS, PROMPTS = make_prompts()
PLAIN = [prompt._replace(is_named=False) for prompt in PROMPTS]
IN_CROWD = [PROMPTS[place] for place in CROWD]


class Engine(blending.Engine):
    """An engine whose selector is ``question``, or that has no connector."""

    def __init__(self, plan: dict[str, Any]) -> None:
        super().__init__(plan)
        self._scores: dict[tuple[int, ...], dict[str, Any]] = {}
        if self.has_connector:
            self.questions = self.blending.questions
            self._watch_scores()

    def ask(self, label: str, prompts: Any, *args: Any, **more: Any) -> list[Tokens]:
        replies = super().ask(label, prompts, *args, **more)
        answers = self.asked[label]["answers"][-len(replies) :]
        for answer in answers:
            answer["probe"] = self._scores.get(tuple(answer["prompt"]))
        return replies

    def ask_and(self, do: Callable[[], Any], name: str, prompt: Prompt) -> list[Any]:
        """Send a prompt, and do something once its question has been computed.

        The scheduler has not been told yet: as with several steps in flight.
        """
        update = self.scheduler.update_from_output
        done = []

        def update_once(*arguments: Any) -> Any:
            parked = self.side.holes._parked.values()
            if not done and any(each.probe and each.probe.row_id for each in parked):
                done.append(do())
            return update(*arguments)

        self.scheduler.update_from_output = update_once
        self.llm.llm_engine.add_request(name, prompt.inputs, sampling_of(4, prompt.arguments))
        self.run_out()
        del self.scheduler.update_from_output
        return done

    def run_out(self) -> None:
        """Step until nothing is left to do."""
        for _ in range(MAX_STEPS):
            if not self.llm.llm_engine.has_unfinished_requests() and not self.side.has_work:
                self.llm.llm_engine.step()
                return
            self.llm.llm_engine.step()
        raise RuntimeError("something is left to do for ever")

    @contextmanager
    def ratio(self, ratio: float) -> Iterator[None]:
        """As an engine with another ``blend_ratio``."""
        before, self.questions.ratio = self.questions.ratio, ratio
        yield
        self.questions.ratio = before

    @contextmanager
    def without_scores(self) -> Iterator[None]:
        """Workers see no question."""
        probe = self.worker_side._probe
        compare = probe._compare
        probe._compare = lambda queries: None
        yield
        probe._compare = compare

    def note_left(self, label: str) -> None:
        """Report what no request holds any more when there is none."""
        self.run_out()
        pool = self.scheduler.kv_cache_manager.block_pool
        left = {
            "parked": len(self.side.holes),
            "probe blocks": len(self.side.holes.probe_blocks),
            "compared": len(self.questions._compared),
            "used blocks": pool.num_gpu_blocks - 1 - pool.get_num_free_blocks(),
        }
        self.note(label, self.left() | left)

    def _watch_scores(self) -> None:
        choose = self.blending.choose

        def watched(request_id: str, scores: Any) -> Any:
            scored = self.blending.scored(request_id)
            counters = self.side.counters.blending
            counted = counters.reused_tokens
            runs = choose(request_id, scores)
            assert counters.reused_tokens >= counted, "counters never go down"
            prompt = self.scheduler.requests[request_id].prompt_token_ids
            self._scores[tuple(prompt)] = {
                "scored": [list(run) for run in scored],
                "scores": None if scores is None else scores.tolist(),
                "runs": [list(run) for run in runs],
            }
            return runs

        self.blending.choose = watched


@scenario
def cold(engine: Engine) -> None:
    """Without anything that is reused."""
    engine.ask("cold", PLAIN)


@scenario
def reused(engine: Engine) -> None:
    """All is computed; each prompt alone; beside others; with questions that nobody sees."""
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
    engine.note_left("left")
    engine.note("counters", engine.side.counters.totals())


@scenario
def interrupted(engine: Engine) -> None:
    """Requests that are aborted, or begin again, while their question is looked at."""
    engine.store(DOCUMENTS[:MISSING], STORED)
    engine.ask("async", IN_CROWD)
    abort = partial(engine.llm.llm_engine.abort_request, ["aborted"])
    engine.note("aborted", engine.ask_and(abort, "aborted", PROMPTS[1]))
    engine.note_left("left after abort")
    reset = partial(engine.scheduler.reset_prefix_cache, reset_running_requests=True)
    engine.note("reset", engine.ask_and(reset, "reset", PROMPTS[1]))
    engine.note_left("left after reset")
    engine.ask("async again", IN_CROWD)
    engine.note_left("left at the end")
