# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vllm-ascend-kvext project
"""Measures the scheduler's prefix-cache functions beside upstream's, in one run.

    python benchmarks/prefix_cache_path.py [--quick] [--layout NAME] [--tokens N]
        [--operation NAME] [--out FOLDER]

vLLM's real ``KVCacheManager`` does every operation in four variants: unchanged, with the fast
prefix cache, with retention at an interval, and with adaptive retention.
If ``KVEXT_ASCEND_SOURCES`` names a folder with the unpacked vllm-ascend, its block manager is used.

The variants take turns, and the patches are installed and taken back at every turn. So other work
of the machine affects all of them. Times are medians of the thread's CPU time. Every turn begins
with an empty prefix cache and with hashed requests; the hashing of prompts is not measured. At the
end, the benchmark lists the operations that are slower than upstream's or below their targets.
"""

from __future__ import annotations

import gc
import os
import platform
import random
import statistics
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path

os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")
sys.path.insert(0, str(Path(__file__).parents[1] / "tests"))
sys.path.insert(0, str(Path(__file__).parents[1] / "tests" / "ascend"))

if os.environ.get("KVEXT_ASCEND_SOURCES"):
    import ascend_sources

    ascend_sources.activate(ascend_sources.sources())


import vllm
from common.report import Table, parser, write
from common.turns import whose_methods_stay
from retention.layouts import BenchLayout, get_layout
from support.scheduler.block_manager import INTERVAL_VARIABLE
from support.scheduler.layouts import Attention
from support.scheduler.releases import look_up
from vllm.sampling_params import SamplingParams
from vllm.utils.hashing import sha256
from vllm.v1.core.kv_cache_manager import KVCacheManager
from vllm.v1.core.kv_cache_utils import get_request_block_hasher, init_none_hash
from vllm.v1.core.single_type_kv_cache_manager import register_all_kvcache_specs
from vllm.v1.request import Request, RequestStatus

from vllm_ascend_kvext.activation import survey, wanted_features
from vllm_ascend_kvext.patching.install import BOOK
from vllm_ascend_kvext.patching.plan import FeaturePlan
from vllm_ascend_kvext.settings import (
    FAST_PREFIX_CACHE_VARIABLE,
    RETENTION_VARIABLE,
    Mode,
    Settings,
)

CHUNK_TOKENS = 8192
NEW_TOKENS = 2048
DECODE_STEPS = 768

LAYOUTS = ("dsv4-ascend128",) if "ascend_sources" in sys.modules else ("gptoss", "gemma", "dsv4")

STOCK = "stock"
FAST = "fast"
RETAINING = "retaining"
ADAPTIVE = "adaptive"
ENVIRONMENTS: dict[str, dict[str, str]] = {
    FAST: {FAST_PREFIX_CACHE_VARIABLE: "1"},
    RETAINING: {INTERVAL_VARIABLE: "0"},
    ADAPTIVE: {RETENTION_VARIABLE: "adaptive"},
}
"""The environment variables of each variant. The package decides which features they bring."""

TARGETS = {"full hit": 3, "window lost": 6, "whole prefill": 3, "free": 10, "decode step": 3}
"""The target speed of each operation, as a factor of upstream's speed at 128k tokens."""


@contextmanager
def entered(variant: str, plans: dict[str, FeaturePlan]) -> Iterator[None]:
    """Install a variant in this process, inside the block."""
    names: list[str] = []
    if variant != STOCK:
        wanted = wanted_features(Settings.from_environ(ENVIRONMENTS[variant]))
        names = [name for name in wanted if plans[name].fits]
    for name in names:
        BOOK.apply(plans[name])
    try:
        yield
    finally:
        for name in reversed(names):
            BOOK.revert(name)


def elapsed_us(operation: Callable[[], object]) -> float:
    start_ns = time.thread_time_ns()
    operation()
    return (time.thread_time_ns() - start_ns) / 1000


