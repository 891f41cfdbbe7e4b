# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vllm-ascend-kvext project
"""Workloads with the lengths of today's requests: 2,000 to 60,000 tokens, and short ones.

The workloads are deterministic, and the module imports nothing of vLLM. A step stands for what a
prefill of 8,192 tokens takes.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import accumulate

from retention.production import read_trace
from retention.texts import Text
from retention.traces import Script, Trace


def write_chat(script: Script, scale: float) -> None:
    """Chats behind one system prompt. Every prompt repeats the answers before it."""
    system = script.text(1500, 1500)
    for _ in range(round(36 * scale)):
        _converse(script, system, (5, 10), (100, 3000), (200, 1200))


def write_reasoning(script: Script, scale: float) -> None:
    """Chats with a model that reasons. The next prompt keeps only the end of an answer."""
    system = script.text(1500, 1500)
    for _ in range(round(36 * scale)):
        _converse(script, system, (4, 9), (100, 3000), (300, 8000), kept_tokens=(100, 600))


def write_long_reasoning(script: Script, scale: float) -> None:
    """Chats about a document of the user's, with a model that reasons."""
    system = script.text(1500, 1500)
    for _ in range(round(20 * scale)):
        document = script.text(4000, 30000, system)
        _converse(script, document, (3, 7), (50, 600), (300, 8000), kept_tokens=(100, 600))


def write_agents(script: Script, scale: float) -> None:
    """Agents that call tools. What a tool returns is appended until the context is full."""
    system = script.text(6000, 6000)
    for _ in range(round(14 * scale)):
        context = script.text(300, 3000, system)
        previous = None
        delay_steps = script.rng.randint(0, 400)
        for _ in range(script.rng.randint(8, 24)):
            previous = script.ask(context, (60, 500), delay_steps, previous)
            context = script.text(200, 5000, script.answered(previous))
            if len(context) > 60000 * script.stretch:
                break
            # Most tools answer at once. A test suite, or a user, does not.
            is_slow = script.rng.random() < 0.15
            delay_steps = script.rng.randint(60, 300) if is_slow else script.rng.randint(2, 20)


def write_documents(script: Script, scale: float) -> None:
    """Questions about long documents, some of which are asked about more often."""
    documents = [script.text(4000, 50000) for _ in range(round(40 * scale))]
    weights = _skewed(len(documents))
    delay_steps = 0
    for document in script.rng.choices(documents, cum_weights=weights, k=round(220 * scale)):
        delay_steps += script.rng.randint(1, 12)
        script.ask(script.text(50, 500, document), (100, 600), delay_steps)


def write_edited(script: Script, scale: float) -> None:
    """Users send a long prompt again, with other words somewhere in its last half."""
    system = script.text(1500, 1500)
    for _ in range(round(40 * scale)):
        prompt = script.text(3000, 20000, system)
        previous = None
        delay_steps = script.rng.randint(0, 400)
        for _ in range(script.rng.randint(3, 8)):
            previous = script.ask(prompt, (200, 1500), delay_steps, previous)
            kept_tokens = round(len(prompt) * script.rng.uniform(0.5, 1))
            rest_tokens = max(1, len(prompt) - kept_tokens + script.rng.randint(-200, 400))
            prompt = script.library.write(rest_tokens, prompt.cut(kept_tokens))
            delay_steps = script.rng.randint(20, 200)


def write_few_shot(script: Script, scale: float) -> None:
    """Questions behind examples. The examples of popular tasks are asked for more often."""
    examples = [script.text(2000, 12000) for _ in range(round(40 * scale))]
    weights = _skewed(len(examples))
    delay_steps = 0
    for task in script.rng.choices(examples, cum_weights=weights, k=round(360 * scale)):
        delay_steps += script.rng.randint(0, 6)
        script.ask(script.text(50, 1000, task), (10, 200), delay_steps)


def write_short(script: Script, scale: float) -> None:
    """Short questions behind short system prompts, some of them asked often."""
    systems = [script.text(200, 800) for _ in range(8)]
    questions = [
        script.text(20, 700, script.rng.choice(systems)) for _ in range(round(240 * scale))
    ]
    weights = _skewed(len(questions))
    delay_steps = 0
    for question in script.rng.choices(questions, cum_weights=weights, k=round(700 * scale)):
        delay_steps += script.rng.randint(0, 2)
        script.ask(question, (20, 400), delay_steps)


def write_mixture(script: Script, scale: float) -> None:
    """All of it at once: chats, reasoning, agents, documents, and prompts that come once."""
    write_chat(script, 0.25 * scale)
    write_reasoning(script, 0.25 * scale)
    write_agents(script, 0.25 * scale)
    write_documents(script, 0.3 * scale)
    delay_steps = 0
    for _ in range(round(50 * scale)):
        delay_steps += script.rng.randint(2, 24)
        script.ask(script.text(2000, 20000), (100, 1000), delay_steps)


def _converse(
    script: Script,
    so_far: Text,
    turns: tuple[int, int],
    question_tokens: tuple[int, int],
    answer_tokens: tuple[int, int],
    kept_tokens: tuple[int, int] | None = None,
) -> None:
    """Write one chat.

    Args:
        kept_tokens: How much of an answer the next prompt keeps. None is everything.
    """
    rng = script.rng
    previous = None
    delay_steps = rng.randint(0, 400)
    for _ in range(rng.randint(*turns)):
        prompt = script.text(*question_tokens, so_far)
        previous = script.ask(prompt, answer_tokens, delay_steps, previous)
        answered = script.answered(previous)
        if kept_tokens is not None:
            # Without the reasoning, the end of the answer stands at other positions.
            num_kept = min(rng.randint(*kept_tokens), len(answered) - len(prompt))
            answered = script.library.write(num_kept, prompt)
        so_far = answered
        delay_steps = rng.randint(30, 240)


def _skewed(num_texts: int) -> Sequence[float]:
    """The cumulative popularity of texts, which falls with their rank."""
    return list(accumulate(1 / rank for rank in range(1, num_texts + 1)))


WRITERS: dict[str, Callable[[Script, float], None]] = {
    "chat": write_chat,
    "reasoning": write_reasoning,
    "long-reasoning": write_long_reasoning,
    "agents": write_agents,
    "documents": write_documents,
    "edited": write_edited,
    "few-shot": write_few_shot,
    "short": write_short,
    "mixture": write_mixture,
}


RECORDED = {"conversation": 0.4, "synthetic": 0.5}
"""By recorded trace: the share of the requests of ``production.RECORDINGS`` that is served."""

WORKLOADS = (*WRITERS, *RECORDED)


def write_workload(name: str, scale: float = 1.0, seed: int = 0) -> Trace:
    """The workload of that name.

    Args:
        name: One of `WORKLOADS`.
        scale: A factor on the number of chats, documents, ...
        seed: Another seed gives other lengths and arrivals of the same kind. Of recorded traces, it
            gives other requests.
    """
    if name in RECORDED:
        return read_trace(name, scale * RECORDED[name], seed)
    script = Script(f"today's {name}", 1.0, seed)
    WRITERS[name](script, scale)
    return Trace(name, tuple(script.requests))
