# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vllm-ascend-kvext project
"""Measures whether segments that the engine learns pay, for prompts of separated documents.

    python benchmarks/blending/learned.py [--quick] [--load L] [--rounds N]

The model has random weights and runs on the real engine. In a round, every document of a pool is in
one prompt, six documents per prompt, in a new order each round. So round N is the N-th use of every
document. Three engines take turns, round by round. The first has prefix caching only. The client of
the second has stored the documents before. The third gets only the separator, and learns segments.

There are two loads. In *idle*, prompts come one by one, and the engine finishes all other work
before the next prompt. In *busy*, four clients send the next prompt as soon as they have an answer.
In this load, learning takes time from the other requests.

*Hit* is the share of a prompt's tokens that were in any cache. *First token* and *time* (of the
whole round) are ratios to prefix caching in the same round. *Computed* is the same ratio of all
tokens that the engine has computed from the beginning to the end of the round, including stores and
learning. A ratio below 1 is a gain.
"""

from __future__ import annotations

import random
import statistics
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path

# Modules are found by their full names below benchmarks/, not by short names in this folder.
sys.path[0] = str(Path(__file__).parents[1])

from common.cpu_engine import ENVIRON, CpuEngine, kvext_config  # noqa: E402
from common.models import MODELS, VOCABULARY_TOKENS  # noqa: E402
from common.processes import processes  # noqa: E402
from common.report import Table, median_ratio, parser, verdict, write  # noqa: E402

from blending.engine import store  # noqa: E402

DOCUMENTS_PER_PROMPT = 6
NUM_DOCUMENTS = 24
NUM_ROUNDS = 6
ANSWER_TOKENS = 16
SYSTEM_TOKENS = 40
DOCUMENT_TOKENS = (100, 200)
QUESTION_TOKENS = 20
SEPARATOR = (1, 2, 3)
ONE_THREAD = {"OMP_NUM_THREADS": "1", "VLLM_CPU_OMP_THREADS_BIND": "nobind"}
"""With one thread, other processes affect the times less."""

LOADS = {"idle": 1, "busy": 4}
"""The number of clients of each load."""

PREFIX_CACHING = "prefix"
STORED = "stored"
LEARNED = "learned"
MODES = (PREFIX_CACHING, STORED, LEARNED)

Tokens = tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Texts:
    """The documents, and the prompts of each round."""

    documents: tuple[Tokens, ...]
    rounds: tuple[tuple[Tokens, ...], ...]


@dataclass(slots=True)
class Round:
    """The results of one engine for the prompts of one round.

    Attributes:
        hit_share: The share of the prompts' tokens that were in some cache.
        first_token_s: For each prompt, the time from adding it to its first token.
    """

    hit_share: float = 0.0
    first_token_s: list[float] = field(default_factory=list)
    seconds: float = 0.0
    computed_tokens: int = 0


@dataclass(frozen=True, slots=True)
class Row:
    """One round in all modes.

    Attributes:
        use: The number of the round, from 1.
    """

    load: str
    use: int
    rounds: dict[str, Round]

    def first_token_ratio(self, mode: str) -> float:
        return median_ratio(*(self.rounds[each].first_token_s for each in (mode, PREFIX_CACHING)))

    def ratio(self, name: str, mode: str) -> float:
        return getattr(self.rounds[mode], name) / getattr(self.rounds[PREFIX_CACHING], name)


def make_texts(num_documents: int, num_rounds: int) -> Texts:
    """Make the texts. In each round, every document is in one prompt."""
    rng = random.Random(0)
    system, *documents = make_documents(rng, num_documents)
    rounds = []
    for _ in range(num_rounds):
        order = rng.sample(documents, num_documents)
        groups = [
            order[n : n + DOCUMENTS_PER_PROMPT] for n in range(0, len(order), DOCUMENTS_PER_PROMPT)
        ]
        rounds.append(tuple(make_prompt(rng, system, group) for group in groups))
    return Texts(tuple(documents), tuple(rounds))


def make_documents(rng: random.Random, num_documents: int) -> list[Tokens]:
    """Make a system message, and then documents."""
    lengths = [SYSTEM_TOKENS, *(rng.randint(*DOCUMENT_TOKENS) for _ in range(num_documents))]
    return [_text(rng, num_tokens) for num_tokens in lengths]


def make_prompt(rng: random.Random, system: Tokens, documents: Sequence[Tokens]) -> Tokens:
    """Make a prompt: a system message, then documents and a question, each behind a separator."""
    others = [*documents, _text(rng, QUESTION_TOKENS)]
    return (*system, *(token for part in others for token in (*SEPARATOR, *part)))


def _text(rng: random.Random, num_tokens: int) -> Tokens:
    return tuple(rng.choices(range(10, VOCABULARY_TOKENS), k=num_tokens))


