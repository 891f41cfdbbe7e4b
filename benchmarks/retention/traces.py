# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vllm-ascend-kvext project
"""Writes traces: which requests arrive when, and what they share.

Traces are deterministic, and the module imports nothing of vLLM. Time is counted in scheduler
steps. A request arrives a fixed number of steps after the start, or after the end of the request
that it continues.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass

from retention.texts import Library, Text


@dataclass(frozen=True, slots=True)
class TracedRequest:
    """A request whose answer is known in advance.

    Attributes:
        prompt: The prompt.
        answered: The prompt and the answer.
        delay_steps: When it arrives, counted from the end of ``after`` or the start of the trace.
        after: The index in the trace of the request that must finish first.
    """

    prompt: Text
    answered: Text
    delay_steps: int
    after: int | None = None

    @property
    def num_prompt_tokens(self) -> int:
        return len(self.prompt)

    @property
    def num_output_tokens(self) -> int:
        return len(self.answered) - len(self.prompt)


@dataclass(frozen=True, slots=True)
class Trace:
    """The requests in order of their numbers. A continuation comes after what it continues."""

    name: str
    requests: tuple[TracedRequest, ...]

    @property
    def num_prompt_tokens(self) -> int:
        return sum(request.num_prompt_tokens for request in self.requests)


class Script:
    """Collects the requests of a trace while it is written.

    Attributes:
        stretch: A factor on the lengths of texts. Layouts with a coarse hit unit need long texts.
    """

    def __init__(self, name: str, stretch: float, seed: int = 0) -> None:
        seed_text = f"{name}/{seed}" if seed else name
        self.rng = random.Random(seed_text)
        self.library = Library(seed_text)
        self.stretch = stretch
        self.requests: list[TracedRequest] = []

    def length(self, low: int, high: int) -> int:
        return max(1, round(self.rng.randint(low, high) * self.stretch))

    def text(self, low: int, high: int, after: Text | None = None) -> Text:
        return self.library.write(self.length(low, high), after)

    def ask(
        self, prompt: Text, output: tuple[int, int], delay_steps: int, after: int | None = None
    ) -> int:
        """Add a request, and return its number. Outputs are not stretched."""
        answered = self.library.write(self.rng.randint(*output), prompt)
        self.requests.append(TracedRequest(prompt, answered, delay_steps, after))
        return len(self.requests) - 1

    def answered(self, request: int) -> Text:
        return self.requests[request].answered


def write_chat(script: Script, scale: float) -> None:
    """Conversations behind one system prompt; each prompt repeats the conversation so far."""
    system = script.text(4200, 4200)
    for _ in range(round(60 * scale)):
        previous = None
        so_far = system
        delay_steps = script.rng.randint(0, 150)
        for _ in range(7):
            prompt = script.text(1024, 4096, so_far)
            previous = script.ask(prompt, (128, 512), delay_steps, previous)
            so_far = script.answered(previous)
            delay_steps = script.rng.randint(60, 240)


def write_agent(script: Script, scale: float) -> None:
    """Trees of agents: a task behind a shared prompt, forks, and tool results at every step."""
    shared = script.text(4200, 4200)
    for _ in range(round(16 * scale)):
        task = script.text(4096, 8192, shared)
        level = [script.ask(task, (64, 384), script.rng.randint(0, 200))]
        for fan_out in (2, 2, 1, 1, 1):
            level = [
                script.ask(
                    script.text(512, 3072, script.answered(parent)),
                    (64, 384),
                    script.rng.randint(5, 60),
                    parent,
                )
                for parent in level
                for _ in range(fan_out)
            ]


def write_documents(script: Script, scale: float) -> None:
    """Many short questions about each of some long documents, in random order."""
    documents = [script.text(16384, 32768) for _ in range(max(3, round(24 * scale)))]
    questions = [document for document in documents for _ in range(6)]
    script.rng.shuffle(questions)
    delay_steps = 0
    for document in questions:
        delay_steps += script.rng.randint(2, 10)
        script.ask(script.text(64, 512, document), (64, 256), delay_steps)


def write_oneshot(script: Script, scale: float) -> None:
    """Users with one question each, behind a few long system prompts. Some are more popular."""
    systems = [script.text(3000, 14000) for _ in range(6)]
    delay_steps = 0
    for _ in range(round(360 * scale)):
        delay_steps += script.rng.randint(0, 8)
        (system,) = script.rng.choices(systems, weights=[1 / rank for rank in range(1, 7)])
        script.ask(script.text(100, 2500, system), (64, 384), delay_steps)


def write_edited(script: Script, scale: float) -> None:
    """A chat in which messages are edited, answers regenerated, and reasoning is stripped."""
    system = script.text(2100, 2100)
    for _ in range(round(64 * scale)):
        previous = None
        so_far = system
        delay_steps = script.rng.randint(0, 150)
        for _ in range(5):
            if previous is not None:
                so_far = _edited_history(script, previous)
            prompt = script.text(300, 3000, so_far)
            previous = script.ask(prompt, (128, 768), delay_steps, previous)
            delay_steps = script.rng.randint(40, 200)


def _edited_history(script: Script, previous: int) -> Text:
    """The history that is left of the last exchange when the next exchange begins."""
    request = script.requests[previous]
    kind = script.rng.choices(("continued", "edited", "stripped"), weights=(2, 3, 3))[0]
    if kind == "edited":
        cut_tokens = script.rng.randint(1, 1000)
        return request.prompt.cut(max(1, request.num_prompt_tokens - cut_tokens))
    if kind == "stripped":
        kept_tokens = max(1, request.num_output_tokens // 3)
        return script.library.write(kept_tokens, request.prompt)
    return request.answered


def write_lognormal(script: Script, scale: float) -> None:
    """Requests as in Mooncake's traces: units of 512 tokens, log-normal lengths, reused texts.

    The probability that a text is reused falls with the number of requests in between, and has a
    heavy tail.
    """
    rng = script.rng
    unit_tokens = round(512 * script.stretch)
    delay_steps = 0
    for number in range(round(240 * scale)):
        delay_steps += rng.randint(0, 6)
        kept: Text | None = None
        if number and rng.random() < 0.75:
            distance = min(number, int(rng.paretovariate(0.5)))
            earlier = script.requests[number - distance].prompt
            num_units = len(earlier) // unit_tokens
            # Half of the reusing requests continue the text. The others share only its beginning.
            kept_units = num_units if rng.random() < 0.5 else rng.randint(0, num_units)
            kept = earlier.cut(kept_units * unit_tokens) if kept_units else None
        for _ in range(min(100, round(rng.lognormvariate(1.7, 1.1)))):
            kept = script.library.write(unit_tokens, kept)
        prompt = script.library.write(rng.randint(1, unit_tokens - 1), kept)
        output_tokens = min(2000, max(1, round(rng.lognormvariate(5.0, 0.8))))
        script.ask(prompt, (output_tokens, output_tokens), delay_steps)


def write_retrieval(script: Script, scale: float) -> None:
    """Questions behind the first chunks of some ranked lists of chunks, of varying numbers."""
    system = script.text(300, 300)
    rankings = []
    for _ in range(round(20 * scale)):
        ends = []
        so_far = system
        for _ in range(12):
            so_far = script.text(200, 800, so_far)
            ends.append(so_far)
        rankings.append(ends)
    delay_steps = 0
    for _ in range(round(240 * scale)):
        delay_steps += script.rng.randint(1, 8)
        found = script.rng.choice(script.rng.choice(rankings))
        script.ask(script.text(20, 200, found), (32, 128), delay_steps)


def write_one_token_edits(script: Script, scale: float) -> None:
    """Prompts that are sent again and again, each time with one token replaced somewhere."""
    originals = [script.text(1000, 8000) for _ in range(round(40 * scale))]
    order = [original for original in originals for _ in range(6)]
    script.rng.shuffle(order)
    delay_steps = 0
    for original in order:
        delay_steps += script.rng.randint(1, 8)
        # Nothing behind an edited token is shared, so the rest can be new.
        kept_tokens = script.rng.randint(1, len(original) - 1)
        edited = script.library.write(len(original) - kept_tokens, original.cut(kept_tokens))
        script.ask(edited, (32, 128), delay_steps)


def write_edited_prompts(script: Script, scale: float) -> None:
    """Users take turns to send a long prompt again, each time with its last tokens rewritten."""
    system = script.text(2000, 2000)
    prompts = [script.text(3000, 9000, system) for _ in range(max(3, round(24 * scale)))]
    delay_steps = 0
    for _ in range(5):
        for user, prompt in enumerate(prompts):
            delay_steps += script.rng.randint(5, 20)
            script.ask(prompt, (128, 512), delay_steps)
            rewritten_tokens = script.length(20, 600)
            kept = prompt.cut(len(prompt) - rewritten_tokens)
            prompts[user] = script.library.write(rewritten_tokens, kept)


def write_tree(script: Script, scale: float) -> None:
    """Prompts along a tree of prefixes: every text has three continuations, five levels deep."""
    roots = [script.text(100, 1500) for _ in range(max(1, round(3 * scale)))]
    levels = [roots]
    for _ in range(4):
        levels.append([script.text(100, 1500, text) for text in levels[-1] for _ in range(3)])
    texts = [text for level in levels for text in level]
    delay_steps = 0
    for _ in range(round(360 * scale)):
        delay_steps += script.rng.randint(1, 8)
        script.ask(script.text(20, 300, script.rng.choice(texts)), (32, 128), delay_steps)


def write_short(script: Script, scale: float) -> None:
    """Short questions behind a short system prompt, some of them asked often."""
    system = script.text(200, 200)
    questions = [script.text(20, 500, system) for _ in range(round(300 * scale))]
    weights = [1 / rank for rank in range(1, len(questions) + 1)]
    delay_steps = 0
    for question in script.rng.choices(questions, weights=weights, k=round(1200 * scale)):
        delay_steps += script.rng.randint(0, 3)
        script.ask(question, (16, 128), delay_steps)


WRITERS: dict[str, Callable[[Script, float], None]] = {
    "chat": write_chat,
    "agent": write_agent,
    "documents": write_documents,
    "oneshot": write_oneshot,
    "edited": write_edited,
    "lognormal": write_lognormal,
    "retrieval": write_retrieval,
    "one-token-edits": write_one_token_edits,
    "edited-prompts": write_edited_prompts,
    "tree": write_tree,
    "short": write_short,
}


def write_trace(name: str, scale: float = 1.0, stretch: float = 1.0, seed: int = 0) -> Trace:
    """The trace of that name.

    Args:
        name: A key of `WRITERS`.
        scale: A factor on the number of conversations, documents, ...
        stretch: A factor on the lengths of texts.
        seed: Another seed gives other lengths and arrivals of the same kind.
    """
    script = Script(name, stretch, seed)
    WRITERS[name](script, scale)
    return Trace(name, tuple(script.requests))
