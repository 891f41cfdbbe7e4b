# SPDX-License-Identifier: Apache-2.0
"""From rows and the pages that hold them to the runs and planes of a transfer.

Cost grows with runs and planes, never with tokens. Knows neither storing nor loading: a run says
where rows lie on either side.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import groupby
from operator import not_
from typing import NamedTuple

import numpy as np

from vllm_ascend_kvext.layout.host_arrangement import ArrangedSection
from vllm_ascend_kvext.transfer.schema import DTYPE, PlaneColumn, RunColumn, Table

NULL_PAGE = 0
"""vLLM's null block: stands for tokens that nobody reads any more."""

_FEW_PAGES = 48
"""Up to here a loop is faster than arrays."""


class RowSpan(NamedTuple):
    """Consecutive rows whose pages all exist.

    Attributes:
        first_row: Counted from the request's first token.
        end_row: Behind the last one.
        pages: Block ids of the pages that hold them, the first and last perhaps in part.
    """

    first_row: int
    end_row: int
    pages: Sequence[int]


class PlacedSection(NamedTuple):
    """A section that takes part in a transfer.

    Attributes:
        arranged: Its planes.
        first_row: Of the section, counted from the request's first token.
        host_offset_bytes: In the host buffer.
        rows_per_page: Of its group.
        spans: What moves of it, in order.
    """

    arranged: ArrangedSection
    first_row: int
    host_offset_bytes: int
    rows_per_page: int
    spans: Sequence[RowSpan]


def split_at_nulls(
    first_row: int, end_row: int, rows_per_page: int, pages: Sequence[int]
) -> Iterator[RowSpan]:
    """The rows that have a page.

    Args:
        first_row: Counted from the request's first token.
        end_row: Behind the last row.
        rows_per_page: Of the group.
        pages: Block ids of the pages from the one that holds ``first_row`` on.
    """
    if NULL_PAGE not in pages:
        yield RowSpan(first_row, end_row, pages)
        return
    page_row = first_row // rows_per_page * rows_per_page
    for is_null, ids in groupby(pages, not_):
        of_span = list(ids)
        next_row = page_row + len(of_span) * rows_per_page
        if not is_null:
            yield RowSpan(max(page_row, first_row), min(next_row, end_row), of_span)
        page_row = next_row


def planes_of(sections: Sequence[PlacedSection]) -> Table:
    """The planes of all sections, a group number per section. shape: [num_planes, 9]"""
    if not sections:
        return np.empty((0, len(PlaneColumn)), DTYPE)
    if len(sections) == 1:
        planes: Table = sections[0].arranged.planes.copy()
        planes[:, PlaneColumn.HOST_OFFSET_BYTES] += sections[0].host_offset_bytes
        return planes
    tables = [section.arranged.planes for section in sections]
    planes = np.concatenate(tables)
    counts = list(map(len, tables))
    offsets = np.array([section.host_offset_bytes for section in sections], DTYPE)
    planes[:, PlaneColumn.GROUP] = np.repeat(np.arange(len(counts), dtype=DTYPE), counts)
    planes[:, PlaneColumn.HOST_OFFSET_BYTES] += np.repeat(offsets, counts)
    return planes


def runs_of(sections: Sequence[PlacedSection]) -> Table:
    """One run per page, sorted by group number. shape: [num_runs, 5]"""
    if not sections:
        return np.empty((0, len(RunColumn)), DTYPE)
    num_pages = sum(len(span.pages) for section in sections for span in section.spans)
    return _runs_by_page(sections) if num_pages <= _FEW_PAGES else _runs_by_array(sections)


def _runs_by_page(sections: Sequence[PlacedSection]) -> Table:
    runs = []
    for number, section in enumerate(sections):
        rows_per_page = section.rows_per_page
        for first_row, end_row, pages in section.spans:
            page_row = first_row // rows_per_page * rows_per_page
            for page in pages:
                next_row = page_row + rows_per_page
                first = first_row if first_row > page_row else page_row
                end = end_row if end_row < next_row else next_row
                host_row = first - section.first_row
                # In the order of RunColumn.
                runs.append((number, page, first - page_row, end - first, host_row))
                page_row = next_row
    return np.array(runs, DTYPE)


class _SpanTable(NamedTuple):
    """The columns of a table of spans."""

    number: Table
    first_row: Table
    end_row: Table
    section_first_row: Table
    rows_per_page: Table
    num_pages: Table


def _runs_by_array(sections: Sequence[PlacedSection]) -> Table:
    rows: list[tuple[int, ...]] = []
    pages: list[int] = []
    for number, section in enumerate(sections):
        for span in section.spans:
            rows.append(
                # In the order of _SpanTable.
                (
                    number,
                    span.first_row,
                    span.end_row,
                    section.first_row,
                    section.rows_per_page,
                    len(span.pages),
                )
            )
            pages += span.pages
    spans = _SpanTable(*np.array(rows, DTYPE).T)
    of_page = _SpanTable(*np.repeat(np.array(rows, DTYPE), spans.num_pages, axis=0).T)
    first_index = np.cumsum(spans.num_pages) - spans.num_pages
    page_in_span = np.arange(len(pages), dtype=DTYPE) - np.repeat(first_index, spans.num_pages)
    page_row = (of_page.first_row // of_page.rows_per_page + page_in_span) * of_page.rows_per_page
    first_row = np.maximum(page_row, of_page.first_row)
    runs = np.empty((len(pages), len(RunColumn)), DTYPE)
    runs[:, RunColumn.GROUP] = of_page.number
    runs[:, RunColumn.PAGE] = pages
    runs[:, RunColumn.FIRST_ROW] = first_row - page_row
    runs[:, RunColumn.NUM_ROWS] = (
        np.minimum(page_row + of_page.rows_per_page, of_page.end_row) - first_row
    )
    runs[:, RunColumn.HOST_ROW] = first_row - of_page.section_first_row
    return runs