def start(mode: str, model: str, texts: Texts, host_gib: float = 1) -> None:
    """Make the engine of this process."""
    global _engine
    config = None
    if mode != PREFIX_CACHING:
        segments = {"separator": list(SEPARATOR), "learn": mode == LEARNED}
        config = kvext_config(host_memory_gib=host_gib, segments=segments)
    _engine = CpuEngine(
        model, config, dtype="float32", max_model_len=2048, max_num_batched_tokens=2048
    )
    _engine.ask(range(10, 100))
    _engine.settle()
    _engine.computed_tokens = 0
    if mode == STORED:
        for document in texts.documents:
            store(_engine, document)


def serve(prompts: Sequence[Tokens], num_clients: int, answer_tokens: int = ANSWER_TOKENS) -> Round:
    """Serve a round with the engine of this process."""
    engine = _engine
    found = Round()
    waiting = list(prompts)
    began_s: dict[str, float] = {}
    hit_tokens = 0
    started_s = time.perf_counter()
    answering: set[str] = set()
    while waiting or answering:
        while waiting and len(answering) < num_clients:
            request_id = engine.add(waiting.pop(0), answer_tokens)
            began_s[request_id] = time.perf_counter()
            answering.add(request_id)
        for output in engine.step():
            if output.outputs[0].token_ids and output.request_id in began_s:
                found.first_token_s.append(time.perf_counter() - began_s.pop(output.request_id))
            if output.finished:
                answering.discard(output.request_id)
                hit_tokens += output.num_cached_tokens or 0
                found.seconds = time.perf_counter() - started_s
                if num_clients == 1:
                    engine.settle()
    found.hit_share = hit_tokens / sum(map(len, prompts))
    found.computed_tokens = engine.computed_tokens
    return found


def measure(load: str, texts: Texts, model: str) -> Iterator[Row]:
    """Measure all rounds, in engines that take turns."""
    with ExitStack() as stack:
        engines = {mode: stack.enter_context(processes(1, ENVIRON | ONE_THREAD)) for mode in MODES}
        for mode, process in engines.items():
            process.submit(start, mode, model, texts).result()
        for number, prompts in enumerate(texts.rounds):
            turn = [*MODES[number % len(MODES) :], *MODES[: number % len(MODES)]]
            found = {
                mode: engines[mode].submit(serve, prompts, LOADS[load]).result() for mode in turn
            }
            yield Row(load, number + 1, {mode: found[mode] for mode in MODES})


TABLE = Table(
    *("load:<5", "use:>4", *(f"hit {mode}:>12" for mode in MODES)),
    *(f"{what} {mode}:>20" for what in ("first token", "time", "computed") for mode in MODES[1:]),
)


def line(row: Row) -> str:
    cells = [f"{row.rounds[mode].hit_share:.0%}" for mode in MODES]
    cells += [f"{row.first_token_ratio(mode):.2f}" for mode in MODES[1:]]
    for name in ("seconds", "computed_tokens"):
        cells += [f"{row.ratio(name, mode):.2f}" for mode in MODES[1:]]
    return TABLE.line(row.load, row.use, *cells)


def verdicts(rows: Sequence[Row]) -> Iterator[str]:
    """The lines about the rounds in which learning pays, for each load."""
    for load in dict.fromkeys(row.load for row in rows):
        of_load = [row for row in rows if row.load == load]
        paid = [row.use for row in of_load if row.ratio("computed_tokens", LEARNED) < 1]
        uses = f"from use {paid[0]} on" if paid else "in no round"
        yield verdict(bool(paid), f"{load}: learning has saved more tokens than it cost {uses}")
        later = of_load[2:] or of_load
        for mode in MODES[1:]:
            first_token = statistics.median(row.first_token_ratio(mode) for row in later)
            yield verdict(
                first_token < 1,
                f"{load}: first token after {first_token:.2f} x the time from the third use on, "
                f"{mode}",
            )


def main() -> None:
    options = parser(__doc__, "bench-blending")
    options.add_argument("--load", action="append", choices=LOADS)
    options.add_argument("--rounds", type=int)
    arguments = options.parse_args()
    num_rounds = arguments.rounds or (4 if arguments.quick else NUM_ROUNDS)
    texts = make_texts(NUM_DOCUMENTS, num_rounds)
    num_tokens = statistics.mean(map(len, texts.documents))
    lines = [f"{NUM_DOCUMENTS} documents of {num_tokens:.0f} tokens in the mean", TABLE.head]
    print(*lines, sep="\n", flush=True)
    rows = []
    with tempfile.TemporaryDirectory() as folder:
        MODELS["qwen3"].write(Path(folder))
        for load in arguments.load or LOADS:
            for row in measure(load, texts, folder):
                rows.append(row)
                lines.append(line(row))
                print(lines[-1], flush=True)
    ends = list(verdicts(rows))
    print(*ends, sep="\n")
    write(arguments.out, [*lines, *ends], rows, "learned")


if __name__ == "__main__":
    main()
