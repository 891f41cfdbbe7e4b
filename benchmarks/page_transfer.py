# SPDX-License-Identifier: Apache-2.0
"""The transfer op beside plain copies, torch and LMCache: GB/s and ratios of one run.

    python benchmarks/page_transfer.py [--quick] [--json FILE] [--lmcache FOLDER]

Every round moves a chunk by every method in turn, each time from pages and to host memory that no
cache holds. One thread is timed by its CPU time, two by the clock. A ratio is the median over the
rounds of (method / memcpy of the same bytes in the same round); the limit is a streaming copy,
which writes past the caches. GB/s counts bytes read and written.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import sys
import time
from dataclasses import asdict, dataclass
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))

import torch
from transfer.geometry import LAYOUTS, ColdMemory, Job, Layout
from transfer.lmcache import lmcache_methods
from transfer.methods import Method, PageTransfer, PlainCopy, TorchPerPlane

from vllm_ascend_kvext.native import native
from vllm_ascend_kvext.transfer.oracle import oracle_transfer
from vllm_ascend_kvext.transfer.schema import Direction

# Chunks of every layout move about as many bytes per method.
BYTES_PER_METHOD = 1 << 30
SMALL_CHUNK_BYTES = 3_000_000
MEMCPY = "memcpy"
LIMIT = "streaming copy, the limit"
OURS = "page_transfer"
OURS_ALONE = "page_transfer, never more than one thread"


@dataclass(frozen=True, slots=True)
class Result:
    """One row of the table; times in milliseconds per chunk."""

    layout: str
    chunk_mb: float
    pages: str
    direction: str
    num_threads: int
    method: str
    time_ms: float
    gb_per_s: float
    memcpy_ratio: float
    limit_ratio: float


def gather_limit(chunk_bytes: int) -> float:
    return 1.3 if chunk_bytes < SMALL_CHUNK_BYTES else 1.2


def check(memory: ColdMemory, methods: list[Method]) -> None:
    """Refuse to time what does not move the right bytes.

    Raises:
        SystemExit: A method's bytes differ from the oracle's.
    """
    for method in methods:
        store = Job.next(memory, Direction.PAGES_TO_HOST, True, 1)
        load = Job(**{**_fields(store), "direction": Direction.HOST_TO_PAGES})
        expected = torch.zeros_like(store.host)
        tables = memory.plane_table, store.runs
        oracle_transfer(memory.tensors, expected, *tables, Direction.PAGES_TO_HOST)
        store.host.zero_()
        method.prepare(store)()
        if method.is_plane_major and not torch.equal(store.host, expected):
            raise SystemExit(f"{method.name}: its host bytes are not the oracle's")
        for index, tensor in enumerate(memory.tensors):
            tensor.view(-1, memory.layout.planes[index].page_bytes)[store.pages] = 0
        method.prepare(load)()
        loaded = torch.zeros_like(expected)
        oracle_transfer(memory.tensors, loaded, *tables, Direction.PAGES_TO_HOST)
        if not torch.equal(loaded, expected):
            raise SystemExit(f"{method.name}: what it stored and loaded is not what was there")


def _fields(job: Job) -> dict[str, object]:
    return {name: getattr(job, name) for name in Job.__slots__}


def measure(
    memory: ColdMemory, methods: list[Method], is_random: bool, num_threads: int, rounds: int
) -> list[Result]:
    """Time every method in every round, both ways."""
    clock_ns = time.thread_time_ns if num_threads == 1 else time.perf_counter_ns
    torch.set_num_threads(num_threads)
    layout = memory.layout
    results = []
    for direction in Direction:
        times_ns: dict[str, list[int]] = {method.name: [] for method in methods}
        for _ in range(rounds):
            for method in methods:
                copy = method.prepare(Job.next(memory, direction, is_random, num_threads))
                started_ns = clock_ns()
                copy()
                times_ns[method.name].append(clock_ns() - started_ns)
        for name, spent_ns in times_ns.items():
            median_ns = statistics.median(spent_ns)
            results.append(
                Result(
                    layout=layout.name,
                    chunk_mb=layout.chunk_bytes / 1e6,
                    pages="random" if is_random else "sequential",
                    direction="gather" if direction == Direction.PAGES_TO_HOST else "scatter",
                    num_threads=num_threads,
                    method=name,
                    time_ms=median_ns / 1e6,
                    gb_per_s=2 * layout.chunk_bytes / median_ns,
                    memcpy_ratio=_ratio(spent_ns, times_ns[MEMCPY]),
                    limit_ratio=_ratio(spent_ns, times_ns[LIMIT]),
                )
            )
    return results


def _ratio(spent_ns: list[int], other_ns: list[int]) -> float:
    return statistics.median(one / other for one, other in zip(spent_ns, other_ns, strict=True))


def print_table(results: list[Result], layout: Layout) -> None:
    planes = len(layout.planes)
    print(f"\n{layout.name}: {layout.chunk_bytes / 1e6:.2f} MB per chunk, {planes} planes")
    columns = [
        (pages, direction, threads)
        for threads in (1, 2)
        for direction in ("gather", "scatter")
        for pages in ("random", "sequential")
    ]
    found = {(r.pages, r.direction, r.num_threads, r.method): r for r in results}
    print(f"{'GB/s, time / memcpy':42}", end="")
    print("".join(f"{d + ' ' + str(t) + 'T ' + p[:4]:>17}" for p, d, t in columns))
    for method in dict.fromkeys(result.method for result in results):
        cells = [found[(*column, method)] for column in columns]
        print(
            f"{method:42}"
            + "".join(f"{cell.gb_per_s:9.1f} {cell.memcpy_ratio:6.2f}x" for cell in cells)
        )


def print_targets(results: list[Result]) -> None:
    """What the project promises for one thread, and what was measured."""
    print("\nTargets (random pages)")
    for layout in LAYOUTS:
        for direction in ("gather", "scatter"):
            found = {
                (r.num_threads, r.method): r
                for r in results
                if (r.layout, r.direction, r.pages) == (layout.name, direction, "random")
            }
            ours = found[1, OURS]
            limit = gather_limit(layout.chunk_bytes) if direction == "gather" else 1.1
            said = [
                f"{ours.memcpy_ratio:.2f} x memcpy (at most {limit})",
                f"{ours.limit_ratio:.2f} x the limit",
            ]
            for (threads, method), other in found.items():
                if threads == 1 and method.startswith(("torch", "LMCache")):
                    said.append(f"{other.time_ms / ours.time_ms:.1f} x faster than {method}")
            gain = found[2, OURS_ALONE].time_ms / found[2, OURS].time_ms
            said.append(f"2 threads: {gain:.2f} x one, by the clock")
            print(f"  {layout.name}, {direction}: {'; '.join(said)}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--quick", action="store_true", help="a tenth of the rounds")
    parser.add_argument("--json", type=Path, help="also write the rows to this file")
    parser.add_argument("--lmcache", type=Path, help="folder that holds the package lmcache")
    options = parser.parse_args()
    peers, words = lmcache_methods(options.lmcache)
    kernel = native().describe()["kernel"]
    print(f"kernel {kernel}; {words}; load average {os.getloadavg()[0]:.1f}")
    results = []
    for layout in LAYOUTS:
        memory = ColdMemory(layout)
        methods: list[Method] = [
            PlainCopy(MEMCPY, is_streaming=False),
            PlainCopy(LIMIT, is_streaming=True),
            PageTransfer(OURS),
            PageTransfer(OURS_ALONE, is_single=True),
            PageTransfer("page_transfer, one call per plane", is_bundled=False),
            TorchPerPlane(),
            *(peer for peer in peers if peer.serves(layout)),
        ]
        check(memory, methods[2:])
        rounds = BYTES_PER_METHOD // layout.chunk_bytes // (10 if options.quick else 1)
        rounds = max(5, min(rounds, 200))
        of_layout = []
        for num_threads in (1, 2):
            for is_random in (True, False):
                of_layout += measure(memory, methods, is_random, num_threads, rounds)
        print_table(of_layout, layout)
        results += of_layout
        del memory
    print_targets(results)
    if options.json:
        options.json.write_text(json.dumps([asdict(result) for result in results], indent=1))


if __name__ == "__main__":
    main()
