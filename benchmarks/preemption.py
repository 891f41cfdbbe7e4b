# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vllm-ascend-kvext project
"""Measures the cost of preempted requests on the real engine (CPU): KV swapped, or computed again.

    python benchmarks/preemption.py [--quick]

The answers of some requests outgrow the pool, so vLLM preempts the latest requests. The benchmark
prints the computed tokens and the seconds to the last answer, also as ratios to vLLM alone. The
ways of serving take turns, each in a new engine. The shortest of several times is printed.
"""

from __future__ import annotations

import gc
import os
import random
import sys
import tempfile
import time
from pathlib import Path
from typing import NamedTuple

sys.path[0] = str(Path(__file__).parent)

from common.cpu_engine import ENVIRON, CpuEngine, kvext_config  # noqa: E402
from common.models import VOCABULARY_TOKENS, write_gemma3, write_qwen3  # noqa: E402
from common.report import Table, parser  # noqa: E402

MODELS = {"qwen3 (full attention)": write_qwen3, "gemma3 (windows)": write_gemma3}
STOCK = "vLLM alone"
RECOMPUTED = "computed again"
WAYS = (STOCK, RECOMPUTED, "swapped")
BLOCK_TOKENS = 32
NUM_REQUESTS = 6
PROMPT_TOKENS = 512
ANSWER_TOKENS = 96
STEP_TOKENS = 512
POOL_REQUESTS = 4
"""The number of requests for which the pool has room."""


class Ran(NamedTuple):
    """One run.

    Attributes:
        num_swapped: The number of preempted requests whose KV went to host memory.
    """

    seconds: float
    computed_tokens: int
    num_swapped: int


def serve(folder: str, way: str) -> Ran:
    """Serve all requests in a new engine."""
    blocks_of_request = -(-(PROMPT_TOKENS + ANSWER_TOKENS) // BLOCK_TOKENS)
    engine = CpuEngine(
        folder,
        None if way == STOCK else kvext_config(host_memory_gib=1),
        dtype="bfloat16",
        block_size=BLOCK_TOKENS,
        max_model_len=PROMPT_TOKENS + ANSWER_TOKENS,
        max_num_batched_tokens=STEP_TOKENS,
        max_num_seqs=NUM_REQUESTS,
        num_gpu_blocks_override=POOL_REQUESTS * blocks_of_request + 1,
    )
    side = None if way == STOCK else engine.scheduler.connector.scheduler_side
    if way == RECOMPUTED:
        side._cost.pays_out_and_back = lambda num_bytes, num_tokens: False
    rng = random.Random(0)
    began_s = time.perf_counter()
    for _ in range(NUM_REQUESTS):
        engine.add(rng.choices(range(VOCABULARY_TOKENS), k=PROMPT_TOKENS), ANSWER_TOKENS)
    num_running = NUM_REQUESTS
    while num_running:
        num_running -= sum(output.finished for output in engine.step())
    seconds = time.perf_counter() - began_s
    num_swapped = 0 if side is None else side.counters.swapped_requests
    ran = Ran(seconds, engine.computed_tokens, num_swapped)
    engine.close()
    del engine, side
    gc.collect()
    return ran


TABLE = Table("model:<24", "way:<16", "tokens:>8", "ratio:>6", "s:>6", "ratio:>6", "swapped:>8")


def main() -> None:
    repeats = 1 if parser(__doc__).parse_args().quick else 3
    print(TABLE.head)
    for name, write_model in MODELS.items():
        with tempfile.TemporaryDirectory() as folder:
            write_model(Path(folder))
            runs = [{way: serve(folder, way) for way in WAYS} for _ in range(repeats)]
        best = {way: min(run[way] for run in runs) for way in WAYS}
        stock = best[STOCK]
        for way, (seconds, computed_tokens, num_swapped) in best.items():
            times = f"{seconds:.1f}", f"{seconds / stock.seconds:.2f}"
            tokens = computed_tokens, f"{computed_tokens / stock.computed_tokens:.2f}"
            print(TABLE.line(name, way, *tokens, *times, num_swapped), flush=True)


if __name__ == "__main__":
    os.environ.update({name: os.environ.get(name, value) for name, value in ENVIRON.items()})
    main()
