# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vllm-ascend-kvext project
"""Measures how many tokens are computed if host memory is too small for the requests.

    python benchmarks/holes/run.py [--quick] [--layout L] [--trace T] [--share S] [--scale X]

Traces go through vLLM's real scheduler and the connector's scheduler side, with a small device
pool. A stand-in for the worker plans every transfer and moves nothing. The benchmark compares:

- the device alone;
- a host tier like others: stores everything, LRU, a prompt is read up to its first missing chunk;
- our host tier, also read up to the first missing chunk;
- our host tier with missing chunks computed (``hole_reuse``).

Host memory has 50, 25 or 10 % of what the trace leaves in an endless tier. The default policy
decides what is stored (``second_touch``, which stores everything of a request that has ended),
unless --store-policy names another policy.

The benchmark counts the computed prompt tokens, also in holes, and again after preemptions. It also
counts each of these tokens as often as there are tokens before it, which is the cost of attention.
A table and all numbers as JSON are written to --out. The exit status is 1 if something leaks.
"""

from __future__ import annotations

import argparse
import os
import sys
from pathlib import Path

ROOT = Path(__file__).parents[2]
sys.path[:0] = [str(ROOT / folder) for folder in ("benchmarks", "tests")]
os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")

from common.report import parser, write  # noqa: E402

from holes import results  # noqa: E402
from holes.results import Row  # noqa: E402
from holes.traces import TRACES  # noqa: E402

LAYOUTS = ("full",)
SHARES = (0.5, 0.25, 0.1)
SCALE = 0.5
QUICK_TRACES = ("questions", "compacted")
QUICK_SHARES = (0.25,)
QUICK_SCALE = 0.2


def parse_arguments() -> argparse.Namespace:
    options = parser(__doc__, "bench-holes")
    options.add_argument("--layout", action="append", help=f"{', '.join(LAYOUTS)}, gptoss, ...")
    options.add_argument("--trace", action="append", help=", ".join(TRACES))
    options.add_argument("--share", action="append", type=float, help="of what an endless tier has")
    options.add_argument("--scale", type=float, help=f"factor on the traces' sizes: {SCALE}")
    options.add_argument("--store-policy", default="second_touch", help="second_touch or all")
    found = options.parse_args()
    found.layout = found.layout or list(LAYOUTS)
    found.trace = found.trace or list(QUICK_TRACES if found.quick else TRACES)
    found.share = found.share or list(QUICK_SHARES if found.quick else SHARES)
    found.scale = found.scale or (QUICK_SCALE if found.quick else SCALE)
    return found


def run(arguments: argparse.Namespace) -> list[Row]:
    """Measure all rows, and print each when it is done."""
    from retention.variants import installed

    from holes.cells import Bench

    rows = []
    with installed(None):
        for layout in arguments.layout:
            for trace in arguments.trace:
                bench = Bench(layout, trace, arguments.scale, arguments.store_policy)
                for row in bench.rows(arguments.share):
                    rows.append(row)
                    print(results.line(row), flush=True)
    return rows


def main() -> int:
    arguments = parse_arguments()
    print(results.HEAD, flush=True)
    rows = run(arguments)
    ends = [*map(results.line, results.sums(rows)), *results.verdicts(rows)]
    print(*ends, sep="\n")
    write(arguments.out, [results.HEAD, *map(results.line, rows), *ends], rows)
    return 1 if any(row.num_leaks for row in rows) else 0


if __name__ == "__main__":
    sys.exit(main())
