# SPDX-License-Identifier: Apache-2.0
"""Token hit rates with KvextConnector's host tier behind a small device pool, on traces.

    python benchmarks/host_tier/run.py [--layout L] [--trace T] [--scale S] [--pool P] [--out DIR]

Options but --scale and --out may be repeated; left out, they stand for everything. Served by
vLLM's real scheduler with the connector's scheduler side; a stand-in for the worker plans every
transfer, moves nothing, and is done at once. The smallest of the pools that every variant fits is
used. A table and all numbers as JSON are written to --out; the exit status is 1 if a row misses the
ceiling of an endless cache with a hit unit of 128 tokens by more than 5 points, or leaks.

Layouts of vllm-ascend run where KVEXT_ASCEND_SOURCES names an unpacked vllm-ascend wheel.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[2]
sys.path[:0] = [str(ROOT / folder) for folder in ("benchmarks", "tests", "tests/ascend")]

from host_tier import results  # noqa: E402
from host_tier.results import Row  # noqa: E402

LAYOUTS = ("dsv4-ascend128", "dsv4-ascend32", "dsv4", "gemma", "gptoss", "mamba")
TRACES = ("chat", "agent", "edited")
POOLS = (0.2, 0.3, 0.4)
SCALE = 0.5
SCALES = {"dsv4-ascend128": 2.0, "dsv4-ascend32": 2.0}
"""Of layouts whose pages are so large that a fifth of a smaller trace's do not hold one request."""

ASCEND_VARIABLE = "KVEXT_ASCEND_SOURCES"


def parse_arguments(arguments: list[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--layout", action="append", choices=LAYOUTS)
    parser.add_argument("--trace", action="append", help=", ".join(TRACES))
    parser.add_argument("--scale", type=float, help="factor on the traces' sizes")
    parser.add_argument("--pool", action="append", type=float, help="share of the dense footprint")
    parser.add_argument("--out", type=Path, default=ROOT / "out" / "bench-host-tier")
    parser.add_argument("--one-process", action="store_true", help=argparse.SUPPRESS)
    found = parser.parse_args(arguments)
    has_ascend = bool(os.environ.get(ASCEND_VARIABLE))
    found.layout = found.layout or [
        name for name in LAYOUTS if has_ascend or not is_of_ascend(name)
    ]
    found.trace = found.trace or list(TRACES)
    found.pool = sorted(found.pool or POOLS)
    return found


def is_of_ascend(layout: str) -> bool:
    return "ascend" in layout


def run_here(arguments: argparse.Namespace) -> None:
    """Serve the traces of one layout; one JSON line each."""
    answers = os.fdopen(os.dup(1), "w", encoding="utf-8", buffering=1)
    os.dup2(2, 1)  # Others print on stdout, too.
    os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")
    (layout,) = arguments.layout
    if is_of_ascend(layout):
        import ascend_sources

        folder = ascend_sources.sources()
        if folder is None:
            raise SystemExit(f"set {ASCEND_VARIABLE} for layouts of vllm-ascend")
        ascend_sources.activate(folder)
    from host_tier.cells import run_row

    for trace in arguments.trace:
        row = run_row(layout, trace, arguments.scale, arguments.pool)
        print(json.dumps(row.to_json()), file=answers)


def run_layout(layout: str, arguments: argparse.Namespace) -> list[Row]:
    """The rows of one layout, from a process of its own, shown as they come.

    Raises:
        SystemExit: If the process ends otherwise than well.
    """
    command = [sys.executable, __file__, "--one-process", "--layout", layout]
    scale = SCALES.get(layout, SCALE) if arguments.scale is None else arguments.scale
    command += ["--scale", str(scale)]
    for trace in arguments.trace:
        command += ["--trace", trace]
    for pool in arguments.pool:
        command += ["--pool", str(pool)]
    rows = []
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        for answer in process.stdout:
            rows.append(Row.from_json(json.loads(answer)))
            print(results.line(rows[-1]), *results.why_not(rows[-1]), sep="\n", flush=True)
    if process.returncode:
        raise SystemExit(f"layout {layout}: the process ended with code {process.returncode}")
    return rows


def main() -> int:
    arguments = parse_arguments()
    if arguments.one_process:
        run_here(arguments)
        return 0
    print(results.HEAD, flush=True)
    rows = [row for layout in arguments.layout for row in run_layout(layout, arguments)]
    print(results.summary(rows))
    arguments.out.mkdir(parents=True, exist_ok=True)
    table = [results.HEAD]
    for row in rows:
        table += [results.line(row), *results.why_not(row)]
    (arguments.out / "table.txt").write_text("\n".join([*table, results.summary(rows), ""]))
    (arguments.out / "results.json").write_text(
        json.dumps([row.to_json() for row in rows], indent=1) + "\n"
    )
    return 0 if all(row.is_good for row in rows) else 1


if __name__ == "__main__":
    sys.exit(main())
