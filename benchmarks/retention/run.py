# SPDX-License-Identifier: Apache-2.0
"""Token hit rates of dense caching, fixed intervals and adaptive retention, on traces.

    python benchmarks/retention/run.py [--quick] [--layout L] [--trace T] [--pool P] [--variant V]

Options of the last line may be repeated; left out, they stand for everything. One line is printed
per cell as it is done; a table, all numbers as JSON and a picture are written to --out.

Layouts of vllm-ascend run where KVEXT_ASCEND_SOURCES names an unpacked vllm-ascend wheel, columns
of vLLM 0.32 where --python-032 or KVEXT_VLLM_032_PYTHON names an interpreter that has it.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import time
from dataclasses import asdict
from pathlib import Path

ROOT = Path(__file__).parents[2]
sys.path[:0] = [str(ROOT / "benchmarks")]

from retention import report  # noqa: E402
from retention.suite import Finished, WorkerError, batches, run_batches  # noqa: E402
from retention.traces import WRITERS  # noqa: E402
from retention.variants import Variant  # noqa: E402

LAYOUTS = ("gemma", "dsv4", "gptoss", "mamba")
ASCEND_LAYOUTS = ("dsv4-ascend32", "dsv4-ascend128")
POOLS = ("inf", "0.4", "0.2", "0.1")
VARIANTS = (
    *("dense", "stock:0", "stock:4096", "stock:16384", "interval:0", "interval:4096"),
    *("adaptive", "adaptive:4096"),
)
VARIANTS_032 = ("v032:0", "v032:4096", "v032:16384")
QUICK = {
    "layout": ("dsv4", "gptoss", "mamba"),
    "trace": ("chat", "documents", "edited"),
    "pool": ("inf", "0.2"),
    "variant": ("dense", "stock:0", "stock:4096", "adaptive"),
}


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    names = ", ".join
    parser.add_argument("--layout", action="append", help=names(LAYOUTS + ASCEND_LAYOUTS))
    parser.add_argument("--trace", action="append", help=names(WRITERS))
    parser.add_argument("--pool", action="append", help="inf, or a share of the dense footprint")
    parser.add_argument("--variant", action="append", help=names(VARIANTS + VARIANTS_032))
    parser.add_argument("--quick", action="store_true", help="a few cells, in two minutes")
    parser.add_argument("--scale", type=float, default=1.0, help="factor on the traces' sizes")
    parser.add_argument("--mooncake", metavar="FILE", help="a trace in Mooncake's JSONL format")
    parser.add_argument("--limit", type=int, help="take only so many requests of it")
    parser.add_argument("--jobs", type=int, default=os.cpu_count() or 1, help="processes")
    parser.add_argument("--python-032", default=os.environ.get("KVEXT_VLLM_032_PYTHON"))
    parser.add_argument("--out", type=Path, default=ROOT / "out" / "bench-retention")
    parser.add_argument("--resume", action="store_true", help="keep what --out has of this code")
    arguments = parser.parse_args()
    try:
        for variant in arguments.variant or ():
            Variant.parse(variant)
        for pool in arguments.pool or ():
            float(pool)
    except ValueError as error:
        parser.error(str(error))
    if arguments.mooncake and not Path(arguments.mooncake).is_file():
        parser.error(f"--mooncake {arguments.mooncake}: there is no such file")
    return arguments


def choices(arguments: argparse.Namespace) -> dict[str, tuple[str, ...]]:
    """Layouts, traces, pools and variants to combine."""
    everything = {
        "layout": LAYOUTS + (ASCEND_LAYOUTS if has_ascend() else ()),
        "trace": tuple(WRITERS),
        "pool": POOLS,
        "variant": VARIANTS + (VARIANTS_032 if arguments.python_032 else ()),
    }
    if arguments.mooncake:
        everything["trace"] = (str(Path(arguments.mooncake).resolve()),)
    if arguments.quick:
        everything |= QUICK
    chosen = {name: getattr(arguments, name) for name in everything}
    return {name: tuple(chosen[name] or values) for name, values in everything.items()}


def has_ascend() -> bool:
    """Whether there is a vllm-ascend: the folder is empty where no wheel fits this machine."""
    folder = os.environ.get("KVEXT_ASCEND_SOURCES")
    return bool(folder) and (Path(folder) / "vllm_ascend").is_dir()


def read_known(path: Path) -> dict[str, dict]:
    """Results of an earlier run by key, failed ones left out."""
    if not path.is_file():
        return {}
    cells = json.loads(path.read_text(encoding="utf-8"))["cells"]
    return {cell["key"]: cell["result"] for cell in cells if "error" not in cell["result"]}


def write_report(finished: list[Finished], folder: Path) -> None:
    """Table, JSON and picture; without matplotlib no picture."""
    folder.mkdir(parents=True, exist_ok=True)
    report_text = report.markdown(finished, versions_of(finished))
    (folder / "table.md").write_text(report_text, encoding="utf-8")
    cells = [asdict(cell) for cell in finished]
    (folder / "results.json").write_text(json.dumps({"cells": cells}, indent=1) + "\n")
    try:
        from retention.picture import draw

        draw(report.rows(finished), folder / "hit_rates.png")
    except ImportError as error:
        print(f"no picture: {error}")
    print(f"\n{folder}: table.md, results.json, hit_rates.png")


def versions_of(finished: list[Finished]) -> dict[str, str]:
    versions: dict[str, str] = {}
    for cell in finished:
        (_, _, found, _) = json.loads(cell.key)
        versions[f"vLLM {found['vllm']}, Python"] = found["python"]
    return versions


def main() -> int:
    arguments = parse_arguments()
    chosen = choices(arguments)
    work = batches(
        chosen["layout"],
        chosen["trace"],
        chosen["pool"],
        chosen["variant"],
        arguments.scale,
        arguments.limit,
    )
    num_cells = sum(1 + len(batch.others) for batch in work)
    started_s = time.monotonic()
    finished: list[Finished] = []

    def show(cell: Finished) -> None:
        finished.append(cell)
        print(f"[{len(finished)}/{num_cells}] {report.line(cell)}", flush=True)
        if "error" in cell.result:
            print(cell.result["error"], file=sys.stderr)

    known = read_known(arguments.out / "results.json") if arguments.resume else {}
    try:
        run_batches(work, arguments.jobs, arguments.python_032, known, show)
    except WorkerError as error:
        print(error, file=sys.stderr)
        return 2
    order = {cell: i for i, cell in enumerate(c for b in work for c in (b.base, *b.others))}
    finished.sort(key=lambda cell: order[cell.cell])
    print(f"{len(finished)} cells in {time.monotonic() - started_s:.0f} s")
    for variant in chosen["variant"]:
        if variant.startswith(report.OURS):
            print(report.summary(report.rows(finished), variant))
    write_report(finished, arguments.out)
    return 1 if any("error" in cell.result for cell in finished) else 0


if __name__ == "__main__":
    sys.exit(main())
