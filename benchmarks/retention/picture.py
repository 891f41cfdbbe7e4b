# SPDX-License-Identifier: Apache-2.0
"""One picture of all cells: how close each variant comes to an infinite dense cache."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from retention.report import Row, columns, pool_name, trace_name
from retention.suite import INFINITE

COLUMNS = 3


def draw(all_rows: Sequence[Row], path: Path) -> None:
    """One panel per layout, a line per trace and pool, a column per variant.

    The number is the hit rate in per cent; the colour is its share of the ceiling, the hit rate of
    dense caching in an infinite pool.

    Raises:
        ImportError: There is no matplotlib.
    """
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    layouts = list(dict.fromkeys(row.layout for row in all_rows))
    variants = columns(row for row in all_rows if row.pool != INFINITE)
    num_columns = min(COLUMNS, len(layouts))
    num_lines = -(-len(layouts) // num_columns)
    most_rows = max(sum(row.layout == layout for row in all_rows) for layout in layouts)
    figure, panels = pyplot.subplots(
        num_lines,
        num_columns,
        figsize=((2.0 + 0.42 * len(variants)) * num_columns, (1.6 + 0.2 * most_rows) * num_lines),
        squeeze=False,
        layout="constrained",
    )
    for axes in panels.flat[len(layouts) :]:
        axes.set_visible(False)
    image = None
    for layout, axes in zip(layouts, panels.flat, strict=False):
        some_rows = [row for row in all_rows if row.layout == layout]
        ceilings = {row.trace: row.points("dense") for row in some_rows if row.pool == INFINITE}
        shown = [row for row in some_rows if row.pool != INFINITE]
        shares = [
            [_share(row.points(variant), ceilings.get(row.trace)) for variant in variants]
            for row in shown
        ]
        image = axes.imshow(
            shares or [[float("nan")]], vmin=0, vmax=1, cmap="RdYlGn", aspect="auto"
        )
        for y, row in enumerate(shown):
            for x, variant in enumerate(variants):
                points = row.points(variant)
                axes.text(
                    x,
                    y,
                    "-" if points is None else f"{points:.0f}",
                    ha="center",
                    va="center",
                    fontsize=6,
                )
        axes.set_title(layout, fontsize=9)
        axes.set_xticks(range(len(variants)), variants, rotation=90, fontsize=7)
        axes.set_yticks(
            range(len(shown)),
            [f"{trace_name(row.trace)} {pool_name(row.pool)}" for row in shown],
            fontsize=6,
        )
    if image is not None:
        figure.colorbar(image, ax=panels, label="share of the ceiling")
    figure.savefig(path, dpi=130)
    pyplot.close(figure)


def _share(points: float | None, ceiling: float | None) -> float:
    if points is None or not ceiling:
        return float("nan")
    return points / ceiling