class Bench:
    """One block manager under one variant, and hashed prompts."""

    def __init__(
        self, layout: BenchLayout, num_tokens: int, interval: int | None, is_adaptive: bool
    ) -> None:
        num_blocks = 64 + sum(
            (2 if group.attention in (Attention.FULL, Attention.MLA) else 1)
            * (num_tokens + 2 * CHUNK_TOKENS)
            // group.block_tokens
            for group in layout.groups
        )
        os.environ.pop(INTERVAL_VARIABLE, None)
        if interval is not None:
            os.environ[INTERVAL_VARIABLE] = str(interval)
        if is_adaptive:
            os.environ[RETENTION_VARIABLE] = "adaptive"
        try:
            self.manager = KVCacheManager(
                layout.to_config(num_blocks),
                max_model_len=1 << 21,
                scheduler_block_size=layout.scheduler_block_tokens,
                hash_block_size=layout.hash_block_tokens,
                enable_caching=True,
            )
        finally:
            os.environ.pop(INTERVAL_VARIABLE, None)
            os.environ.pop(RETENTION_VARIABLE, None)
        self._running: list[Request] = []
        self.windows = {i for i, group in enumerate(layout.groups) if group.has_window}

    def prefill(self, request: Request, **arguments: object) -> None:
        allocate = self.manager.allocate_slots
        num_prompt_tokens = request.num_prompt_tokens
        while request.num_computed_tokens < num_prompt_tokens:
            num_tokens = min(CHUNK_TOKENS, num_prompt_tokens - request.num_computed_tokens)
            assert allocate(request, num_tokens, num_lookahead_tokens=0) is not None
            request.num_computed_tokens += num_tokens

    def finish(self, request: Request) -> None:
        request.status = RequestStatus.FINISHED_LENGTH_CAPPED
        self.manager.free(request)

    def reset(self) -> None:
        """Remove all requests and cached blocks."""
        for request in self._running:
            self.finish(request)
        self._running.clear()
        assert self.manager.reset_prefix_cache()

    def run(self, request: Request) -> Request:
        """Register a running request, which `reset` will finish."""
        self._running.append(request)
        return request

    def lose_windows(self) -> None:
        pool = self.manager.block_pool
        self.manager.evict_blocks(
            {
                block.block_id
                for block in pool.blocks
                if block.block_hash and int.from_bytes(block.block_hash[-4:], "big") in self.windows
            }
        )


