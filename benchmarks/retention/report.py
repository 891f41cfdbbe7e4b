# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vllm-ascend-kvext project
"""Makes tables of finished cells: text for the terminal, Markdown for a file.

The module knows only the data of `retention.suite.Finished`.
"""

from __future__ import annotations

import statistics
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from retention.suite import INFINITE, Finished

TIE_POINTS = 0.5
OURS = "adaptive"
CPU_OF = ("dense", "stock:0")
INTRODUCTION = """\
Token hit rate in per cent of prompt tokens at first admission. Pools are shares of what dense
caching keeps in an infinite pool. `stock:N` is vLLM's own retention, `interval` and `adaptive` are
this package's. On layouts whose hits end inside blocks, `stock` is dense caching with a match unit,
and `dense` has none. `endless` keeps every block and evicts none. `-`: refused by that variant, or
not run. With several seeds per trace, means; `±` is the standard error of the difference. `CPU` is
the block manager's CPU time under `adaptive`, divided by that under dense caching and under
`stock:0`, which is vLLM 0.30's default; with `--repeats N`, the least of N times each."""


def pool_name(pool: str) -> str:
    return "∞" if pool == INFINITE else f"{float(pool):.0%}"


def line(finished: Finished) -> str:
    """One cell on one line."""
    cell = finished.cell
    result = finished.result
    trace = f"{cell.trace}/{cell.seed}" if cell.seed else cell.trace
    head = f"{cell.layout:15}{trace:11}{pool_name(cell.pool):>5} {cell.variant:15}"
    if (reason := why_not(result)) is not None:
        return f"{head}{reason}"
    losses = result["losses"]
    prompt_tokens = result["prompt_tokens"]
    lost = " ".join(f"{cause} {100 * n / prompt_tokens:.1f}" for cause, n in losses.items() if n)
    blocks = "/".join(f"{n / 1000:.1f}" for n in result["cached_blocks"])
    return (
        f"{head}hit {100 * result['hit_rate']:5.1f} %  computed "
        f"{result['computed_tokens'] / 1e6:.2f} of {prompt_tokens / 1e6:.2f} M  lost % [{lost}]  "
        f"evicted {result['num_evictions'] / 1000:.0f}k  preempted {result['num_preemptions']}  "
        f"kept {blocks}k of {result['num_blocks'] / 1000:.1f}k  "
        f"scheduler {result['scheduler_s']:.2f} s  cell {result['cell_s']:.1f} s"
    )


def why_not(result: dict) -> str | None:
    """Why there is no hit rate; None if there is one."""
    if "error" in result:
        return "FAILED: " + result["error"].strip().splitlines()[-1]
    if "refused" in result:
        return "refused: " + result["refused"].splitlines()[0][:100]
    if "does_not_fit" in result:
        return f"does not fit into {result['num_blocks']} blocks"
    return None


@dataclass(frozen=True, slots=True)
class Row:
    """The results of all variants on one layout, trace and pool, with one result per seed."""

    layout: str
    trace: str
    pool: str
    results: dict[str, list[dict]]

    def points(self, variant: str) -> float | None:
        """The hit rate in per cent, as the mean over all seeds; None if a seed has none."""
        rates = [result.get("hit_rate") for result in self.results.get(variant, ())]
        return None if not rates or None in rates else 100 * statistics.fmean(rates)

    def endless_points(self) -> float | None:
        """What a cache hits that keeps every block and evicts none, under adaptive retention."""
        results = self.results.get(OURS, ())
        if not results or self.points(OURS) is None:
            return None
        return 100 * statistics.fmean(
            (result["hit_tokens"] + result["losses"]["never_kept"] + result["losses"]["evicted"])
            / result["prompt_tokens"]
            for result in results
        )

    def cpu_ratio(self, other: str) -> float | None:
        """The ratio of adaptive retention's CPU time to a variant's; None if one has none."""
        sums_s = []
        for variant in (OURS, other):
            times_s = [result.get("scheduler_s") for result in self.results.get(variant, ())]
            if not times_s or None in times_s:
                return None
            sums_s.append(sum(times_s))
        return sums_s[0] / sums_s[1]

    def best_other(self) -> tuple[float, str] | None:
        """The best hit rate of the other variants, in per cent, and the name of the variant."""
        others = [
            (points, variant)
            for variant in self.results
            if not variant.startswith(OURS) and (points := self.points(variant)) is not None
        ]
        return max(others, key=lambda pair: pair[0], default=None)

    def lead(self, variant: str) -> float | None:
        """The points by which a variant is ahead of the best other variant."""
        points = self.points(variant)
        best = self.best_other()
        return None if points is None or best is None else points - best[0]

    def lead_error(self, variant: str) -> float:
        """The standard error of the lead over the best other variant, in points; 0 for one seed."""
        best = self.best_other()
        pairs = zip(self.results[variant], self.results[best[1]], strict=True) if best else ()
        leads = [100 * (ours["hit_rate"] - theirs["hit_rate"]) for ours, theirs in pairs]
        return statistics.stdev(leads) / len(leads) ** 0.5 if len(leads) > 1 else 0.0


