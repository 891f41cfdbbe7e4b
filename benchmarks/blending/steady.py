# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vllm-ascend-kvext project
"""Measures learned segments in the long run, in host memory that holds half of them.

    python benchmarks/blending/steady.py [--quick] [--host-share S]

The model is SmolLM2-135M on the real engine, in float32. A prompt has six of 200 documents of 100
to 200 random tokens, in any order. The n-th document is used 1 / n times as often as the first
document. No client stores a document: the engine gets the separator and has the defaults of
blending. The engine's host memory holds the given share of all documents, counting each alone and
behind all contexts. Another engine has prefix caching only. The two engines take turns every
hundred prompts, and prompts run one by one.

*Hit* is the share of the prompts' tokens that were in any cache. *First token* (p50) and *time* (of
all hundred prompts, including the learning beside them) are ratios to prefix caching in the same
round. *Computed* is the same ratio of all tokens since the beginning. A ratio below 1 is a gain.
"""

from __future__ import annotations

import random
import statistics
import sys
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path

# Modules are found by their full names below benchmarks/, not by short names in this folder.
sys.path[0] = str(Path(__file__).parents[1])

from common.cpu_engine import ENVIRON  # noqa: E402
from common.processes import processes  # noqa: E402
from common.report import Table, parser, verdict, write  # noqa: E402

from blending import smollm2  # noqa: E402
from blending.learned import (  # noqa: E402
    DOCUMENTS_PER_PROMPT,
    LEARNED,
    ONE_THREAD,
    PREFIX_CACHING,
    Row,
    Texts,
    Tokens,
    make_documents,
    make_prompt,
    serve,
    start,
)

NUM_DOCUMENTS = 200
NUM_ROUNDS = 10
PROMPTS_PER_ROUND = 100
ANSWER_TOKENS = 4
HOST_SHARE = 0.5
TOKEN_BYTES = 2 * 30 * 3 * 64 * 4
"""The bytes of a token's keys and values in 30 layers with 3 heads of 64 float32 elements."""

NUM_SINKS = 4
"""The number of places of a document: alone, and behind three contexts."""

TABLE = Table(
    "prompts:>8", "hit prefix:>11", "hit learned:>12", "first token:>12", "time:>6", "computed:>9"
)


def make_texts(num_rounds: int, num_prompts: int = PROMPTS_PER_ROUND) -> Texts:
    """Make rounds of a number of prompts."""
    rng = random.Random(0)
    system, *documents = make_documents(rng, NUM_DOCUMENTS)

    def prompt() -> Tokens:
        found: dict[Tokens, None] = {}
        while len(found) < DOCUMENTS_PER_PROMPT:
            weights = [1 / number for number in range(1, NUM_DOCUMENTS + 1)]
            found |= dict.fromkeys(rng.choices(documents, weights))
        return make_prompt(rng, system, rng.sample([*found], len(found)))

    rounds = (tuple(prompt() for _ in range(num_prompts)) for _ in range(num_rounds))
    return Texts(tuple(documents), tuple(rounds))


def measure(texts: Texts, model: str, host_gib: float) -> Iterator[Row]:
    """Measure all rounds, in two engines that take turns."""
    modes = (PREFIX_CACHING, LEARNED)
    with ExitStack() as stack:
        engines = {mode: stack.enter_context(processes(1, ENVIRON | ONE_THREAD)) for mode in modes}
        for mode, process in engines.items():
            process.submit(start, mode, model, texts, host_gib).result()
        for number, prompts in enumerate(texts.rounds, 1):
            found = {
                mode: engines[mode].submit(serve, prompts, 1, ANSWER_TOKENS).result()
                for mode in modes
            }
            yield Row("idle", number, found)


def line(row: Row) -> str:
    hits = (f"{row.rounds[mode].hit_share:.0%}" for mode in (PREFIX_CACHING, LEARNED))
    ratios = (row.ratio(name, LEARNED) for name in ("seconds", "computed_tokens"))
    first_token = _p50(row, LEARNED) / _p50(row, PREFIX_CACHING)
    return TABLE.line(
        row.use * PROMPTS_PER_ROUND,
        *hits,
        f"{first_token:.2f}",
        *(f"{each:.2f}" for each in ratios),
    )


def _p50(row: Row, mode: str) -> float:
    return statistics.median(row.rounds[mode].first_token_s)


def main() -> None:
    options = parser(__doc__, "bench-blending")
    options.add_argument("--host-share", type=float, default=HOST_SHARE)
    arguments = options.parse_args()
    texts = make_texts(1 if arguments.quick else NUM_ROUNDS)
    num_bytes = sum(map(len, texts.documents)) * TOKEN_BYTES * NUM_SINKS * arguments.host_share
    lines = [f"host memory of {num_bytes / (1 << 30):.2f} GiB", TABLE.head]
    print(*lines, sep="\n", flush=True)
    rows = []
    for row in measure(texts, str(smollm2.build()), num_bytes / (1 << 30)):
        rows.append(row)
        lines.append(line(row))
        print(lines[-1], flush=True)
    last = rows[-1]
    lines.append(
        verdict(
            last.ratio("computed_tokens", LEARNED) < 1,
            f"learning and contexts included, {last.ratio('computed_tokens', LEARNED):.2f} x the "
            "tokens of prefix caching were computed",
        )
    )
    print(lines[-1])
    write(arguments.out, lines, rows, "steady")


if __name__ == "__main__":
    main()
