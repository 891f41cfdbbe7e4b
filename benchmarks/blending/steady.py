# SPDX-License-Identifier: Apache-2.0
"""Whether blending stays as good as it begins: prompts that never repeat, over the same documents.

    python benchmarks/blending/steady.py [--quick] [--prompts N] [--mode M] [--out FOLDER]

A tiny model gets random documents that were stored before, six of them in a new order per prompt.
By hundreds of prompts: the share of the documents' tokens that is reused, the tokens computed of a
prompt, the time to the first token, and what the host memory holds. Nothing of it may drift: the
last hundred is compared with the first.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import statistics
import sys
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

ROOT = Path(__file__).parents[2]
# Instead of this folder, whose modules are not to be found by their short names.
sys.path[0] = str(ROOT / "benchmarks")

from blending.modes import HEADS_16, MODES, Mode  # noqa: E402
from blending.prompts import Prompt, Workload  # noqa: E402
from blending.questions import Kind  # noqa: E402

if TYPE_CHECKING:
    from blending.engine import Engine

NUM_DOCUMENTS = 32
DOCUMENTS_PER_PROMPT = 6
DOCUMENT_TOKENS = 64
QUESTION_TOKENS = 12
HOST_GIB = 0.25
NUM_BLOCKS = 40
"""Of the device: a few prompts."""

BLOCK_TOKENS = 32
MOST_SLOWER = 1.25
"""Of the last hundred against the first; another process may have been there."""


@dataclass(frozen=True, slots=True)
class Hundred:
    """Some prompts in a row.

    Attributes:
        first: Number of the first one.
        reused_share: Of the documents' tokens; None: the responses do not say.
        computed_tokens: Of a prompt, mean.
        p50_s: Time to the first token, median.
        held_bytes: Of host memory, at the end; None: there is no connector.
    """

    first: int
    reused_share: float | None
    computed_tokens: float
    p50_s: float
    held_bytes: int | None


def make_workload(num_prompts: int, vocabulary_tokens: int, seed: int = 0) -> Workload:
    """No two prompts have the same documents in the same order."""
    rng = random.Random(seed)

    def text(num_tokens: int) -> tuple[int, ...]:
        return tuple(rng.choices(range(vocabulary_tokens // 2, vocabulary_tokens), k=num_tokens))

    documents = tuple(text(DOCUMENT_TOKENS) for _ in range(NUM_DOCUMENTS))
    orders: dict[tuple[int, ...], None] = {}
    while len(orders) < num_prompts:
        orders[tuple(rng.sample(range(NUM_DOCUMENTS), DOCUMENTS_PER_PROMPT))] = None
    starts = range(1, 1 + DOCUMENTS_PER_PROMPT * DOCUMENT_TOKENS, DOCUMENT_TOKENS)
    segments = tuple((start, start + DOCUMENT_TOKENS) for start in starts)
    return Workload(
        documents,
        tuple(
            Prompt(
                (0, *(token for n in order for token in documents[n]), *text(QUESTION_TOKENS)),
                segments,
                Kind.FACT,
                0,
                "",
            )
            for order in orders
        ),
    )


def hundreds(engine: Engine, workload: Workload, size: int = 100) -> Iterator[Hundred]:
    for first in range(0, len(workload.prompts), size):
        answers = [engine.ask(prompt, 1, None) for prompt in workload.prompts[first : first + size]]
        reused = [answer.reused_tokens for answer in answers if answer.reused_tokens is not None]
        of_documents = len(answers) * DOCUMENTS_PER_PROMPT * DOCUMENT_TOKENS
        yield Hundred(
            first,
            sum(reused) / of_documents if reused else None,
            statistics.mean(answer.computed_tokens for answer in answers),
            statistics.median(answer.first_token_s for answer in answers),
            held_bytes(engine),
        )


def held_bytes(engine: Engine) -> int | None:
    """What the host tier holds."""
    connector = engine.scheduler.connector
    if connector is None:
        return None
    return int(connector.scheduler_side._parts.tier.counters.bytes_held)


def line(hundred: Hundred) -> str:
    reused = "" if hundred.reused_share is None else f"{hundred.reused_share:.1%}"
    held = "" if hundred.held_bytes is None else f"{hundred.held_bytes / 2**20:.2f} MiB"
    return (
        f"{hundred.first:5} | {reused:>7} {hundred.computed_tokens:9.1f} "
        f"{hundred.p50_s * 1e3:9.2f} ms {held:>12}"
    )


HEAD = f"{'from':>5} | {'reused':>7} {'computed':>9} {'first token':>12} {'held':>12}"


def verdicts(found: Sequence[Hundred]) -> Iterator[str]:
    first, last = found[0], found[-1]
    if first.reused_share is not None and last.reused_share is not None:
        yield _verdict(last.reused_share >= first.reused_share, "as much is reused")
    is_met = last.computed_tokens <= first.computed_tokens
    yield _verdict(is_met, "no more tokens are computed")
    slower = last.p50_s / first.p50_s
    yield _verdict(slower <= MOST_SLOWER, f"first token after {slower:.2f} x the time")
    if first.held_bytes is not None and last.held_bytes is not None:
        yield _verdict(last.held_bytes <= first.held_bytes, "the host memory holds no more")


def _verdict(is_met: bool, text: str) -> str:
    return f"{'met' if is_met else 'NOT MET':8} last against first: {text}"


def run(mode: Mode, num_prompts: int) -> list[Hundred]:
    """One mode, in this process."""
    from blending.engine import Engine
    from blending.tiny.model import SEEDS, write_folder
    from blending.tiny.task import VOCABULARY_TOKENS

    workload = make_workload(num_prompts, VOCABULARY_TOKENS)
    options: dict[str, Any] = {
        "max_model_len": 512,
        "block_size": BLOCK_TOKENS,
        "num_gpu_blocks_override": NUM_BLOCKS,
    }
    with tempfile.TemporaryDirectory() as folder:
        write_folder("full", SEEDS["full"][0], Path(folder))
        engine = Engine(mode, folder, HOST_GIB, **options)
        engine.ask(Prompt(tuple(range(20, 60)), (), Kind.FACT, 0, ""), 1, None)
        if mode.blends:
            for segment in workload.stored:
                engine.store(segment)
        found = []
        print(HEAD, flush=True)
        for hundred in hundreds(engine, workload):
            found.append(hundred)
            print(line(hundred), flush=True)
        return found


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--prompts", type=int, default=1000)
    parser.add_argument("--quick", action="store_true", help="200 prompts")
    parser.add_argument("--mode", choices=MODES, default=HEADS_16.name)
    parser.add_argument("--out", type=Path, default=ROOT / "out" / "bench-blending")
    arguments = parser.parse_args()
    found = run(MODES[arguments.mode], 200 if arguments.quick else arguments.prompts)
    lines = [HEAD, *map(line, found), *verdicts(found)]
    print(*lines[1 + len(found) :], sep="\n")
    arguments.out.mkdir(parents=True, exist_ok=True)
    (arguments.out / "steady.txt").write_text("\n".join([*lines, ""]))
    (arguments.out / "steady.json").write_text(
        json.dumps([asdict(each) for each in found], indent=1) + "\n"
    )


if __name__ == "__main__":
    from blending.engine import ENVIRON

    os.environ.update({name: os.environ.get(name, value) for name, value in ENVIRON.items()})
    main()
