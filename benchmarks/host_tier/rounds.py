# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vllm-ascend-kvext project
"""One round of a match: a contender at one place with one seed. Each is kept in a file of its own.

What is in a file is not run again, so that a benchmark that was stopped goes on.
"""

from __future__ import annotations

import functools
import json
import os
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from host_tier.standings import Place, Standing

ENDLESS = "endless"
UNSIZED = ("device", ENDLESS)


@dataclass(frozen=True, slots=True)
class Round:
    """One place with one seed.

    Attributes:
        scale: A factor on the size of the workload.
    """

    place: Place
    seed: int
    scale: float = 1.0

    def file_name(self, contender: str) -> str:
        place = self.place
        share = "any" if contender in UNSIZED else f"{place.share:g}"
        return (
            f"{place.layout}.{place.workload}.{self.scale:g}.{share}.{self.seed}.{contender}.json"
        )


@dataclass(frozen=True, slots=True)
class Records:
    """A folder with the results of rounds."""

    folder: Path

    def read(self, name: str) -> dict[str, Any] | None:
        path = self.folder / name
        return json.loads(path.read_text(encoding="utf-8")) if path.is_file() else None

    def write(self, name: str, result: Mapping[str, Any]) -> None:
        """Write a result in one piece. Two processes may write the same result."""
        self.folder.mkdir(parents=True, exist_ok=True)
        part = self.folder / f"{name}.{os.getpid()}"
        part.write_text(json.dumps(result), encoding="utf-8")
        part.replace(self.folder / name)

    def standing(
        self, place: Place, rounds: Iterable[Round], contenders: Sequence[str]
    ) -> Standing:
        """What is known of a place. A contender counts if it has a result for every seed."""
        rounds = list(rounds)
        ceiling: list[float] = []
        points: dict[str, list[float]] = {}
        scheduler_s: dict[str, float] = {}
        for each in rounds:
            for contender in contenders:
                found = self.read(each.file_name(contender))
                if not found or found.get("refused"):
                    continue
                rate = found["hit_tokens"] / found["prompt_tokens"]
                points.setdefault(contender, []).append(100 * rate)
                times_s = scheduler_s.get(contender, 0) + found["scheduler_s"]
                scheduler_s[contender] = times_s
                if contender == ENDLESS:
                    ceiling.append(100 * found["shared_tokens"] / found["prompt_tokens"])
        whole = {name: rates for name, rates in points.items() if len(rates) == len(rounds)}
        of_whole = {name: scheduler_s[name] for name in whole}
        return Standing(place, ceiling or [0.0], whole, of_whole)


def play(
    round_: Round, contenders: Sequence[str], folder: Path, options: Mapping[str, Any]
) -> list[str]:
    """Run the contenders of a round that have no file yet.

    Returns:
        The names of refused contenders, with the reason.
    """
    records = Records(folder)
    missing = [each for each in contenders if records.read(round_.file_name(each)) is None]
    return _play_missing(round_, missing, records, options) if missing else []


def _play_missing(
    round_: Round, contenders: Sequence[str], records: Records, options: Mapping[str, Any]
) -> list[str]:
    from host_tier.contenders import Contender
    from vllm_ascend_kvext.replay.serving import DoesNotFitError

    refusals = []
    for contender in contenders:
        name = round_.file_name(contender)
        match = _match(round_.place.layout, round_.place.workload, round_.scale, round_.seed)
        endless = records.read(round_.file_name(ENDLESS)) or {}
        kind = Contender(contender.partition("@")[0])
        host_bytes = int(round_.place.share * match.footprint_bytes) if kind.has_size else 0
        try:
            served = match.serve(kind, host_bytes, endless.get("order", ()), options)
        except DoesNotFitError:
            refusals.append(f"{name}: a request does not fit into {match.num_blocks} blocks")
            continue
        if served.refused:
            refusals.append(f"{name}: {served.refused}")
        records.write(name, asdict(served))
    return refusals


@functools.lru_cache(maxsize=1)
def _match(layout: str, workload: str, scale: float, seed: int) -> Any:
    from retention.layouts import get_layout

    from host_tier.contenders import Match
    from host_tier.workloads import write_workload

    return Match(get_layout(layout), write_workload(workload, scale, seed))
