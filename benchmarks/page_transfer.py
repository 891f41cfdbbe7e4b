# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vllm-ascend-kvext project
"""Compares the transfer op with plain copies, torch and LMCache: GB/s and ratios of one run.

    python benchmarks/page_transfer.py [--quick] [--lmcache FOLDER] [--out FOLDER]

Every round moves a chunk by every method in turn. Each move uses pages and host memory that no
cache holds. One thread is timed by its CPU time, two threads by the clock. A ratio is the median
over the rounds of (method / memcpy of the same bytes in the same round). The limit is a streaming
copy, which writes past the caches. GB/s counts bytes read and bytes written.
"""

from __future__ import annotations

import os
import statistics
import sys
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1] / "tests"))
sys.path.insert(0, str(Path(__file__).parent))

import torch
from common.report import Table, median_ratio, parser, verdict, write
from support.transfer.oracle import oracle_transfer
from transfer.geometry import LAYOUTS, ColdMemory, Job, Layout
from transfer.lmcache import Planes, lmcache_methods
from transfer.methods import Method, PageTransfer, PlainCopy, TorchPerPlane, time_in_turns

from vllm_ascend_kvext.native import native
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
    """Check that every method moves the right bytes.

    Raises:
        SystemExit: A method's bytes differ from the oracle's.
    """
    for method in methods:
        store = Job.next(memory, Direction.PAGES_TO_HOST, True, 1)
        load = replace(store, direction=Direction.HOST_TO_PAGES)
        expected = torch.zeros_like(store.host)
        tables = memory.plane_table, store.runs, Direction.PAGES_TO_HOST
        pools = [tensor.numpy() for tensor in memory.tensors]
        oracle_transfer(pools, expected.numpy(), *tables)
        store.host.zero_()
        method.prepare(store)()
        # LMCache's plane transfer has another order of bytes in the chunk: token by token.
        if not isinstance(method, Planes) and not torch.equal(store.host, expected):
            raise SystemExit(f"{method.name}: its host bytes are not the oracle's")
        for index, tensor in enumerate(memory.tensors):
            tensor.view(-1, memory.layout.planes[index].page_bytes)[store.pages] = 0
        method.prepare(load)()
        loaded = torch.zeros_like(expected)
        oracle_transfer(pools, loaded.numpy(), *tables)
        if not torch.equal(loaded, expected):
            raise SystemExit(f"{method.name}: what it stored and loaded is not what was there")


def measure(
    memory: ColdMemory, methods: list[Method], is_random: bool, num_threads: int, rounds: int
) -> Iterator[Result]:
    """Time every method in every round, both ways."""
    layout = memory.layout
    for direction in Direction:
        times_ns = time_in_turns(methods, memory, direction, is_random, num_threads, rounds)
        for name, spent_ns in times_ns.items():
            median_ns = statistics.median(spent_ns)
            yield Result(
                layout=layout.name,
                chunk_mb=layout.chunk_bytes / 1e6,
                pages="random" if is_random else "sequential",
                direction="gather" if direction == Direction.PAGES_TO_HOST else "scatter",
                num_threads=num_threads,
                method=name,
                time_ms=median_ns / 1e6,
                gb_per_s=2 * layout.chunk_bytes / median_ns,
                memcpy_ratio=median_ratio(spent_ns, times_ns[MEMCPY]),
                limit_ratio=median_ratio(spent_ns, times_ns[LIMIT]),
            )


COLUMNS = [
    (pages, direction, threads)
    for threads in (1, 2)
    for direction in ("gather", "scatter")
    for pages in ("random", "sequential")
]
TABLE = Table("GB/s, time / memcpy:<42", *(f"{d} {t}T {p[:4]}:>16" for p, d, t in COLUMNS))


def lines(results: list[Result], layout: Layout) -> Iterator[str]:
    """The table of one layout."""
    yield (
        f"\n{layout.name}: {layout.chunk_bytes / 1e6:.2f} MB per chunk, {len(layout.planes)} planes"
    )
    yield TABLE.head
    found = {(r.pages, r.direction, r.num_threads, r.method): r for r in results}
    for method in dict.fromkeys(result.method for result in results):
        cells = [found[(*column, method)] for column in COLUMNS]
        yield TABLE.line(method, *(f"{c.gb_per_s:.1f} {c.memcpy_ratio:6.2f}x" for c in cells))


def targets(results: list[Result]) -> Iterator[str]:
    """The targets of the project for one thread, and the measured values."""
    yield "\nTargets (random pages)"
    for layout in LAYOUTS:
        for direction in ("gather", "scatter"):
            found = {
                (r.num_threads, r.method): r
                for r in results
                if (r.layout, r.direction, r.pages) == (layout.name, direction, "random")
            }
            ours = found[1, OURS]
            limit = gather_limit(layout.chunk_bytes) if direction == "gather" else 1.1
            said = [f"{ours.memcpy_ratio:.2f} x memcpy (at most {limit})"]
            said.append(f"{ours.limit_ratio:.2f} x the limit")
            said += [
                f"{other.time_ms / ours.time_ms:.1f} x faster than {method}"
                for (threads, method), other in found.items()
                if threads == 1 and method.startswith(("torch", "LMCache"))
            ]
            gain = found[2, OURS_ALONE].time_ms / found[2, OURS].time_ms
            said.append(f"2 threads: {gain:.2f} x one, by the clock")
            text = f"{layout.name}, {direction}: {'; '.join(said)}"
            yield verdict(ours.memcpy_ratio <= limit, text)


def main() -> None:
    options = parser(__doc__, "bench-transfer")
    options.add_argument("--lmcache", type=Path, help="folder that holds the package lmcache")
    arguments = options.parse_args()
    peers, words = lmcache_methods(arguments.lmcache)
    kernel = native().describe()["kernel"]
    printed = [f"kernel {kernel}; {words}; load average {os.getloadavg()[0]:.1f}"]
    print(printed[0])
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
        rounds = BYTES_PER_METHOD // layout.chunk_bytes // (10 if arguments.quick else 1)
        rounds = max(5, min(rounds, 200))
        of_layout = [
            result
            for num_threads in (1, 2)
            for is_random in (True, False)
            for result in measure(memory, methods, is_random, num_threads, rounds)
        ]
        printed += lines(of_layout, layout)
        print(*lines(of_layout, layout), sep="\n", flush=True)
        results += of_layout
        del memory
    print(*targets(results), sep="\n")
    write(arguments.out, [*printed, *targets(results)], results)


if __name__ == "__main__":
    main()
