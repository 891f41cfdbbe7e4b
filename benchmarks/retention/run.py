# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vllm-ascend-kvext project
"""Measures token hit rates of dense caching, fixed intervals and adaptive retention on traces.

    python benchmarks/retention/run.py [--quick] [--layout L] [--trace T] [--pool P] [--variant V]

Options may be repeated. Without an option, all its values are used. The cells of a trace are
printed when all of them are done. A table, all numbers as JSON and a picture are written to --out.

Layouts of vllm-ascend run if KVEXT_ASCEND_SOURCES names an unpacked vllm-ascend wheel. The layouts
qwen3.5 and kimi have the blocks of these models, and hits inside them. They run if they are named,
and need vLLM 0.30.
"""

from __future__ import annotations

import argparse
import os
import sys
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import as_completed
from pathlib import Path

ROOT = Path(__file__).parents[2]
sys.path[:0] = [str(ROOT / folder) for folder in ("benchmarks", "tests")]
os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")

from common.processes import has_ascend, processes  # noqa: E402
from common.report import parser, write  # noqa: E402

from retention import report  # noqa: E402
from retention.production import RECORDINGS  # noqa: E402
from retention.suite import Batch, Finished, batches  # noqa: E402
from retention.traces import WRITERS  # noqa: E402

LAYOUTS = ("gemma", "dsv4", "gptoss", "mamba")
ASCEND_LAYOUTS = ("dsv4-ascend32", "dsv4-ascend128")
POOLS = ("inf", "0.4", "0.2", "0.1")
VARIANTS = (
    "dense",
    "stock:0",
    "stock:4096",
    "stock:16384",
    "interval:0",
    "interval:4096",
    "adaptive",
    "adaptive:4096",
)
QUICK = {
    "layout": ("dsv4", "gptoss", "mamba"),
    "trace": ("chat", "documents", "edited"),
    "pool": ("inf", "0.2"),
    "variant": ("dense", "stock:0", "stock:4096", "adaptive"),
}


def parse_arguments() -> argparse.Namespace:
    everything = {
        "layout": LAYOUTS + (ASCEND_LAYOUTS if has_ascend() else ()),
        "trace": (*WRITERS, *RECORDINGS),
        "pool": POOLS,
        "variant": VARIANTS,
    }
    options = parser(__doc__, "bench-retention")
    for name, values in everything.items():
        options.add_argument(f"--{name}", action="append", help=", ".join(values))
    options.add_argument("--scale", type=float, default=1.0, help="factor on the traces' sizes")
    options.add_argument("--seeds", type=int, default=1, help="traces of each kind")
    options.add_argument("--repeats", type=int, default=1, help="runs per cell, for CPU times")
    options.add_argument("--jobs", type=int, default=os.cpu_count() or 1, help="processes")
    found = options.parse_args()
    for name, values in (everything | (QUICK if found.quick else {})).items():
        setattr(found, name, getattr(found, name) or list(values))
    return found


def run_batches(work: Sequence[Batch], num_jobs: int) -> Iterator[Finished]:
    """Run all batches. The cells of a batch are returned when all of them are done.

    Args:
        work: The batches in the order of starting. Layouts of vllm-ascend come last.

    Raises:
        concurrent.futures.BrokenExecutor: A process ended.
    """
    from retention.cells import run_batch

    for is_ascend in (False, True):
        chosen = [batch for batch in work if ("ascend" in batch.base.layout) is is_ascend]
        if not chosen:
            continue
        with processes(num_jobs, is_ascend=is_ascend) as pool:
            for future in as_completed([pool.submit(run_batch, batch) for batch in chosen]):
                yield from future.result()


def main() -> int:
    arguments = parse_arguments()
    kinds = (arguments.layout, arguments.trace, arguments.pool, arguments.variant)
    work = batches(*kinds, arguments.scale, arguments.seeds, arguments.repeats)
    cells = [cell for batch in work for cell in batch.cells]
    started_s = time.monotonic()
    finished: list[Finished] = []
    for each in run_batches(work, arguments.jobs):
        finished.append(each)
        print(f"[{len(finished)}/{len(cells)}] {report.line(each)}", flush=True)
        if "error" in each.result:
            print(each.result["error"], file=sys.stderr)
    finished.sort(key=lambda each: cells.index(each.cell))
    print(f"{len(finished)} cells in {time.monotonic() - started_s:.0f} s")
    rows = report.rows(finished)
    for variant in arguments.variant:
        if variant.startswith(report.OURS):
            print(report.summary(rows, variant))
    write(arguments.out, report.markdown(finished).splitlines(), finished)
    try:
        from retention.picture import draw

        draw(rows, arguments.out / "hit_rates.png")
    except ImportError as error:
        print(f"no picture: {error}")
    print(f"\n{arguments.out}: table.txt (Markdown), results.json, hit_rates.png")
    return 1 if any("error" in each.result for each in finished) else 0


if __name__ == "__main__":
    sys.exit(main())
