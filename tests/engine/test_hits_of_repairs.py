# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vllm-ascend-kvext project
"""A default install hits at least what stock upstream rightly hits: repairs take no hits.

The cells are KV cache layouts, KV connectors, their roles, and drafts. They run on upstream's real
scheduler, in a pool with room for all. ``-s`` prints the hit tokens. `hits.Hits` separates hits of
the request's own KV from wrong hits. For states of drafts this is not possible: if a repair makes
steps end elsewhere, only totals are compared. ``preempted-in-step`` and ``failed-loads`` take away
hits of blocks with wrong KV. Such hits do not occur here.
"""

from __future__ import annotations

import functools
from collections import Counter
from collections.abc import Iterator
from dataclasses import replace

import pytest
from support.installed import installed
from support.sample import IS_LONG
from support.scheduler.hits import (
    FOREIGN,
    OF_DEEPSEEK_V4,
    OURS,
    Cell,
    Hits,
    cells,
    default_install,
    hits_of,
)
from support.scheduler.layouts import FULL_WINDOW, MAMBA_WINDOW

from vllm_ascend_kvext.features import REPAIRS

ALL_CELLS = list(cells())
CELLS = ALL_CELLS if IS_LONG else [*ALL_CELLS[::4], *ALL_CELLS[3::4]]
"""The tested cells. ``make test-long`` tests all. Otherwise the two sizes of steps take turns."""
NAMES = list(dict.fromkeys(cell.name for cell in CELLS))
EACH_ALONE = [
    cell
    for cell in ALL_CELLS
    if cell.layout in (FULL_WINDOW, MAMBA_WINDOW, OF_DEEPSEEK_V4)
    and cell.beside is FOREIGN[0]
    and cell.step_offset_tokens
]


@functools.cache
def stock_hits(cell: Cell) -> Hits:
    """Stock cannot have our connector. It gets another connector that also holds nothing."""
    return hits_of(replace(cell, beside=FOREIGN[0]) if cell.beside is OURS else cell)


@pytest.fixture(scope="module")
def table() -> Iterator[list[str]]:
    lines: list[str] = []
    yield lines
    head = f"{'layout | connector':44} {'stock':>7} {'wrong':>7} {'default':>7}"
    print("", head, *lines, sep="\n")


@pytest.mark.parametrize("name", NAMES)
def test_default_install_hits_what_stock_hits(name: str, table: list[str]) -> None:
    totals: Counter[str] = Counter()
    lost: dict[str, tuple[int, int]] = {}
    for cell in CELLS:
        if cell.name != name:
            continue
        stock = stock_hits(cell)
        with default_install():
            own = hits_of(cell)
        assert not own.wrong
        wrong = stock.total - sum(stock.right.values())
        totals.update(stock=stock.total, wrong=wrong, default=own.total)
        lost |= lost_hits(cell, stock, own)
    table.append(f"{name:44} {totals['stock']:7} {totals['wrong']:7} {totals['default']:7}")
    assert totals["stock"] > 0
    assert not lost


@pytest.mark.parametrize("repair", [repair.name for repair in REPAIRS])
def test_no_repair_on_its_own_takes_hits(repair: str) -> None:
    lost: dict[str, tuple[int, int]] = {}
    for cell in EACH_ALONE:
        with installed(repair):
            own = hits_of(cell)
        lost |= lost_hits(cell, stock_hits(cell), own)
    assert not lost


def lost_hits(cell: Cell, stock: Hits, own: Hits) -> dict[str, tuple[int, int]]:
    """The requests that hit less than with stock, and both hits. Some cells have only a total."""
    assert stock.tokens.keys() == own.tokens.keys()
    if not cell.is_checked and cell.beside.may_load:
        return {cell.name: (stock.total, own.total)} if own.total < stock.total else {}
    return {
        f"{cell.name}, {request_id}": (tokens, own.tokens[request_id])
        for request_id, tokens in stock.right.items()
        if own.tokens[request_id] < tokens
    }
