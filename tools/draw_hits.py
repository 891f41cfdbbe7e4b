# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vllm-ascend-kvext project
"""Draw the picture of the README, ``docs/pictures/hits.svg``, from numbers that pages print.

Example:
    python tools/draw_hits.py
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

CHECKOUT = Path(__file__).parents[1]
PICTURE = CHECKOUT / "docs" / "pictures" / "hits.svg"
CELLS = (
    ("Gemma-3", "chat"),
    ("Gemma-3", "documents"),
    ("gpt-oss", "documents"),
    ("full", "few-shot"),
    ("states", "chat"),
)
"""The cells of the table in docs/offload.md that are drawn: layout and workload."""

BAR = 13
ROW = 50
LEFT = 170
WIDTH = 470
COLORS = {"other": "#9aa5b1", "ours": "#2563eb", "bound": "#d6dce3"}


class Hits(NamedTuple):
    """Prompt tokens that are found, in % of all."""

    label: str
    other: float
    ours: float
    bound: float | None


def device_hits(page: str) -> list[Hits]:
    """The numbers of the prefix cache on the device, as the table of docs/retention.md prints them.

    Raises:
        ValueError: If a row is not there.
    """
    hits = []
    for trace, label in (("chat", "chats"), ("agent", "agents")):
        row = rf"^\| {trace} \| ([\d.]+) \| .*\*\*([\d.]+)\*\* \|$"
        found = re.search(row, page, re.MULTILINE)
        if found is None:
            raise ValueError(f"docs/retention.md: expected a row {trace}, found none")
        hits.append(Hits(label, *map(float, found.groups()), None))
    return hits


def host_hits(page: str) -> list[Hits]:
    """The numbers of host memory of 25 %, as the table of docs/offload.md prints them.

    Raises:
        ValueError: If a row is not there.
    """
    hits = []
    for layout, workload in CELLS:
        of_half = r"[^|]*"  # The column before that of 25 %.
        row = rf"^\| {layout} \| {workload} \|{of_half}\| ([\d.]+), \*\*([\d.]+)\*\*, ([\d.]+) "
        found = re.search(row, page, re.MULTILINE)
        if found is None:
            raise ValueError(f"docs/offload.md: expected a row {layout}, {workload}, found none")
        hits.append(Hits(f"{workload}, {layout}", *map(float, found.groups())))
    return hits


def draw(panels: Sequence[tuple[str, str, Sequence[Hits]]]) -> str:
    """The picture: one panel below the other, each with a title, the other's name and its bars."""
    body: list[str] = []
    top = 24
    for title, other, hits in panels:
        body.append(_text(16, top, title, "bold"))
        body.append(_legend(top + 20, other, any(each.bound is not None for each in hits)))
        top += 40
        for each in hits:
            body.append(_text(LEFT - 10, top + BAR + 5, each.label, anchor="end"))
            if each.bound is not None:
                body.append(_bar(top - 3, each.bound, "bound", 2 * BAR + 6))
            body.append(_bar(top, each.other, "other", BAR))
            body.append(_bar(top + BAR, each.ours, "ours", BAR))
            body.append(_text(LEFT + _x(each.other) + 6, top + 11, f"{each.other:g} %"))
            body.append(_text(LEFT + _x(each.ours) + 6, top + BAR + 11, f"{each.ours:g} %", "bold"))
            top += ROW
        top += 14
    size = f'width="{LEFT + WIDTH + 70}" height="{top}"'
    head = (
        f'<svg xmlns="http://www.w3.org/2000/svg" {size} font-family="sans-serif" font-size="13">'
    )
    return "\n".join([head, '<rect width="100%" height="100%" fill="#ffffff"/>', *body, "</svg>\n"])


def _x(percent: float) -> float:
    return round(percent * WIDTH / 100, 1)


def _bar(top: float, percent: float, color: str, height: float) -> str:
    place = f'x="{LEFT}" y="{top}" width="{_x(percent)}" height="{height}"'
    return f'<rect {place} fill="{COLORS[color]}"/>'


def _text(x: float, y: float, text: str, weight: str = "normal", anchor: str = "start") -> str:
    style = f'font-weight="{weight}" text-anchor="{anchor}" fill="#1f2933"'
    return f'<text x="{x}" y="{y}" {style}>{text}</text>'


def _legend(y: float, other: str, has_bound: bool) -> str:
    named = [("other", other), ("ours", "vllm-ascend-kvext")]
    if has_bound:
        named.append(("bound", "what knowing the future would find"))
    parts, x = [], 16
    for color, name in named:
        parts.append(f'<rect x="{x}" y="{y - 9}" width="10" height="10" fill="{COLORS[color]}"/>')
        parts.append(_text(x + 15, y, name))
        x += 40 + 7 * len(name)
    return "\n".join(parts)


def picture() -> str:
    """The picture, from the pages of the checkout."""
    retention, offload = (
        (CHECKOUT / "docs" / name).read_text("utf-8") for name in ("retention.md", "offload.md")
    )
    return draw(
        [
            (
                "Prompt tokens found in the prefix cache (windows, a pool of 20 %)",
                "stock vLLM",
                device_hits(retention),
            ),
            (
                "Prompt tokens found with host memory of 25 %",
                "the best other host tier",
                host_hits(offload),
            ),
        ]
    )


if __name__ == "__main__":
    PICTURE.parent.mkdir(exist_ok=True)
    PICTURE.write_text(picture(), "utf-8")
