# SPDX-License-Identifier: Apache-2.0
"""From rows and the pages that hold them to the runs and planes of a transfer.

Cost grows with runs and planes, never with tokens. Knows neither storing nor loading: a run says
where rows lie on either side.
"""

from __future__ import annotations

import struct
from collections.abc import Iterator, Sequence
from itertools import groupby
from operator import not_
from typing import NamedTuple

import numpy as np

from vllm_ascend_kvext.transfer.schema import DTYPE, PlaneColumn, RunColumn, Table

NULL_PAGE = 0
"""vLLM's null block: stands for tokens that nobody reads any more."""

_FEW_PAGES = 48
"""Up to here a loop is faster than arrays."""

_PAGE = int(RunColumn.PAGE)
"""As an integer: numpy takes longer for a member of an enumeration."""


class RowSpan(NamedTuple):
    """Consecutive rows of one section that a transfer moves.

    Attributes:
        section: Number of the section in the transfer.
        first_row: Counted from the request's first token.
        end_row: Behind the last row.
        section_first_row: First row that the section has room for.
        rows_per_page: Of the group.
        num_pages: Pages that hold the rows, the first and last perhaps in part.
    """

    section: int
    first_row: int
    end_row: int
    section_first_row: int
    rows_per_page: int
    num_pages: int


def rows_with_pages(
    first_row: int, end_row: int, rows_per_page: int, pages: Sequence[int]
) -> Iterator[tuple[int, int]]:
    """First and end row of every stretch of rows that have a page.

    Args:
        first_row: Counted from the request's first token.
        end_row: Behind the last row.
        rows_per_page: Of the group.
        pages: Block ids of the pages from the one that holds ``first_row`` on.
    """
    page_row = first_row // rows_per_page * rows_per_page
    for is_null, ids in groupby(pages, not_):
        next_row = page_row + sum(1 for _ in ids) * rows_per_page
        if not is_null:
            yield max(page_row, first_row), min(next_row, end_row)
        page_row = next_row


def planes_of(
    tables: Sequence[Table], num_sections: Sequence[int], offsets_bytes: Sequence[int]
) -> Table:
    """The planes of a transfer, in which every section has a number. shape: [num_planes, 9]

    Args:
        tables: Planes of some sections each, numbered from 0 on.
        num_sections: Of each table.
        offsets_bytes: By which each table is moved in the host buffer.
    """
    if not tables:
        return np.empty((0, len(PlaneColumn)), DTYPE)
    if len(tables) == 1:
        planes: Table = tables[0].copy()
        if offsets_bytes[0]:
            planes[:, PlaneColumn.HOST_OFFSET_BYTES] += offsets_bytes[0]
        return planes
    planes = np.concatenate(tables)
    _number_sections(planes, tables, num_sections, PlaneColumn.GROUP)
    counts = list(map(len, tables))
    planes[:, PlaneColumn.HOST_OFFSET_BYTES] += np.repeat(np.array(offsets_bytes, DTYPE), counts)
    return planes


def ids_of(pages: Sequence[int]) -> Sequence[int] | Table:
    """Block ids as an array where they are many. shape: [num_pages]

    Ids that 63 bits do not hold are left as they are.
    """
    if len(pages) <= _FEW_PAGES:
        return pages
    try:
        # In a third of the time that numpy takes for a list of Python's integers.
        return np.frombuffer(struct.pack(f"{len(pages)}q", *pages), DTYPE)
    except struct.error:
        return pages


def runs_of(spans: Sequence[RowSpan | tuple[int, ...]], pages: Sequence[int] | Table) -> Table:
    """One run per page, sorted by section. shape: [num_runs, 5]

    Args:
        spans: Fields as of `RowSpan`, by section.
        pages: Block ids of all spans, one after the other; see `ids_of`.
    """
    if not len(pages):
        return np.empty((0, len(RunColumn)), DTYPE)
    return _runs_by_page(spans, pages) if len(pages) <= _FEW_PAGES else _runs_by_array(spans, pages)


def runs_with_pages(
    tables: Sequence[Table], num_sections: Sequence[int], pages: Sequence[int] | Table
) -> Table:
    """Runs of other pages, in which every section has a number. shape: [num_runs, 5]

    Args:
        tables: Runs of some sections each, numbered from 0 on; their pages are not looked at.
        num_sections: Of each table.
        pages: Block ids, one per run.
    """
    if not tables:
        return np.empty((0, len(RunColumn)), DTYPE)
    if len(tables) == 1:
        runs: Table = tables[0].copy()
    else:
        runs = np.concatenate(tables)
        _number_sections(runs, tables, num_sections, RunColumn.GROUP)
    if len(pages) == 1:
        runs[0, _PAGE] = pages[0]  # half a microsecond faster
    else:
        runs[:, _PAGE] = pages
    return runs


def without_null_pages(runs: Table) -> Table:
    """The runs that move something."""
    with_page: Table = runs[runs[:, RunColumn.PAGE] != NULL_PAGE]
    return with_page


def _number_sections(
    rows: Table, tables: Sequence[Table], num_sections: Sequence[int], column: int
) -> None:
    numbers = np.array(num_sections, DTYPE)
    rows[:, column] += np.repeat(np.cumsum(numbers) - numbers, list(map(len, tables)))


def _runs_by_page(spans: Sequence[tuple[int, ...]], pages: Sequence[int] | Table) -> Table:
    runs = []
    page_ids = iter(pages)
    for section, first_row, end_row, section_first_row, rows_per_page, num_pages in spans:
        page_row = first_row // rows_per_page * rows_per_page
        for _ in range(num_pages):
            next_row = page_row + rows_per_page
            first = first_row if first_row > page_row else page_row
            end = end_row if end_row < next_row else next_row
            host_row = first - section_first_row
            # In the order of RunColumn.
            runs.append((section, next(page_ids), first - page_row, end - first, host_row))
            page_row = next_row
    return np.array(runs, DTYPE)


class _SpanTable(NamedTuple):
    """`RowSpan` by column."""

    section: Table
    first_row: Table
    end_row: Table
    section_first_row: Table
    rows_per_page: Table
    num_pages: Table


def _runs_by_array(spans: Sequence[tuple[int, ...]], pages: Sequence[int] | Table) -> Table:
    table = np.array(spans, DTYPE)
    num_pages = _SpanTable(*table.T).num_pages
    of_page = _SpanTable(*np.repeat(table, num_pages, axis=0).T)
    first_index = np.cumsum(num_pages) - num_pages
    page_in_span = np.arange(len(pages), dtype=DTYPE) - np.repeat(first_index, num_pages)
    page_row = (of_page.first_row // of_page.rows_per_page + page_in_span) * of_page.rows_per_page
    first_row = np.maximum(page_row, of_page.first_row)
    end_row = np.minimum(page_row + of_page.rows_per_page, of_page.end_row)
    runs = np.empty((len(pages), len(RunColumn)), DTYPE)
    runs[:, RunColumn.GROUP] = of_page.section
    runs[:, RunColumn.PAGE] = pages
    runs[:, RunColumn.FIRST_ROW] = first_row - page_row
    runs[:, RunColumn.NUM_ROWS] = end_row - first_row
    runs[:, RunColumn.HOST_ROW] = first_row - of_page.section_first_row
    return runs