def rows(cells: Iterable[Finished]) -> list[Row]:
    found: dict[tuple[str, str, str], Row] = {}
    for finished in cells:
        cell = finished.cell
        key = (cell.layout, cell.trace, cell.pool)
        row = found.setdefault(key, Row(*key, results={}))
        row.results.setdefault(cell.variant, []).append(finished.result)
    return list(found.values())


def columns(some_rows: Iterable[Row]) -> list[str]:
    """The variants of these rows, the adaptive ones last."""
    variants = dict.fromkeys(variant for row in some_rows for variant in row.results)
    return sorted(variants, key=lambda variant: variant.startswith(OURS))


def markdown(cells: Sequence[Finished]) -> str:
    """The whole report."""
    all_rows = rows(cells)
    parts = ["# Retention on traces", INTRODUCTION]
    ours = sorted({c.cell.variant for c in cells if c.cell.variant.startswith(OURS)})
    if ours:
        parts.append("\n".join(summary(all_rows, variant) for variant in ours))
    for layout in dict.fromkeys(row.layout for row in all_rows):
        parts.append(f"## {layout}")
        parts.append(_hit_rates([row for row in all_rows if row.layout == layout]))
    return "\n\n".join(parts) + "\n"


def summary(all_rows: Sequence[Row], variant: str) -> str:
    """How often a variant is ahead of the best other variant, and where it is behind."""
    leads = [
        (lead, row)
        for row in all_rows
        if row.pool != INFINITE and (lead := row.lead(variant)) is not None
    ]
    wins = sum(lead > TIE_POINTS for lead, _ in leads)
    losses = sorted((pair for pair in leads if pair[0] < -TIE_POINTS), key=lambda pair: pair[0])
    text = (
        f"`{variant}` against the best of the others, {len(leads)} cells: {wins} better, "
        f"{len(leads) - wins - len(losses)} within {TIE_POINTS} points, {len(losses)} worse."
    )
    for _, row in losses:
        best = row.best_other()
        assert best is not None
        text += (
            f"\n- {row.layout}, {row.trace}, {pool_name(row.pool)}: "
            f"{row.points(variant):.1f}, {best[1]} has {best[0]:.1f} ({_lead(row, variant)})"
        )
    return text


def _lead(row: Row, variant: str) -> str:
    lead = row.lead(variant)
    error = row.lead_error(variant)
    return f"{lead:+.1f}" + (f" ± {error:.1f}" if error else "")


def _hit_rates(some_rows: Sequence[Row]) -> str:
    variants = columns(some_rows)
    header = ["trace", "pool", *variants, "endless", "best other", OURS, "difference"]
    header += [f"CPU / {other}" for other in CPU_OF]
    body = []
    for row in some_rows:
        best = row.best_other()
        body.append(
            [
                row.trace,
                pool_name(row.pool),
                *(_points(row, variant) for variant in variants),
                "-" if (endless := row.endless_points()) is None else f"{endless:.1f}",
                f"{best[0]:.1f} ({best[1]})" if best else "-",
                _points(row, OURS),
                _lead(row, OURS) if row.lead(OURS) is not None else "-",
                *("-" if r is None else f"{r:.2f}" for r in map(row.cpu_ratio, CPU_OF)),
            ]
        )
    return table(header, body)


def _points(row: Row, variant: str) -> str:
    results = row.results.get(variant, ())
    if any("does_not_fit" in result for result in results):
        return "does not fit"
    if any("error" in result for result in results):
        return "FAILED"
    points = row.points(variant)
    return "-" if points is None else f"{points:.1f}"


def table(header: Sequence[str], body: Sequence[Sequence[str]]) -> str:
    lines = ["| " + " | ".join(cells) + " |" for cells in (header, *body)]
    lines.insert(1, "|" + "---|" * len(header))
    return "\n".join(lines)
