# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vllm-ascend-kvext project
"""The traces of this benchmark: some of `retention.traces`, and traces with popular texts.

The traces are deterministic, and the module imports nothing of vLLM.
"""

from __future__ import annotations

from collections.abc import Callable
from itertools import accumulate

from retention.texts import Text
from retention.traces import Script, Trace, write_trace

SUMMARY_TOKENS = (600, 1500)


def write_questions(script: Script, scale: float) -> None:
    """Many questions about long documents. Most questions are about a few of the documents."""
    documents = [script.text(4000, 24000) for _ in range(round(48 * scale))]
    _ask_about(script, documents, round(400 * scale))


def write_drifting(script: Script, scale: float) -> None:
    """Questions about long documents. From time to time, other documents become popular."""
    documents = [script.text(4000, 24000) for _ in range(round(48 * scale))]
    delay_steps = 0
    for _ in range(4):
        script.rng.shuffle(documents)
        popular = documents[: len(documents) // 2]
        delay_steps = _ask_about(script, popular, round(100 * scale), delay_steps)


def write_scanned(script: Script, scale: float) -> None:
    """Questions about documents, between long prompts that are sent only once."""
    documents = [script.text(4000, 24000) for _ in range(round(32 * scale))]
    weights = _skewed(len(documents))
    delay_steps = 0
    for _ in range(round(400 * scale)):
        delay_steps += script.rng.randint(4, 16)
        if script.rng.random() < 0.4:
            script.ask(script.text(4000, 24000), (64, 256), delay_steps)
        else:
            (document,) = script.rng.choices(documents, cum_weights=weights)
            script.ask(script.text(64, 512, document), (64, 256), delay_steps)


def write_compacted(script: Script, scale: float) -> None:
    """Agents whose context is compacted: a summary replaces the middle.

    All keys behind a summary change, because the keys of a context are chained.
    """
    system = script.text(4000, 4000)
    for _ in range(round(20 * scale)):
        task = script.text(2000, 6000, system)
        context = task
        previous = None
        delay_steps = script.rng.randint(0, 300)
        for _ in range(18):
            context = script.text(500, 3000, context)
            previous = script.ask(context, (64, 384), delay_steps, previous)
            context = script.answered(previous)
            delay_steps = script.rng.randint(20, 120)
            if len(context) > 24000 * script.stretch:
                # Some of the latest messages are repeated behind the summary.
                kept = context.cut(round(len(context) * script.rng.uniform(0.3, 0.5)))
                context = script.text(*SUMMARY_TOKENS, kept)
                context = script.text(2000, 4000, context)


def _ask_about(
    script: Script, documents: list[Text], num_questions: int, delay_steps: int = 0
) -> int:
    """Ask about documents, most often about the first. Returns when the last question arrives."""
    for document in script.rng.choices(
        documents, cum_weights=_skewed(len(documents)), k=num_questions
    ):
        delay_steps += script.rng.randint(4, 16)
        script.ask(script.text(64, 512, document), (64, 256), delay_steps)
    return delay_steps


def _skewed(num_texts: int) -> list[float]:
    """The cumulative popularity of texts, which falls with their rank."""
    return list(accumulate(1 / rank for rank in range(1, num_texts + 1)))


WRITERS: dict[str, Callable[[Script, float], None]] = {
    "questions": write_questions,
    "drifting": write_drifting,
    "scanned": write_scanned,
    "compacted": write_compacted,
}

TRACES = (*WRITERS, "chat", "agent")


def trace_named(name: str, scale: float = 1.0, stretch: float = 1.0) -> Trace:
    """The trace of that name.

    Args:
        name: One of `TRACES`, or of ``retention.traces``.
        scale: A factor on the number of documents, questions, conversations, ...
        stretch: A factor on the lengths of texts.
    """
    if name not in WRITERS:
        return write_trace(name, scale, stretch)
    script = Script(name, stretch)
    WRITERS[name](script, scale)
    return Trace(name, tuple(script.requests))
