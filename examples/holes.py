# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vllm-ascend-kvext project
"""Shows what happens if host memory has lost parts of a prompt, on the real vLLM engine.

Questions about several long documents are asked again and again. The device has room for one
document, and host memory for all. Before each question, a few random chunks are removed from host
memory. By itself, host memory keeps the beginnings of prompts longest, and loses other parts only
if transfers fail. Without ``hole_reuse``, everything behind the first missing chunk is computed
again. With ``hole_reuse``, only the missing chunks are: the *holes*. The model is a tiny Gemma 3
without sliding windows and with random weights, so neither an accelerator nor a download is needed:

    pip install "vllm-ascend-kvext[demo]"
    python examples/holes.py

Each line of the picture is the prompt of one request, from left to right. The picture shows
observations, not plans: `SpanObserver` wraps ``schedule`` of the engine's scheduler, and reads what
every step tells the workers to compute and to load.
"""

from __future__ import annotations

import os
import random
import tempfile
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from engine_log import engine_log
from offload_hybrid import BLOCK_TOKENS, Round, Tokens, ask, random_tokens, start_engine
from retention import ENGINE_ENVIRON, print_aligned, write_model

NUM_DOCUMENTS = 4
NUM_QUESTIONS = 20
NUM_PICTURED = 10
"""The number of requests in the picture, the last ones. The caches are full by then."""

LOST_SHARE = 0.1
"""The share of all chunks that is removed before each question."""

INSTRUCTION_TOKENS = 256
DOCUMENT_TOKENS = (1200, 2200)
QUESTION_TOKENS = (40, 120)

DEVICE_BLOCKS = 101
"""Blocks of 32 tokens. vLLM keeps one, and the others have room for little more than a prompt."""

HOST_MEMORY_GIB = 0.03
"""The host memory, with room for all documents and all questions."""

CHUNK_TOKENS = 128

CONNECTOR = {
    "kv_connector": "KvextConnector",
    "kv_role": "kv_both",
    "kv_load_failure_policy": "recompute",
}
HOST_TIER = {
    "host_memory_gib": HOST_MEMORY_GIB,
    "chunk_tokens": CHUNK_TOKENS,
    "store_policy": "all",
    # A model of this size computes a chunk about as fast as it loads one. It is to load anyway.
    "load_if_slower": True,
}
REFERENCE = "without connector"
PICTURED = "holes"
RUNS: Mapping[str, Mapping[str, Any] | None] = {
    REFERENCE: None,
    "up to the first hole": {"hole_reuse": False},
    PICTURED: {"hole_reuse": True},
}

LOG = Path("out/holes.log")
TOKENS_PER_SIGN = 32
ON_DEVICE = "."
LOADED = "="
COMPUTED = "#"

Span = tuple[int, int]
"""The first and the end token."""


@dataclass(frozen=True)
class Question:
    """A question about a document. The prompt has instructions, the document and the question."""

    document: str
    prompt: Tokens


@dataclass
class Spans:
    """The observed spans of a prompt.

    Attributes:
        computed: The spans that steps computed, in rows of holes and in rows of the request.
        holes: The spans that were computed in rows of holes.
        loaded: The spans that were loaded from host memory.
    """

    computed: list[Span] = field(default_factory=list)
    holes: list[Span] = field(default_factory=list)
    loaded: list[Span] = field(default_factory=list)

    def signs(self, num_tokens: int) -> str:
        """One sign per token. A token that was neither computed nor loaded was on the device."""
        signs = [ON_DEVICE] * num_tokens
        for sign, spans in ((LOADED, self.loaded), (COMPUTED, self.computed)):
            for first, end in spans:
                signs[first:end] = sign * (min(end, num_tokens) - min(first, num_tokens))
        return "".join(signs)


