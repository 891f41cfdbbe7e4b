# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vllm-ascend-kvext project
"""Draws one picture of all cells: how close each variant comes to an infinite dense cache."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from retention.report import Row, columns, pool_name
from retention.suite import INFINITE


def draw(all_rows: Sequence[Row], path: Path) -> None:
    """Draw one panel per layout, with a line per trace and pool, and a column per variant.

    The number is the hit rate in per cent. The colour is its share of the ceiling, which is the hit
    rate of dense caching in an infinite pool.

    Raises:
        ImportError: There is no matplotlib.
    """
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    shown = [row for row in all_rows if row.pool != INFINITE]
    ceilings = {
        (row.layout, row.trace): row.points("dense") for row in all_rows if row.pool == INFINITE
    }
    layouts = list(dict.fromkeys(row.layout for row in all_rows))
    variants = columns(shown)
    max_rows = max(sum(row.layout == layout for row in shown) for layout in layouts)
    figure, panels = pyplot.subplots(
        1,
        len(layouts),
        figsize=((2.0 + 0.42 * len(variants)) * len(layouts), 1.6 + 0.2 * max_rows),
        squeeze=False,
        layout="constrained",
    )
    image = None
    for layout, axes in zip(layouts, panels.flat, strict=True):
        rows = [row for row in shown if row.layout == layout]
        points = [[row.points(variant) for variant in variants] for row in rows]
        shares = [
            [_share(each, ceilings.get((layout, row.trace))) for each in of_row]
            for row, of_row in zip(rows, points, strict=True)
        ]
        none = [[float("nan")]]
        image = axes.imshow(shares or none, vmin=0, vmax=1, cmap="RdYlGn", aspect="auto")
        for y, of_row in enumerate(points):
            for x, each in enumerate(of_row):
                text = "-" if each is None else f"{each:.0f}"
                axes.text(x, y, text, ha="center", va="center", fontsize=6)
        axes.set_title(layout, fontsize=9)
        axes.set_xticks(range(len(variants)), variants, rotation=90, fontsize=7)
        names = [f"{row.trace} {pool_name(row.pool)}" for row in rows]
        axes.set_yticks(range(len(rows)), names, fontsize=6)
    figure.colorbar(image, ax=panels, label="share of the ceiling")
    figure.savefig(path, dpi=130)
    pyplot.close(figure)


def _share(points: float | None, ceiling: float | None) -> float:
    if points is None or not ceiling:
        return float("nan")
    return points / ceiling
