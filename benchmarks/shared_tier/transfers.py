# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vllm-ascend-kvext project
"""Compares our shared tier with others: KV from files into host memory and back, GB/s and ratios.

    python benchmarks/shared_tier/transfers.py [--quick] [--lmcache PYTHON] [--disk FOLDER]

In every round, every contender in turn moves the same prompts. First comes *put*, then *get* by one
request after the other, then *get* by all requests at once, while the page cache has the files. On
a disk, *cold* follows, with nothing of the files in the page cache. vLLM's tier bypasses the page
cache wherever it can; a variant that does not bypass it is shown, too. Our tier verifies a checksum
of every byte, and the others verify nothing. A ratio is the median over the rounds of (vLLM's
seconds / a contender's). The benchmark needs vLLM 0.30 or newer. LMCache's adapters run in another
process.
"""

from __future__ import annotations

import os
import shutil
import statistics
import sys
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

sys.path[0] = str(Path(__file__).parents[1])
os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")

from common.report import ROOT, Table, median_ratio, parser, verdict, write  # noqa: E402

from shared_tier.contenders import (  # noqa: E402
    Contender,
    LmcacheFiles,
    Memcpy,
    Ours,
    PlainFiles,
    VllmFiles,
    host_memory,
    memory_of,
)
from shared_tier.geometry import GEOMETRIES, Geometry  # noqa: E402

LMCACHE = ROOT / ".venv/lmcache-0.5.6/bin/python"
MEASURES = ("put", "get", "get, all at once", "get, cold")
PLACES = ("disk", "tmpfs")
TARGET = 2.0


@dataclass
class Row:
    """The seconds of one contender, by measure and round."""

    geometry: str
    where: str
    contender: str
    num_bytes: int
    seconds: dict[str, list[float]] = field(default_factory=dict)


def made(geometry: Geometry, folder: Path, lmcache: Path | None) -> list[Contender]:
    """All contenders, vLLM's first."""
    host = host_memory(geometry.prompt_bytes * geometry.num_prompts)
    found: list[Contender] = [VllmFiles(geometry, folder / "vllm")]
    if "O_DIRECT" in found[0].name:
        found.append(VllmFiles(geometry, folder / "vllm-cached", is_direct=False))
    found.append(Ours(geometry, host, folder / "ours"))
    memory = memory_of(host)
    found.append(PlainFiles(geometry, memory, folder / "plain"))
    found.append(Memcpy(geometry, memory))
    if lmcache is not None:
        kinds = ("fs_native", "fs")
        found += [LmcacheFiles(lmcache, kind, geometry, folder / kind) for kind in kinds]
    return found


def files_in(folder: Path) -> Iterator[Path]:
    return (path for path in folder.rglob("*") if path.is_file() and not path.is_symlink())


def forget(folder: Path) -> None:
    """Drop all files of a folder from the page cache."""
    for path in files_in(folder):
        file = os.open(path, os.O_RDONLY)
        os.fsync(file)
        os.posix_fadvise(file, 0, 0, os.POSIX_FADV_DONTNEED)
        os.close(file)


def measure(
    geometry: Geometry, where: str, folder: Path, lmcache: Path | None, rounds: int
) -> list[Row]:
    contenders = made(geometry, folder, lmcache)
    folders = [path for path in folder.iterdir() if path.is_dir()]
    num_bytes = geometry.prompt_bytes * geometry.num_prompts
    rows = [Row(geometry.name, where, each.name, num_bytes) for each in contenders]
    prompts = range(geometry.num_prompts)
    try:
        for number in range(-1, rounds):  # The first round warms up.
            for index in range(len(contenders)):
                each, row = (x[(index + number) % len(x)] for x in (contenders, rows))
                for path in [path for top in folders for path in files_in(top)]:
                    path.unlink()
                found = {"put": sum(each.move("put", [prompt]) for prompt in prompts)}
                found["get"] = sum(each.move("get", [prompt]) for prompt in prompts)
                found["get, all at once"] = each.move("get", prompts)
                if where == "disk" and row.contender != Memcpy.name and number % 2 == 0:
                    forget(folder)
                    found["get, cold"] = sum(each.move("get", [prompt]) for prompt in prompts)
                if number >= 0:
                    for name, seconds in found.items():
                        row.seconds.setdefault(name, []).append(seconds)
    finally:
        for each in contenders:
            each.close()
    return rows


TABLE = Table(
    "model:<13",
    "where:<6",
    "contender:<26",
    *(f"{name}:>{max(13, len(name) + 1)}" for name in MEASURES),
)


def line(row: Row, vllm: Row) -> str:
    cells = []
    for name in MEASURES:
        seconds = row.seconds.get(name)
        if not seconds:
            cells.append("")
            continue
        speed = row.num_bytes / statistics.median(seconds) / 1e9
        cells.append(f"{speed:.2f} ({median_ratio(vllm.seconds[name], seconds):.2f})")
    return TABLE.line(row.geometry, row.where, row.contender, *cells)


def main() -> int:
    options = parser(__doc__, "bench-shared-tier")
    options.add_argument("--lmcache", type=Path, default=LMCACHE, help="Python that has LMCache")
    options.add_argument("--disk", type=Path, default=Path(tempfile.gettempdir()))
    options.add_argument("--tmpfs", type=Path, default=Path("/dev/shm"))
    options.add_argument("--rounds", type=int)
    options.add_argument("--where", action="append", choices=PLACES)
    arguments = options.parse_args()
    rounds = arguments.rounds or (2 if arguments.quick else 5)
    lmcache = arguments.lmcache if arguments.lmcache.exists() else None
    geometries = GEOMETRIES[2:3] if arguments.quick else GEOMETRIES
    lines = ["GB/s, and in brackets times as fast as vLLM's fs", TABLE.head]
    print(*lines, sep="\n")
    rows: list[Row] = []
    for where in arguments.where or PLACES:
        ratios: list[float] = []
        for geometry in geometries:
            folder = Path(tempfile.mkdtemp(dir=getattr(arguments, where)))
            try:
                found = measure(geometry, where, folder, lmcache, rounds)
            finally:
                shutil.rmtree(folder)
            rows += found
            lines += [line(row, found[0]) for row in found]
            print(*lines[-len(found) :], sep="\n", flush=True)
            ours = next(row for row in found if row.contender == Ours.name)
            ratios.append(median_ratio(found[0].seconds["get"], ours.seconds["get"]))
        text = f"{where}: a get takes vLLM's fs {min(ratios):.2f} times as long, or more"
        lines.append(verdict(min(ratios) >= TARGET, f"{text}; target {TARGET}"))
        print(lines[-1])
    write(arguments.out, lines, rows)
    return 0


if __name__ == "__main__":
    sys.exit(main())