class SpanObserver:
    """Observes what each step computes and loads, one request at a time.

    It takes the place of ``update_from_output`` of a scheduler in this process, and calls it.
    Before that it looks at what the workers were told: at the tokens of each row, and at the loads
    of the connector.
    """

    def __init__(self, scheduler: Any) -> None:
        self._update_from_output = scheduler.update_from_output
        self._spans = Spans()
        scheduler.update_from_output = self.update_from_output

    def update_from_output(self, output: Any, *args: Any) -> Any:
        self.look(output)
        return self._update_from_output(output, *args)

    def look(self, output: Any) -> None:
        """Note what a step has computed and loaded; ``output`` is what the workers were told."""
        for row_id, span in computed_spans(output):
            self._spans.computed.append(span)
            if "-hole-" in row_id:
                self._spans.holes.append(span)
        if output.kv_connector_metadata is not None:
            for load in output.kv_connector_metadata.jobs.loads:
                self._spans.loaded += between(load.tokens, load.holes)

    def take(self) -> Spans:
        """The spans that were observed since the last call."""
        spans = self._spans
        self._spans = Spans()
        return spans


def computed_spans(output: Any) -> Iterator[tuple[str, Span]]:
    """Each row of a ``SchedulerOutput``, and its tokens."""
    firsts = {new.req_id: new.num_computed_tokens for new in output.scheduled_new_reqs}
    going_on = output.scheduled_cached_reqs
    firsts.update(zip(going_on.req_ids, going_on.num_computed_tokens, strict=True))
    for row_id, num_tokens in output.num_scheduled_tokens.items():
        yield row_id, (firsts[row_id], firsts[row_id] + num_tokens)


def between(tokens: Span, holes: Iterable[Span]) -> Iterator[Span]:
    """The parts of a range between its holes."""
    first, end = tokens
    for hole_first, hole_end in holes:
        if first < hole_first:
            yield first, hole_first
        first = hole_end
    if first < end:
        yield first, end


@dataclass(frozen=True)
class Answer:
    """An answered question.

    Attributes:
        question: The question.
        round: The outputs for this prompt.
        signs: One sign per token of the prompt.
        hole_tokens: The number of tokens that were computed in rows of holes.
    """

    question: Question
    round: Round
    signs: str
    hole_tokens: int

    @property
    def picture(self) -> str:
        return draw(self.signs)


def draw(signs: str) -> str:
    """The signs of a prompt with one sign per `TOKENS_PER_SIGN` tokens, their most frequent one."""
    parts = (
        signs[first : first + TOKENS_PER_SIGN] for first in range(0, len(signs), TOKENS_PER_SIGN)
    )
    return "".join(max(COMPUTED + LOADED + ON_DEVICE, key=part.count) for part in parts)


