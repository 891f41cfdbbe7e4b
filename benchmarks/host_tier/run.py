# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vllm-ascend-kvext project
"""Measures token hit rates with KvextConnector's host tier behind a small device pool, on traces.

    python benchmarks/host_tier/run.py [--layout L] [--trace T] [--scale S] [--pool P] [--out DIR]

All options except --scale and --out may be repeated. Without an option, all its values are used.
vLLM's real scheduler serves the traces with the connector's scheduler side. A stand-in for the
worker plans every transfer, moves nothing, and is done at once. Of the pools that are large enough
for every variant, the smallest is used. A table and all numbers as JSON are written to --out. The
exit status is 1 if a row misses the ceiling of an endless cache with a hit unit of 128 tokens by
more than 5 points, or leaks.

Layouts of vllm-ascend run if KVEXT_ASCEND_SOURCES names an unpacked vllm-ascend wheel.
"""

from __future__ import annotations

import argparse
import os
import sys
from pathlib import Path

ROOT = Path(__file__).parents[2]
sys.path[:0] = [str(ROOT / folder) for folder in ("benchmarks", "tests")]
os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")

from common.processes import has_ascend, processes  # noqa: E402
from common.report import parser, write  # noqa: E402

from host_tier import results  # noqa: E402

LAYOUTS = ("dsv4-ascend128", "dsv4-ascend32", "dsv4", "gemma", "gptoss", "mamba")
TRACES = ("chat", "agent", "edited")
POOLS = (0.2, 0.3, 0.4)
SCALE = 0.5
QUICK_SCALE = 0.1
SCALES = {"dsv4-ascend128": 2.0, "dsv4-ascend32": 2.0}
"""The scales of layouts with large pages. A fifth of the pages of a smaller trace would not hold
one request."""


def parse_arguments() -> argparse.Namespace:
    options = parser(__doc__, "bench-host-tier")
    options.add_argument("--layout", action="append", choices=LAYOUTS)
    options.add_argument("--trace", action="append", help=", ".join(TRACES))
    options.add_argument("--scale", type=float, help="factor on the traces' sizes")
    options.add_argument("--pool", action="append", type=float, help="share of the dense footprint")
    found = options.parse_args()
    known = [name for name in LAYOUTS if has_ascend() or "ascend" not in name]
    found.layout = found.layout or (["gptoss"] if found.quick else known)
    found.trace = found.trace or list(TRACES[:1] if found.quick else TRACES)
    found.scale = found.scale or (QUICK_SCALE if found.quick else None)
    found.pool = sorted(found.pool or POOLS)
    return found


def main() -> int:
    from host_tier.cells import run_row

    arguments = parse_arguments()
    rows = []
    lines = [results.TABLE.head]
    print(lines[0], flush=True)
    for layout in arguments.layout:
        scale = arguments.scale or SCALES.get(layout, SCALE)
        with processes(1, is_ascend="ascend" in layout) as process:
            for trace in arguments.trace:
                row = process.submit(run_row, layout, trace, scale, arguments.pool).result()
                rows.append(row)
                found = [results.line(row), *results.why_not(row)]
                print(*found, sep="\n", flush=True)
                lines += found
    lines.append(results.summary(rows))
    print(lines[-1])
    write(arguments.out, lines, rows)
    return 0 if all(row.is_good for row in rows) else 1


if __name__ == "__main__":
    sys.exit(main())
