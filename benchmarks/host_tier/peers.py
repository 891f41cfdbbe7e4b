# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vllm-ascend-kvext project
"""Compares the host tiers of KvextConnector, vLLM and LMCache at equal bytes, on workloads.

    python benchmarks/host_tier/peers.py [--quick] [--only TEXT] [--seeds N] [--out DIR]

Every tier runs on vLLM's real scheduler, with the same trace, device pool and bytes of host memory.
vLLM's tier is the real scheduler side of its OffloadingConnector; LMCache's is a model of its
policy. Nothing is moved, and transfers end at once. It needs vLLM 0.30.

A result is kept in a file as soon as it is there, and what is in a file is not run again. --only
chooses the cells whose "layout/workload/share" contains all of its comma-separated parts; it may be
repeated. To compare a change of KvextConnector, give its results a name: --name after.

Layouts of vllm-ascend run if KVEXT_ASCEND_SOURCES names an unpacked vllm-ascend wheel.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import time
from collections.abc import Iterator
from concurrent.futures import as_completed
from dataclasses import replace
from itertools import product
from pathlib import Path

ROOT = Path(__file__).parents[2]
sys.path[:0] = [str(ROOT / folder) for folder in ("benchmarks", "tests")]
os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")

from common.processes import has_ascend, processes  # noqa: E402
from common.report import parser  # noqa: E402

from host_tier import standings  # noqa: E402
from host_tier.rounds import ENDLESS, Records, Round, play  # noqa: E402
from host_tier.standings import BOUND, OURS, PEERS, Place, Standing  # noqa: E402
from host_tier.workloads import WORKLOADS  # noqa: E402

LAYOUTS = ("full", "gemma128", "gptoss128", "dsv4-ascend128", "mamba", "qwen3.5", "kimi")
SHARES = (0.5, 0.25, 0.1)
CONTENDERS = (ENDLESS, "device", *PEERS, OURS, BOUND)
QUICK_LAYOUTS = ("full", "gemma128")
QUICK_WORKLOADS = ("chat", "reasoning", "agents", "documents", "mixture")
QUICK_SHARES = (0.25, 0.1)
QUICK_SCALE = 0.5


def parse_arguments() -> argparse.Namespace:
    options = parser(__doc__, "bench-peers")
    options.add_argument("--only", action="append", default=[], help="parts of the cells to run")
    options.add_argument("--share", action="append", type=float, help="size of host memory")
    options.add_argument("--contender", action="append", help=f"what runs: {', '.join(CONTENDERS)}")
    options.add_argument("--seeds", type=int, help="traces of each kind")
    options.add_argument("--scale", type=float, help="factor on the size of the workloads")
    options.add_argument("--jobs", type=int, default=os.cpu_count() or 1, help="processes")
    options.add_argument("--name", help="the name of KvextConnector's results in the files")
    options.add_argument("--options", type=json.loads, default={}, help="KvextConnector's, as JSON")
    found = options.parse_args()
    found.share = found.share or (QUICK_SHARES if found.quick else SHARES)
    found.seeds = found.seeds or (1 if found.quick else 3)
    found.scale = found.scale or (QUICK_SCALE if found.quick else 1.0)
    # The clairvoyant tier needs the order of admissions, which the endless tier records.
    chosen = {ENDLESS, *(found.contender or CONTENDERS)}
    found.contender = [_named(name, found) for name in CONTENDERS if name in chosen]
    return found


def _named(contender: str, arguments: argparse.Namespace) -> str:
    """The name of a contender's results in the files."""
    is_named = arguments.name and contender == OURS
    return f"{OURS}@{arguments.name}" if is_named else contender


def chosen_places(arguments: argparse.Namespace) -> list[Place]:
    layouts = [name for name in LAYOUTS if has_ascend() or "ascend" not in name]
    workloads = WORKLOADS
    if arguments.quick and not arguments.only:
        layouts, workloads = list(QUICK_LAYOUTS), QUICK_WORKLOADS
    places = [Place(*each) for each in product(layouts, workloads, arguments.share)]
    return [place for place in places if _is_chosen(place, arguments.only)]


def _is_chosen(place: Place, only: list[str]) -> bool:
    name = f"{place.layout}/{place.workload}/{place.share:g}"
    return not only or any(all(part in name for part in each.split(",")) for each in only)


def run(arguments: argparse.Namespace, places: list[Place]) -> Iterator[Standing]:
    """Play all rounds. A place is returned when all its seeds are done.

    A standing also has the contenders that are in files, and were not asked for.
    """
    records = Records(arguments.out)
    known = [_named(name, arguments) for name in CONTENDERS]
    for is_ascend in (False, True):
        rounds = {
            place: [Round(place, seed, arguments.scale) for seed in range(arguments.seeds)]
            for place in places
            if ("ascend" in place.layout) is is_ascend
        }
        if not rounds:
            continue
        with processes(arguments.jobs, is_ascend=is_ascend) as pool:
            missing = {place: len(each) for place, each in rounds.items()}
            futures = {
                pool.submit(
                    play, each, arguments.contender, arguments.out, arguments.options
                ): place
                for place, every in rounds.items()
                for each in every
            }
            for future in as_completed(futures):
                place = futures[future]
                for refusal in future.result():
                    print(refusal, file=sys.stderr)
                missing[place] -= 1
                if not missing[place]:
                    yield _with_ours(records.standing(place, rounds[place], known))


def _with_ours(standing: Standing) -> Standing:
    """The standing with KvextConnector's results under its own name, whatever their name is."""
    points = {name.partition("@")[0]: points for name, points in standing.points.items()}
    times_s = {name.partition("@")[0]: value for name, value in standing.scheduler_s.items()}
    return replace(standing, points=points, scheduler_s=times_s)


def main() -> int:
    arguments = parse_arguments()
    places = chosen_places(arguments)
    started_s = time.monotonic()
    lines = [standings.TABLE.head]
    print(lines[0], flush=True)
    found = []
    for standing in run(arguments, places):
        found.append(standing)
        print(standings.line(standing), flush=True)
    found.sort(key=lambda each: places.index(each.place))
    verdicts = list(standings.verdicts(found))
    lines += [*map(standings.line, found), *verdicts]
    print(*verdicts, sep="\n")
    print(f"{len(found)} cells in {time.monotonic() - started_s:.0f} s")
    name = f"table@{arguments.name}.txt" if arguments.name else "table.txt"
    (arguments.out / name).write_text("\n".join([*lines, ""]), encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
