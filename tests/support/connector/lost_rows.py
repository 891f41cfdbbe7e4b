# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vllm-ascend-kvext project
"""Finds entries of host memory that have rows of some tokens. Tests remove these entries."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from vllm_ascend_kvext.store.entries import Entry, Kind


def holds_rows_of(entry: Entry, ranges: Iterable[Sequence[int]]) -> bool:
    """Whether an entry has full-attention rows in one of these ranges of first and end tokens."""
    piece = entry.piece
    return piece.kind is Kind.ROWS and any(
        piece.first_tokens < end and first < piece.end_tokens for first, end in ranges
    )