class Prompts:
    """Requests with the same few prompts, each hashed once."""

    def __init__(self, layout: BenchLayout, num_tokens: int) -> None:
        rng = random.Random(1)
        self._hasher = get_request_block_hasher(layout.hash_block_tokens, sha256)
        self._number = 0
        tokens = [rng.randrange(100_000) for _ in range(num_tokens)]
        other = [rng.randrange(100_000) for _ in range(num_tokens)]
        self._prompts = {
            "prompt": tokens,
            "half": tokens[: num_tokens // 2] + other[num_tokens // 2 :],
            "other": other,
            "next": tokens + other[:NEW_TOKENS],
        }
        self._hashes = {
            name: Request(
                "", tokens, SamplingParams(), None, block_hasher=self._hasher
            ).block_hashes
            for name, tokens in self._prompts.items()
        }

    def request(self, name: str, num_output_tokens: int = 0) -> Request:
        self._number += 1
        sampling = SamplingParams(max_tokens=1 << 20)
        request = Request(f"request-{self._number}", self._prompts[name], sampling, None)
        request.block_hashes = list(self._hashes[name])
        if num_output_tokens:
            request._block_hasher = self._hasher
            request.append_output_token_ids([7] * num_output_tokens)
        return request


def lookup(name: str, lose_windows: bool = False) -> Callable[[Bench, Prompts], float]:
    def measure(bench: Bench, prompts: Prompts) -> float:
        request = prompts.request("prompt")
        bench.prefill(request)
        bench.finish(request)
        if lose_windows:
            bench.lose_windows()
        requests = [prompts.request(name) for _ in range(3)]
        find = bench.manager.get_computed_blocks
        return min(elapsed_us(lambda request=request: find(request)) for request in requests)

    return measure


def cache_first_chunk(bench: Bench, prompts: Prompts) -> float:
    request = bench.run(prompts.request("prompt"))
    bench.manager.allocate_slots(request, CHUNK_TOKENS, delay_cache_blocks=True)
    cache = bench.manager.coordinator.cache_blocks
    return elapsed_us(lambda: cache(request, CHUNK_TOKENS))


def whole_prefill(bench: Bench, prompts: Prompts) -> float:
    request = bench.run(prompts.request("prompt"))
    return elapsed_us(lambda: bench.prefill(request))


def free(bench: Bench, prompts: Prompts) -> float:
    request = prompts.request("prompt")
    bench.prefill(request)
    request.status = RequestStatus.FINISHED_LENGTH_CAPPED
    return elapsed_us(lambda: bench.manager.free(request))


def decode_step(bench: Bench, prompts: Prompts, is_async: bool = False) -> float:
    """Time decode steps. An asynchronous scheduler caches the tokens of a step again at its end."""
    request = bench.run(prompts.request("prompt", DECODE_STEPS))
    bench.prefill(request)

    def decode() -> None:
        allocate = bench.manager.allocate_slots
        cache = bench.manager.cache_blocks
        for _ in range(DECODE_STEPS):
            allocate(request, 1, num_lookahead_tokens=0)
            request.num_computed_tokens += 1
            if is_async:
                cache(request, request.num_computed_tokens)

    return elapsed_us(decode) / DECODE_STEPS


def admit_full_hit(bench: Bench, prompts: Prompts) -> float:
    request = prompts.request("prompt")
    bench.prefill(request)
    bench.finish(request)
    request = bench.run(prompts.request("next"))
    blocks, hit_tokens = look_up(bench.manager, request)
    num_tokens = request.num_tokens - hit_tokens
    allocate = bench.manager.allocate_slots
    return elapsed_us(
        lambda: allocate(request, num_tokens, hit_tokens, blocks, num_lookahead_tokens=0)
    )


OPERATIONS: tuple[tuple[str, Callable[[Bench, Prompts], float], tuple[int | None, ...]], ...] = (
    ("full miss", lookup("other"), (None,)),
    ("full hit", lookup("prompt"), (None, 0)),
    ("half hit", lookup("half"), (None, 0)),
    ("window lost", lookup("prompt", lose_windows=True), (None,)),
    ("admit full hit", admit_full_hit, (None,)),
    ("cache first chunk", cache_first_chunk, (None, 0, 16384)),
    ("whole prefill", whole_prefill, (None, 0)),
    ("free", free, (None, 0)),
    ("decode step", decode_step, (None, 0)),
    ("async decode step", partial(decode_step, is_async=True), (None, 0)),
)


@dataclass(frozen=True, slots=True)
class Result:
    """One operation: microseconds of CPU by variant. Variants that were not measured are absent."""

    layout: str
    num_tokens: int
    operation: str
    interval: int | None
    us: dict[str, float]

    def ratio(self, variant: str) -> float | None:
        return self.us[STOCK] / self.us[variant] if variant in self.us else None

    @property
    def target(self) -> float | None:
        if self.operation == "cache first chunk" and self.interval == 0 and "dsv4" in self.layout:
            return 50
        return TARGETS.get(self.operation)


def measure(
    layout: BenchLayout,
    num_tokens: int,
    num_turns: int,
    plans: dict[str, FeaturePlan],
    names: list[str] | None = None,
) -> Iterator[Result]:
    """Measure every operation in every variant.

    Args:
        names: The operations to measure; None for all.
    """
    prompts = Prompts(layout, num_tokens)
    for name, operation, intervals in OPERATIONS:
        if names is not None and name not in names:
            continue
        for interval in intervals:
            variants = [STOCK, FAST, ADAPTIVE if interval is None else RETAINING]
            times: dict[str, list[float]] = {variant: [] for variant in variants}
            benches: dict[str, Bench] = {}
            for variant in variants:
                with entered(variant, plans):
                    benches[variant] = Bench(layout, num_tokens, interval, variant == ADAPTIVE)
            gc.collect()
            gc.disable()
            for turn in range(num_turns + 1):
                for variant in variants:
                    with entered(variant, plans):
                        time_us = operation(benches[variant], prompts)
                        if turn:  # The first turn warms up.
                            times[variant].append(time_us)
                        benches[variant].reset()
            gc.enable()
            medians = {variant: statistics.median(times[variant]) for variant in variants}
            yield Result(layout.name, num_tokens, name, interval, medians)


TABLE = Table(
    "layout:<14",
    "tokens:>9",
    "operation:<18",
    "interval:>8",
    "stock us:>10",
    *(f"{name}:>{width}" for each in ENVIRONMENTS for name, width in ((each, 10), ("speed", 8))),
)


def line(result: Result) -> str:
    cells = [result.layout, f"{result.num_tokens:,}", result.operation, result.interval]
    cells.append(f"{result.us[STOCK]:.1f}")
    for variant in ENVIRONMENTS:
        ratio = result.ratio(variant)
        cells += [None, None] if ratio is None else [f"{result.us[variant]:.1f}", f"{ratio:.2f}x"]
    return TABLE.line(*cells)


def ends(results: list[Result]) -> Iterator[str]:
    """The lines about operations that are slower than upstream's, or below their targets."""
    slower = [(r, v) for r in results for v in ENVIRONMENTS if (r.ratio(v) or 1) < 1]
    yield "\nSlower than upstream:" if slower else "\nNothing is slower than upstream."
    for result, variant in slower:
        where = f"{result.layout}, {result.num_tokens} tokens, interval {result.interval}"
        yield f"  {result.operation} ({variant}; {where}): {result.ratio(variant):.2f}"
    at_128k = [r for r in results if r.num_tokens == 131072 and r.target]
    missed = [r for r in at_128k if (r.ratio(FAST) or 0) < r.target]
    yield "Below target at 128k:" if missed else "All targets at 128k are met."
    for result in missed:
        where = f"{result.layout}, interval {result.interval}"
        yield f"  {result.operation} ({where}): {result.ratio(FAST):.1f} of {result.target}"


def main() -> int:
    options = parser(__doc__, "bench-prefix-cache-path")
    options.add_argument("--layout", action="append", choices=LAYOUTS)
    options.add_argument("--tokens", type=int, action="append", help="only prompts of this length")
    options.add_argument("--operation", action="append", choices=[name for name, *_ in OPERATIONS])
    arguments = options.parse_args()
    init_none_hash(sha256)
    register_all_kvcache_specs(None)
    stays = whose_methods_stay(survey(Settings(mode=Mode.STRICT)).plans)
    plans = {plan.feature: plan for plan in stays}
    turns = {8192: 9, 131072: 5} if arguments.quick else {8192: 15, 32768: 9, 131072: 7, 1 << 20: 3}
    lines = [f"vLLM {vllm.__version__}, Python {platform.python_version()}", TABLE.head]
    print(*lines, sep="\n", flush=True)
    results: list[Result] = []
    for name in arguments.layout or LAYOUTS:
        for num_tokens, num_turns in turns.items():
            if num_tokens not in (arguments.tokens or turns):
                continue
            layout = get_layout(name)
            for result in measure(layout, num_tokens, num_turns, plans, arguments.operation):
                results.append(result)
                lines.append(line(result))
                print(lines[-1], flush=True)
    last = list(ends(results))
    print(*last, sep="\n")
    write(arguments.out, [*lines, *last], results)
    is_slower = any((r.ratio(v) or 1) < 1 for r in results for v in ENVIRONMENTS)
    return 1 if is_slower else 0


if __name__ == "__main__":
    sys.exit(main())
