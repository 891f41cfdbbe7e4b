# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vllm-ascend-kvext project
"""The commands of ``python -m vllm_ascend_kvext``. Each module adds its arguments and runs."""

from __future__ import annotations

from collections.abc import Sequence


def render_rows(rows: Sequence[Sequence[str]]) -> list[str]:
    """Render rows as lines. Each column is as wide as its widest cell."""
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return [
        "  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip()
        for row in rows
    ]
