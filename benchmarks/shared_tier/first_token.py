# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vllm-ascend-kvext project
"""Measures the time to the first token after a restart, with the shared tier and without.

    python benchmarks/shared_tier/first_token.py [--quick] [--prompts N] [--tokens N] [--disk F]

One process computes prompts and ends. A second process on the same folder gets one of these prompts
and a new prompt in turn. Then it gets the stored prompt again, which is in host memory by then. In
a third process, the page cache has nothing of the files. The model is SmolLM2-135M on one CPU.
vLLM's own tiers are not measured, because their copies between device and host memory refuse a
CPU's tensors.
"""

from __future__ import annotations

import os
import random
import statistics
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

sys.path[0] = str(Path(__file__).parents[1])

from blending import smollm2  # noqa: E402
from common.cpu_engine import ENVIRON, CpuEngine, kvext_config  # noqa: E402
from common.processes import processes  # noqa: E402
from common.report import median_ratio, parser, write  # noqa: E402

from shared_tier.transfers import forget  # noqa: E402

VOCABULARY_TOKENS = 49_152
ONE_CPU = {
    "VLLM_CPU_OMP_THREADS_BIND": str(max(os.sched_getaffinity(0))),
    "OMP_NUM_THREADS": "1",
    "PYTHONHASHSEED": "0",
    "VLLM_CPU_KVCACHE_SPACE": "2",
}


@dataclass(frozen=True, slots=True)
class Times:
    """The seconds to the first token of each prompt; the hits and bytes of one stored prompt."""

    process: str
    start_s: float
    cold_s: list[float]
    shared_s: list[float]
    host_s: list[float]
    hit_tokens: int
    got_bytes: int


def prompt_of(name: object, num_tokens: int) -> list[int]:
    return random.Random(str(name)).choices(range(100, VOCABULARY_TOKENS), k=num_tokens)


class Engine:
    """vLLM on one CPU in this process, with a shared tier in a folder."""

    def __init__(self, model: str, folder: str, num_tokens: int) -> None:
        began_s = time.perf_counter()
        self._engine = CpuEngine(
            model,
            kvext_config(host_memory_gib=3, store_policy="all", shared_tier=f"file://{folder}"),
            dtype="bfloat16",
            max_model_len=num_tokens + 64,
            max_num_batched_tokens=num_tokens + 64,
        )
        self.start_s = time.perf_counter() - began_s
        self._side: Any = self._engine.scheduler.connector.scheduler_side
        self._num_tokens = num_tokens
        self.ask("warm-up")

    def ask(self, name: object) -> tuple[float, int]:
        """The seconds to the first token, and the hit tokens, if the device has nothing."""
        self._engine.forget_local()
        asked = self._engine.ask(prompt_of(name, self._num_tokens))
        while self._side.secondary._jobs.num_under_way or self._engine.scheduler.has_requests():
            self._engine.step()
        return asked.first_token_s, asked.hit_tokens

    def got_bytes(self) -> int:
        return int(self._side.counters.transfer_bytes["get"])


def store(model: str, folder: str, num_tokens: int, num_prompts: int) -> float:
    engine = Engine(model, folder, num_tokens)
    for number in range(num_prompts):
        engine.ask(number)
    return engine.start_s


def compare(model: str, folder: str, num_tokens: int, num_prompts: int, name: str) -> Times:
    engine = Engine(model, folder, num_tokens)
    found = Times(name, engine.start_s, [], [], [], num_tokens, 0)
    hits = set[int]()
    before_bytes = engine.got_bytes()
    for number in range(num_prompts):
        for seconds, prompt in (
            (found.cold_s, f"{name} {number}"),
            (found.shared_s, number),
            (found.host_s, number),
        ):
            first_token_s, hit_tokens = engine.ask(prompt)
            seconds.append(first_token_s)
            if prompt == number:
                hits.add(hit_tokens)
            elif hit_tokens:
                raise RuntimeError(f"a new prompt has hit {hit_tokens} tokens")
    (hit_tokens,) = hits  # All stored prompts hit the same number of tokens.
    if not hit_tokens:
        raise RuntimeError("a stored prompt has hit nothing")
    num_bytes = (engine.got_bytes() - before_bytes) // num_prompts
    seconds = (found.cold_s, found.shared_s, found.host_s)
    return Times(name, found.start_s, *seconds, hit_tokens, num_bytes)


def main() -> None:
    options = parser(__doc__, "bench-shared-tier")
    options.add_argument("--prompts", type=int)
    options.add_argument("--tokens", type=int, default=4100)
    options.add_argument("--disk", type=Path, default=Path(tempfile.gettempdir()))
    arguments = options.parse_args()
    number = arguments.prompts or (2 if arguments.quick else 7)
    model = str(smollm2.build())
    environ = ENVIRON | ONE_CPU
    rows: list[Times] = []
    lines: list[str] = []
    with tempfile.TemporaryDirectory(dir=arguments.disk) as folder:
        call = (model, folder, arguments.tokens, number)
        with processes(1, environ) as process:
            process.submit(store, *call).result()
        for name in ("page cache warm", "page cache cold"):
            if "cold" in name:
                forget(Path(folder))
            with processes(1, environ) as process:
                found = process.submit(compare, *call, name).result()
            rows.append(found)
            cold, shared, host = map(
                statistics.median, (found.cold_s, found.shared_s, found.host_s)
            )
            lines.append(
                f"{name}: {found.hit_tokens} of {arguments.tokens} tokens, "
                f"{found.got_bytes / 1e6:.0f} MB: computed {cold:.3f} s, shared tier {shared:.3f} "
                f"s ({median_ratio(found.cold_s, found.shared_s):.1f} x as fast), host memory "
                f"{host:.3f} s; longest from the shared tier {max(found.shared_s):.3f} s"
            )
            print(lines[-1], flush=True)
    write(arguments.out, lines, rows, "first_token")


if __name__ == "__main__":
    main()
