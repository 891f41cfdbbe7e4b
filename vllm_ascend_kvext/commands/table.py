# SPDX-License-Identifier: Apache-2.0
"""Tables of text, for a terminal and for Markdown."""

from __future__ import annotations

from collections.abc import Sequence


def render_rows(rows: Sequence[Sequence[str]]) -> list[str]:
    """Lines with columns as wide as their widest cell."""
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return [
        "  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip()
        for row in rows
    ]


def render_markdown_table(header: Sequence[str], rows: Sequence[Sequence[str]]) -> list[str]:
    """Lines of a Markdown table; a vertical bar in a cell is escaped."""
    lines = [header, ["---"] * len(header), *rows]
    return [f"| {' | '.join(cell.replace('|', chr(92) + '|') for cell in row)} |" for row in lines]
