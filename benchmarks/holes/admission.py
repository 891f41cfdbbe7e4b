# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vllm-ascend-kvext project
"""Measures the scheduler's lookup of a prompt in host memory, beside vLLM's own prefix lookup.

    python benchmarks/holes/admission.py [--quick] [--rounds R] [--tokens N ...] [--out FOLDER]

The benchmark times ``get_num_new_matched_tokens`` of the connector's scheduler side: the first call
for a prompt that host memory has as a whole, with a tenth of its chunks missing, and with every
other chunk missing. The time is compared with ``KVCacheManager.get_computed_blocks`` of stock vLLM
for a prompt that the device has as a whole. Rows named *idle* belong to an engine on which nothing
runs. While a request waits, vLLM asks again in every step. *Again* is the time of such a call.

All cases take turns in one process. Stock vLLM runs without the patches of this package. Times are
medians of the thread's CPU time; a ratio is the median of the ratios of all turns. The layout has
one group with full attention and blocks of 128 tokens, and chunks of 1,024 tokens. Nothing is
loaded, and no pages exist.
"""

from __future__ import annotations

import gc
import os
import random
import statistics
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[2]
if __name__ == "__main__":
    sys.path[0] = str(ROOT / "benchmarks")
    sys.path.insert(1, str(ROOT / "tests"))
    os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")

from common.report import Table, median_ratio, parser, verdict, write  # noqa: E402

MAX_RATIO = 1.3
LENGTHS_TOKENS = (32_768, 131_072)
QUICK_LENGTHS_TOKENS = (16_384,)
ROUNDS = 301
QUICK_ROUNDS = 21
WARM_UP_ROUNDS = 10
MAX_PLACES = 10
QUESTION_TOKENS = 20
VOCABULARY_TOKENS = 50_000
LAYOUT = "full"
HOST_BYTES = 1 << 45
"""The size of host memory, more than a prompt takes. It is only counted, and not allocated."""

STOCK = "stock: on the device as a whole"
WHOLE = "in host memory as a whole"
TENTH = "a tenth of the chunks missing"
EVERY_OTHER = "every other chunk missing"

Tokens = list[int]
Clock = Callable[[], float]


@dataclass(frozen=True)
class Result:
    """One row of the table, times in microseconds.

    Attributes:
        num_tokens: The tokens of the prompt, without the question.
        ratio: The ratio to stock's time, as the median of the turns.
        again_us: The time of a lookup while the request waits; None for stock, which has no such
            lookup.
    """

    num_tokens: int
    name: str
    num_holes: int
    match_us: float
    ratio: float
    again_us: float | None = None
    has_target: bool = True


def missing_chunks(num_chunks: int) -> Mapping[str, set[int]]:
    """The numbers of the chunks that host memory has lost, by case."""
    return {
        WHOLE: set(),
        TENTH: set(_spread(num_chunks, max(1, round(num_chunks / 10)))),
        EVERY_OTHER: set(range(1, num_chunks, 2)),
    }


def _spread(num_chunks: int, num_missing: int) -> Iterator[int]:
    """The missing chunks, spread over as many places as there are chunks, at most `MAX_PLACES`."""
    num_places = min(MAX_PLACES, num_missing)
    for place in range(num_places):
        first = (2 * place + 1) * num_chunks // (2 * num_places)
        size = num_missing // num_places + (place < num_missing % num_places)
        yield from range(first, first + size)


class StockLookup:
    """vLLM without the connector, after a prompt has been served.

    Args:
        prompt: The prompt that is looked up later, with a question behind it.
    """

    def __init__(self, prompt: Tokens) -> None:
        engine = _engine(len(prompt), None)
        _serve(engine, prompt)
        self._manager = engine.scheduler.kv_cache_manager
        self._request = _request("second", prompt + [1] * QUESTION_TOKENS)
        assert self._manager.get_computed_blocks(self._request)[1] == len(prompt)

    def time(self) -> float:
        """The seconds of a lookup."""
        began_s = time.thread_time()
        self._manager.get_computed_blocks(self._request)
        return time.thread_time() - began_s


