# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vllm-ascend-kvext project
"""Measures the time to the first token of a prompt of which host memory has a part.

    python benchmarks/holes/first_token.py [--quick] [--tokens N] [--rounds R] [--model M]

*Holes*: one chunk in ten is missing. The real engine computes the whole prompt, or everything
behind the first missing chunk, or only the holes. *Rows*: the additional time if missing tokens are
apart, and each part needs a row of its own, for ``MIN_RUN_TOKENS``. All rows are measured in turns
in one engine. A number is the median of the rounds. vLLM's process has one CPU for the model, and
another CPU for copies.
"""

from __future__ import annotations

import os
import random
import statistics
import sys
import tempfile
import time
from collections.abc import Sequence
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any
from unittest import mock

ROOT = Path(__file__).parents[2]
sys.path[0] = str(ROOT / "benchmarks")

from common.cpu_engine import ENVIRON, CpuEngine, kvext_config  # noqa: E402
from common.models import MAX_MODEL_TOKENS, MODELS, VOCABULARY_TOKENS  # noqa: E402
from common.report import parser  # noqa: E402

CHUNK_TOKENS = 128
BLOCK_TOKENS = 128
STEP_TOKENS = 1024
GAPS = {"together": 1, "apart": 3}
"""The distance from a missing chunk to the next missing chunk, in chunks."""

ONE_CPU = {
    "VLLM_CPU_OMP_THREADS_BIND": str(max(os.sched_getaffinity(0))),
    "OMP_NUM_THREADS": "1",
}

Tokens = list[int]


class Engine(CpuEngine):
    """vLLM in this process, with KvextConnector.

    Args:
        model: The folder of the model.
        num_tokens: The length of the longest prompt.
    """

    def __init__(self, model: str, num_tokens: int) -> None:
        super().__init__(
            model,
            kvext_config(host_memory_gib=3, chunk_tokens=CHUNK_TOKENS, store_policy="all"),
            dtype="bfloat16",
            block_size=BLOCK_TOKENS,
            max_model_len=MAX_MODEL_TOKENS,
            max_num_batched_tokens=STEP_TOKENS,
            num_gpu_blocks_override=8 * (num_tokens // BLOCK_TOKENS + 10),
        )
        self.side = self.scheduler.connector.scheduler_side

    def ask_s(self, prompt: Tokens) -> float:
        """The seconds to the first token if the device has nothing of the prompt."""
        self.forget_local()
        return self.ask(prompt).first_token_s

    def lose_chunks(self, numbers: Sequence[int]) -> None:
        """Remove chunks of rows from host memory."""
        self.side.tier.evict(lambda entry: entry.piece.first_tokens // CHUNK_TOKENS in numbers)

    def without_holes(self) -> AbstractContextManager[Any]:
        return mock.patch.object(self.side._loads, "_computes_holes", False)

    def without_loads(self) -> AbstractContextManager[Any]:
        return mock.patch.object(self.side._loads, "match", return_value=0)


def measure_holes(engine: Engine, prompt: Tokens, rounds: int) -> None:
    """Measure holes: one chunk in ten is missing, and the first missing chunk is an early one."""
    num_chunks = len(prompt) // CHUNK_TOKENS
    lost = range(2, num_chunks - 1, 10)
    seconds: dict[str, list[float]] = {"all": [], "behind the first hole": [], "holes": []}
    for _ in range(rounds):
        with engine.without_loads():
            seconds["all"].append(engine.ask_s(prompt))
        for name in ("behind the first hole", "holes"):
            engine.lose_chunks(lost)
            if name == "holes":
                seconds[name].append(engine.ask_s(prompt))
            else:
                with engine.without_holes():
                    seconds[name].append(engine.ask_s(prompt))
    hole_tokens = len(lost) * CHUNK_TOKENS
    print(f"\n{len(prompt):,} tokens, {len(lost)} holes with {hole_tokens:,} of them")
    medians = {name: statistics.median(values) for name, values in seconds.items()}
    for name, found in medians.items():
        print(f"  computed: {name:<22} {found:7.3f} s  {found / medians['holes']:6.1f} x")


def measure_rows(engine: Engine, prompt: Tokens, rounds: int) -> None:
    """Measure rows: the same number of chunks is missing in one place or in several places.

    The mean distance from the beginning is equal. The CPU time of the model's thread is measured;
    the copies are the same in both cases.
    """
    num_chunks = len(prompt) // CHUNK_TOKENS
    num_rows = STEP_TOKENS // CHUNK_TOKENS - 1  # All rows and the end fit into one step.
    numbers = range(-(num_rows // 2), num_rows - num_rows // 2)
    places = {name: [num_chunks // 2 + gap * n for n in numbers] for name, gap in GAPS.items()}
    seconds: dict[str, list[float]] = {name: [] for name in places}
    for _ in range(rounds):
        for name, lost in places.items():
            engine.lose_chunks(lost)
            began_s = time.thread_time()
            engine.ask_s(prompt)
            seconds[name].append(time.thread_time() - began_s)
    together_s, apart_s = (statistics.median(seconds[name]) for name in ("together", "apart"))
    row_s = (apart_s - together_s) / (num_rows - 1)
    token_s = together_s / (num_rows * CHUNK_TOKENS)
    print(
        f"\n{num_rows * CHUNK_TOKENS} tokens in one row {together_s:.3f} s, in {num_rows} rows "
        f"{apart_s:.3f} s: a row costs {row_s * 1e3:.2f} ms, as "
        f"much as {row_s / token_s:.0f} tokens"
    )


def main() -> None:
    options = parser(__doc__)
    options.add_argument("--tokens", type=int, default=6000)
    options.add_argument("--rounds", type=int)
    options.add_argument("--model", choices=MODELS, default="qwen3")
    arguments = options.parse_args()
    rounds = arguments.rounds or (1 if arguments.quick else 3)
    os.environ.update(ENVIRON | ONE_CPU)
    model = MODELS[arguments.model]
    prompt = random.Random(0).choices(range(VOCABULARY_TOKENS), k=arguments.tokens)
    print(f"{model.name}, load average {os.getloadavg()[0]:.1f}")
    with tempfile.TemporaryDirectory() as folder:
        model.write(Path(folder))
        engine = Engine(folder, arguments.tokens)
        engine.ask_s(prompt)  # The engine stores what it computes.
        engine.ask_s(prompt)
        measure_holes(engine, prompt, rounds)
        measure_rows(engine, prompt, 3 * rounds)


if __name__ == "__main__":
    main()
