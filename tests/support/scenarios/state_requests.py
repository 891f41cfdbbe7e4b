# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vllm-ascend-kvext project
"""Random requests to a model with states: they join, leave, are aborted, preempted, and reset.

A reference engine answers the turns of conversations (``conversations``). Another engine gets these
turns in a random order, several at once, as often as asked (``random_requests``). Each answer is
compared when it ends.

Options of plans with ``random_requests``: ``known``, the file with the reference's answers;
``num_requests``; ``moves_nothing``, whether loads do nothing, which is a control.
"""

from __future__ import annotations

import json
import random
from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from support.scenarios import scenario, states
from support.scenarios.answers import LOGPROB_TOLERANCE, Answer, logprob_error
from support.scenarios.engine import Prompt, Tokens, answer_of, random_tokens, sampling_of

NUM_CONVERSATIONS = 8
TURNS = 4
REPLY_TOKENS = 20
MAX_LIVE = 7
ABORT_STEPS = 40
"""After so many steps, a request is aborted."""

RESET_STEPS = 90
"""After so many steps, all running requests are preempted, and the cache is emptied."""

MAX_STEPS_PER_REQUEST = 200
"""An engine that needs more steps hangs."""


class Engine(states.Engine):
    """An engine that serves conversations."""

    reply_tokens = REPLY_TOKENS


@scenario
def conversations(engine: Engine) -> None:
    """The turns of conversations. Some begin alike, and all contain their replies."""
    rng = random.Random("conversations")
    unit = engine.unit_tokens
    shared = random_tokens(rng, 2 * unit + unit // 2)
    prompts = [
        (shared if number % 2 else []) + random_tokens(rng, unit + rng.randrange(2 * unit))
        for number in range(NUM_CONVERSATIONS)
    ]
    for _ in range(TURNS):
        replies = engine.ask("turns", prompts)
        prompts = [
            prompt + reply + random_tokens(rng, rng.choice((1, 7, unit - REPLY_TOKENS, unit)))
            for prompt, reply in zip(prompts, replies, strict=True)
        ]


class Crowd:
    """Random requests of one engine.

    Args:
        turns: The answers of a reference, in the order of `conversations`.
    """

    def __init__(self, engine: Engine, turns: Sequence[Mapping[str, Any]]) -> None:
        self._engine = engine
        self._turns = [Answer(**turn) for turn in turns]
        self._rng = random.Random("requests")
        self._live: dict[str, Answer] = {}
        self._last = [0] * NUM_CONVERSATIONS
        self._is_abort_due = False
        self._is_reset_due = False
        self.counts: Counter[str] = Counter()
        self.wrong: list[Any] = []
        self.largest = 0.0

    def serve(self, num_requests: int) -> None:
        """Serve requests. Each answer is compared as it ends."""
        engine = self._engine.llm.llm_engine
        while self.counts["requests"] < num_requests or self._live:
            wanted = self._rng.randrange(1, MAX_LIVE)
            while self.counts["requests"] < num_requests and len(self._live) < wanted:
                self._join()
            self._is_abort_due |= not (self.counts["steps"] + 1) % ABORT_STEPS
            self._is_reset_due |= not (self.counts["steps"] + 1) % RESET_STEPS
            if self._is_abort_due and self._live:
                self._abort()
            if self._is_reset_due:
                self._reset()
            for output in engine.step():
                if output.finished and output.request_id in self._live:
                    self._end(self._live.pop(output.request_id), output)
            self.counts["steps"] += 1
            if self.counts["steps"] > MAX_STEPS_PER_REQUEST * num_requests:
                raise RuntimeError(f"requests hang: {sorted(self._live)}, {self.counts}")

    def _join(self) -> None:
        """Send a turn: mostly the next of a conversation, else any."""
        number = self._rng.randrange(NUM_CONVERSATIONS)
        turn = (self._last[number] + 1) % TURNS if self._rng.random() < 0.7 else 0
        if self._rng.random() < 0.2:
            turn = self._rng.randrange(TURNS)
        self._last[number] = turn
        known = self._turns[turn * NUM_CONVERSATIONS + number]
        request_id = f"request {self.counts['requests']}"
        self.counts["requests"] += 1
        self._live[request_id] = known
        sampling = sampling_of(self._rng.randrange(1, REPLY_TOKENS + 1))
        inputs = Prompt(list(known.prompt)).inputs
        self._engine.llm.llm_engine.add_request(request_id, inputs, sampling)

    def _abort(self) -> None:
        request_id = self._rng.choice(sorted(self._live))
        del self._live[request_id]
        self._engine.llm.llm_engine.abort_request([request_id])
        self.counts["aborts"] += 1
        self._is_abort_due = False

    def _reset(self) -> None:
        """Preempt all running requests, and empty the cache.

        vLLM raises while a request loads.
        """
        if not self._engine.side._loads.num_under_way:
            scheduler = self._engine.scheduler
            self.counts["resets"] += scheduler.reset_prefix_cache(reset_running_requests=True)
            self._is_reset_due = False

    def _end(self, known: Answer, output: Any) -> None:
        prompt: Tokens = list(known.prompt)
        found = answer_of(Prompt(prompt), output)
        for step in found["logprobs"]:
            for token in list(step):
                step[str(token)] = step.pop(token)
        answer = Answer(**found)
        self.counts["answers"] += 1
        self.counts["hit tokens"] += answer.hit_tokens
        error = logprob_error(answer, known)
        if answer.reply == known.reply[: len(answer.reply)] and error <= LOGPROB_TOLERANCE:
            self.largest = max(self.largest, error)
        else:
            place = (self.counts["answers"], answer.prompt_tokens, answer.hit_tokens, error)
            self.wrong.append(place)


@scenario
def random_requests(engine: Engine) -> None:
    turns = json.loads(Path(engine.plan["known"]).read_text())
    before = engine.counted.copy()
    crowd = Crowd(engine, turns)
    with engine.loading_nothing(engine.plan["moves_nothing"]):
        crowd.serve(engine.plan["num_requests"])
        engine.finish()
    engine.note("counts", dict(crowd.counts + (engine.counted - before)))
    engine.note("wrong", crowd.wrong)
    engine.note("largest", crowd.largest)