class HostLookup:
    """vLLM with the connector, after a prompt has been served and some of its chunks were lost.

    Args:
        prompt: The prompt that is looked up later, with a question behind it.
        missing: The numbers of the lost chunks.
        is_idle: Whether nothing else runs.
    """

    def __init__(self, prompt: Tokens, missing: set[int], is_idle: bool = False) -> None:
        from retention.variants import installed

        with installed(None):
            engine = _engine(len(prompt), HOST_BYTES)
            _serve(engine, prompt)
        assert engine.side is not None
        self._side = engine.side
        tier = self._side.tier
        chunk_tokens = tier.geometry.chunk_tokens
        tier.evict(lambda entry: entry.piece.first_tokens // chunk_tokens in missing)
        loads = self._side._loads
        loads.cost = _measured_cost()
        loads._view = replace(loads._view, num_running=lambda: not is_idle)
        self._request = _request("second", prompt + [1] * QUESTION_TOKENS)
        engine.scheduler.requests["second"] = self._request
        self.num_holes = self._check(len(prompt), missing, chunk_tokens)

    def time(self) -> tuple[float, float]:
        """The seconds of the first lookup, and of a second lookup while the request waits."""
        began_s = time.thread_time()
        self._side.get_num_new_matched_tokens(self._request, 0)
        found_s = time.thread_time()
        self._side.get_num_new_matched_tokens(self._request, 0)
        ended_s = time.thread_time()
        self._side.request_finished(self._request, is_end_of_turn=False)
        return found_s - began_s, ended_s - found_s

    def _check(self, num_tokens: int, missing: set[int], chunk_tokens: int) -> int:
        """Check that exactly the stored chunks are found. Returns the number of holes."""
        num_found = self._side.get_num_new_matched_tokens(self._request, 0)
        state = self._side._states[self._request.request_id]
        assert state.admission.pinned is not None
        plan = state.admission.pinned.plan
        self._side.request_finished(self._request, is_end_of_turn=False)
        # A missing last chunk is no hole, because the request computes it as the end of the prompt.
        num_end_missing = 1 if num_tokens // chunk_tokens - 1 in missing else 0
        assert num_found == num_tokens - num_end_missing * chunk_tokens
        assert plan.hole_tokens == (len(missing) - num_end_missing) * chunk_tokens
        return len(plan.holes)


def _engine(num_tokens: int, host_bytes: int | None) -> Any:
    from host_tier.engine import Engine, host_memory
    from host_tier.pages import pages_of
    from retention.layouts import get_layout

    layout = get_layout(LAYOUT)
    num_blocks = 1 + layout.blocks_without_hits(num_tokens + layout.max_num_batched_tokens)
    host = None
    if host_bytes is not None:
        host = host_memory(pages_of(LAYOUT, num_blocks), host_bytes, "all", hole_reuse=True)
    return Engine(layout, num_blocks, host)


def _request(request_id: str, tokens: Tokens) -> Any:
    from retention.layouts import get_layout
    from vllm.sampling_params import SamplingParams
    from vllm.utils.hashing import sha256
    from vllm.v1.core.kv_cache_utils import get_request_block_hasher
    from vllm.v1.request import Request

    return Request(
        request_id=request_id,
        prompt_token_ids=tokens,
        sampling_params=SamplingParams(max_tokens=1, ignore_eos=True),
        pooling_params=None,
        block_hasher=get_request_block_hasher(get_layout(LAYOUT).hash_block_tokens, sha256),
    )


def _serve(engine: Any, prompt: Tokens) -> None:
    request = _request("first", prompt)
    engine.add(request)
    while engine.has_work:
        output = engine.schedule()
        is_last = request.num_computed_tokens >= len(prompt)
        sampled = {each: [1] if is_last else [] for each in output.num_scheduled_tokens}
        engine.finish_step(output, sampled)


def _measured_cost() -> Any:
    """The estimates of an engine that has measured, with loads much faster than computing."""
    from vllm_ascend_kvext.connector.scheduler.transfer_cost import TransferCost

    cost = TransferCost()
    cost.note_copies("load", 1 << 30, 0.05)
    cost.note_step(8192, 1.0)
    return cost


def measure(num_tokens: int, rounds: int) -> list[Result]:
    """Measure all cases of one length, in turns."""
    prompt = random.Random(num_tokens).choices(range(VOCABULARY_TOKENS), k=num_tokens)
    stock = StockLookup(prompt)
    lookups: dict[str, HostLookup] = {}
    for name, missing in missing_chunks(num_tokens // 1024).items():
        lookups[name] = HostLookup(prompt, missing)
        lookups[f"{name}, idle"] = HostLookup(prompt, missing, is_idle=True)
    times_s = _time_in_turns(stock, lookups, rounds)
    stock_s = statistics.median(times_s[STOCK][0])
    results = [Result(num_tokens, STOCK, 0, 1e6 * stock_s, 1.0, has_target=False)]
    for name, lookup in lookups.items():
        match_s, again_s = map(statistics.median, times_s[name])
        ratio = median_ratio(times_s[name][0], times_s[STOCK][0])
        has_target = not name.endswith("idle")
        times_us = 1e6 * match_s, ratio, 1e6 * again_s
        results.append(Result(num_tokens, name, lookup.num_holes, *times_us, has_target))
    return results


def _time_in_turns(
    stock: StockLookup, lookups: Mapping[str, HostLookup], rounds: int
) -> dict[str, tuple[list[float], list[float]]]:
    """The seconds of first and of later calls, by case."""
    times_s: dict[str, tuple[list[float], list[float]]] = {
        name: ([], []) for name in (STOCK, *lookups)
    }
    gc.collect()
    gc.disable()
    try:
        for number in range(WARM_UP_ROUNDS + rounds):
            if number == WARM_UP_ROUNDS:
                for first, later in times_s.values():
                    first.clear()
                    later.clear()
            times_s[STOCK][0].append(stock.time())
            for name, lookup in lookups.items():
                match_s, again_s = lookup.time()
                times_s[name][0].append(match_s)
                times_s[name][1].append(again_s)
    finally:
        gc.enable()
    return times_s


TABLE = Table("tokens:>8", "prompt:<40", "holes:>5", "µs:>8", "ratio:>6", "again, µs:>9")


def line(result: Result) -> str:
    again = None if result.again_us is None else f"{result.again_us:.0f}"
    numbers = (result.num_holes, f"{result.match_us:.0f}", f"{result.ratio:.2f}", again)
    return TABLE.line(f"{result.num_tokens:,}", result.name, *numbers)


def verdicts(results: Sequence[Result]) -> Iterator[str]:
    """Whether each row that has a target meets it."""
    yield f"Target: at most {MAX_RATIO} times stock's lookup."
    for result in results:
        if result.has_target:
            text = f"{result.ratio:.2f}  {result.num_tokens:,} tokens, {result.name}"
            yield verdict(result.ratio <= MAX_RATIO, text)


def main(arguments: Sequence[str] | None = None) -> None:
    from vllm.utils.hashing import sha256
    from vllm.v1.core.kv_cache_utils import init_none_hash

    options = parser(__doc__, "bench-holes")
    options.add_argument("--rounds", type=int)
    options.add_argument("--tokens", type=int, nargs="+", help="lengths of prompts")
    found = options.parse_args(arguments)
    rounds = found.rounds or (QUICK_ROUNDS if found.quick else ROUNDS)
    init_none_hash(sha256)
    print(TABLE.head, flush=True)
    results: list[Result] = []
    for num_tokens in found.tokens or (QUICK_LENGTHS_TOKENS if found.quick else LENGTHS_TOKENS):
        rows = measure(num_tokens, rounds)
        print(*map(line, rows), sep="\n", flush=True)
        results += rows
    ends = list(verdicts(results))
    print(*ends, sep="\n")
    write(found.out, [TABLE.head, *map(line, results), *ends], results, "admission")


if __name__ == "__main__":
    main()