def write_questions() -> list[Question]:
    """The questions. Each document has several, in random order."""
    rng = random.Random(0)
    instructions = random_tokens(rng, INSTRUCTION_TOKENS)
    documents = {
        chr(ord("A") + number): instructions + random_tokens(rng, rng.randint(*DOCUMENT_TOKENS))
        for number in range(NUM_DOCUMENTS)
    }
    names = list(documents) * (NUM_QUESTIONS // NUM_DOCUMENTS)
    rng.shuffle(names)
    return [
        Question(name, documents[name] + random_tokens(rng, rng.randint(*QUESTION_TOKENS)))
        for name in names
    ]


def serve(
    model: Path, questions: Sequence[Question], options: Mapping[str, Any] | None
) -> list[Answer]:
    """Answer the questions, one after the other, on a new engine.

    Args:
        options: Options of the connector, in addition to `HOST_TIER`; None for no connector.
    """
    engine: dict[str, Any] = {}
    if options is not None:
        extra_config = {**HOST_TIER, **options}
        engine["kv_transfer_config"] = {**CONNECTOR, "kv_connector_extra_config": extra_config}
    llm = start_engine(
        model,
        max_model_len=BLOCK_TOKENS * (DEVICE_BLOCKS - 1),
        num_gpu_blocks_override=DEVICE_BLOCKS,
        enable_prefix_caching=True,
        **engine,
    )
    ask(llm, "warm-up", [random_tokens(random.Random(1), 1000)])
    scheduler = llm.llm_engine.engine_core.engine_core.scheduler
    observer = SpanObserver(scheduler)
    answers = []
    for number, question in enumerate(questions):
        if options is not None:
            lose_chunks(scheduler.connector.scheduler_side.tier, seed=number)
        answers.append(answer(llm, observer, question))
    llm.llm_engine.engine_core.shutdown()
    return answers


def lose_chunks(tier: Any, seed: int) -> None:
    """Remove the same parts of all documents from host memory. ``seed`` selects the parts."""
    rng = random.Random(seed)
    num_chunks = BLOCK_TOKENS * DEVICE_BLOCKS // CHUNK_TOKENS
    lost = {number for number in range(num_chunks) if rng.random() < LOST_SHARE}
    tier.evict(lambda entry: entry.piece.first_tokens // CHUNK_TOKENS in lost)


def answer(llm: Any, observer: SpanObserver, question: Question) -> Answer:
    """Ask one question, and check the observation against the counts of vLLM."""
    observer.take()
    asked = ask(llm, question.document, [question.prompt])
    spans = observer.take()
    signs = spans.signs(len(question.prompt))
    num_hits = len(signs) - signs.count(COMPUTED)
    if num_hits != asked.hit_tokens:
        raise SystemExit(f"Observed {num_hits} tokens that were hit, vLLM has {asked.hit_tokens}.")
    return Answer(question, asked, signs, sum(end - first for first, end in spans.holes))


def print_pictures(answers: Sequence[Answer]) -> None:
    print(f"\n{PICTURED}, the last {NUM_PICTURED} requests; a sign is {TOKENS_PER_SIGN} tokens:")
    print(f"{ON_DEVICE} cached on the device   {LOADED} loaded from host memory   ", end="")
    print(f"{COMPUTED} computed\n")
    for number, each in list(enumerate(answers, 1))[-NUM_PICTURED:]:
        print(f"request {number:>2}, document {each.question.document}  {each.picture}")


def print_table(answers: Mapping[str, Sequence[Answer]]) -> None:
    """Print where the tokens of all prompts came from: one row per run.

    The table has no seconds, because such a small model computes in almost no time. `make
    bench-holes` measures times.
    """
    rows = [
        ("", "prompt", "on the", "from host", "", "of these", "identical"),
        ("", "tokens", "device", "memory", "computed", "in holes", "outputs"),
    ]
    for name, of_run in answers.items():
        signs = "".join(each.signs for each in of_run)
        counts = (len(signs), *map(signs.count, (ON_DEVICE, LOADED, COMPUTED)))
        hole_tokens = sum(each.hole_tokens for each in of_run)
        is_same = "yes" if has_same_outputs(of_run, answers[REFERENCE]) else "NO"
        numbers = [f"{count:,}" for count in (*counts, hole_tokens)]
        rows.append((name, *numbers, is_same))
    print_aligned(rows)


def has_same_outputs(answers: Sequence[Answer], expected: Sequence[Answer]) -> bool:
    return all(
        mine.round.is_equal(theirs.round) for mine, theirs in zip(answers, expected, strict=True)
    )


def main() -> None:
    from tqdm import tqdm

    os.environ.update(ENGINE_ENVIRON)
    questions = write_questions()
    answers = {}
    with tempfile.TemporaryDirectory() as folder, engine_log(LOG) as terminal:
        write_model(Path(folder), num_window_layers=0)
        for name, run in tqdm(RUNS.items(), unit=" engines", file=terminal):
            answers[name] = serve(Path(folder), questions, run)
    print_pictures(answers[PICTURED])
    print(f"\n{NUM_QUESTIONS} questions about {NUM_DOCUMENTS} documents:")
    print_table(answers)
    if not all(has_same_outputs(of_run, answers[REFERENCE]) for of_run in answers.values()):
        raise SystemExit("Some outputs differ from those without a connector.")
    print("\nAll outputs are identical to those without a connector.")


if __name__ == "__main__":
    main()
