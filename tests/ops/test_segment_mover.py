# SPDX-License-Identifier: Apache-2.0
"""Tokens of segments from pages to host memory and back, to other places and positions."""

from __future__ import annotations

import re
from typing import Any

import numpy as np
import pytest

torch = pytest.importorskip("torch")

from support.connector.row_pages import (  # noqa: E402
    BLOCK,
    HEAD,
    HEADS,
    NUM_PAGES,
    SmallBackend,
    registered,
)

from vllm_ascend_kvext.blending import segment_mover  # noqa: E402
from vllm_ascend_kvext.blending.cpu_token_pages import CpuLayer, CpuTokenPages  # noqa: E402
from vllm_ascend_kvext.blending.errors import SegmentError  # noqa: E402
from vllm_ascend_kvext.blending.key_check import KeyCheckOutcome, turn  # noqa: E402
from vllm_ascend_kvext.blending.rotary_signature import RotarySignature  # noqa: E402
from vllm_ascend_kvext.blending.segment_mover import SegmentMover  # noqa: E402
from vllm_ascend_kvext.blending.segment_rows import SegmentLayout, SegmentRows  # noqa: E402
from vllm_ascend_kvext.layout.transfer_plan import TablePart  # noqa: E402
from vllm_ascend_kvext.transfer.schema import PairStyle, RowDtype  # noqa: E402

GROUPS = (0, 1, 0)
"""Of three layers: two of full attention, and one with a window."""
SIGNATURES = [
    RotarySignature(
        tuple(base ** (-i / (HEAD // 2)) for i in range(HEAD // 2)),
        PairStyle.HALVES,
        HEAD,
        0,
        RowDtype.FLOAT32,
    )
    for base in (10_000.0, 500.0, 10_000.0)
]
TOKEN_BYTES = len(GROUPS) * 2 * HEADS * HEAD * 4
HOST_BYTES = 1 << 20


class Worker:
    """Pages of three layers, the host memory, and what moves tokens between them."""

    def __init__(self, **arguments: Any) -> None:
        backend = SmallBackend()
        self.tensors = [registered() for _ in GROUPS]
        self.backend = backend
        self.pages = self.token_pages(self.tensors)
        self.layout = SegmentLayout(tuple(p.row_bytes for p in self.pages.planes), "f", 40)
        self.host = torch.zeros(HOST_BYTES, dtype=torch.uint8)
        self.mover = SegmentMover(self.pages, self.host, self.layout, **arguments)

    def token_pages(self, tensors: list[Any]) -> CpuTokenPages:
        return CpuTokenPages(
            [
                CpuLayer(f"layers.{i}", group, tensor[:, 0], tensor[:, 1], signature)
                for i, (group, tensor, signature) in enumerate(
                    zip(GROUPS, tensors, SIGNATURES, strict=True)
                )
            ],
            self.backend.write_rows,
        )

    def fill(self, rows: list[Any], first: int, tables: tuple[TablePart, ...]) -> None:
        """As a forward would: the backend's op writes tokens of a request."""
        for layer, group in enumerate(GROUPS):
            self.backend.write_rows(
                *rows[2 * layer : 2 * layer + 2],
                self.tensors[layer][:, 0],
                self.tensors[layer][:, 1],
                slots(first, len(rows[0]), tables[group]),
            )

    def snapshot(self) -> list[Any]:
        return [tensor.clone() for tensor in self.tensors]


def slots(first: int, num_tokens: int, table: TablePart) -> Any:
    tokens = torch.arange(first, first + num_tokens)
    return torch.tensor(table.ids)[tokens // BLOCK - table.first_page] * BLOCK + tokens % BLOCK


def random_rows(num_tokens: int, seed: int = 0) -> list[Any]:
    generator = torch.Generator().manual_seed(seed)
    shape = num_tokens, HEADS, HEAD
    return [torch.randn(shape, generator=generator) for _ in range(2 * len(GROUPS))]


def turned(rows: list[Any], positions: Any) -> list[Any]:
    """Keys as at these positions, float32; values as they are."""
    found = list(rows)
    for layer, signature in enumerate(SIGNATURES):
        keys = turn(rows[2 * layer].double().numpy(), signature, np.asarray(positions))
        found[2 * layer] = torch.from_numpy(keys).float()
    return found


SOURCE = (TablePart(0, (3, 9, 4, 11, 7)), TablePart(0, (5, 12, 6, 10, 8)))
TARGET = (TablePart(2, (21, 1, 20, 13, 2)), TablePart(1, (16, 15, 14, 17, 18, 19)))


@pytest.mark.parametrize("staging_tokens", [1, 5, 7, 1000])
def test_segments_are_placed_at_other_positions(staging_tokens: int) -> None:
    """Two texts change their order; their first tokens stay out; one is used twice."""
    worker = Worker(staging_bytes=staging_tokens * TOKEN_BYTES)
    rows = random_rows(33)
    worker.fill(turned(rows, 3 + np.arange(33)), 3, SOURCE)
    one = SegmentRows(3, 16, 64, 20, 2)
    other = SegmentRows(16, 36, 64 + worker.layout.num_bytes(20), 20, 0)
    assert worker.mover.store([one, other], SOURCE) == 33 * TOKEN_BYTES

    loads = [
        other._replace(first_tokens=17, end_tokens=33, first_row=4, shift_tokens=17 - 16 - 4),
        one._replace(first_tokens=36, end_tokens=46, first_row=5, shift_tokens=36 - 3 - 3),
        one._replace(first_tokens=47, end_tokens=49, first_row=6, shift_tokens=47 - 3 - 4),
    ]
    wanted = Worker()
    for mine, theirs in zip(wanted.tensors, worker.tensors, strict=True):
        mine.copy_(theirs)
    placed = [row[[*range(17, 33), *range(3, 13), *range(4, 6)]] for row in rows]
    at = [*range(17, 33), *range(36, 46), *range(47, 49)]
    parts = [(17, slice(0, 16)), (36, slice(16, 26)), (47, slice(26, 28))]
    rotated = turned(placed, at)
    for first, part in parts:
        wanted.fill([row[part] for row in rotated], first, TARGET)

    assert worker.mover.load(loads, TARGET) == 28 * TOKEN_BYTES
    for found, expected in zip(worker.tensors, wanted.tensors, strict=True):
        torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-5)
        is_value = torch.equal(found[:, 1], expected[:, 1])
        assert is_value, "values are copied bit by bit"
    changed = [(was != now) for was, now in zip(wanted.snapshot(), worker.tensors, strict=True)]
    assert not any((part & (now == -7)).any() for part, now in zip(changed, worker.tensors,
                                                                   strict=True))  # fmt: skip


class Mapped:
    """Staging that a device reaches."""

    def __init__(self, num_bytes: int) -> None:
        self.tensor = torch.empty(num_bytes, dtype=torch.uint8)
        self.num_unmapped = 0

    def unmap(self) -> None:
        self.num_unmapped += 1


def test_staging_is_given_back_when_it_grows_and_at_the_end() -> None:
    made: list[Mapped] = []

    def make(num_bytes: int) -> Mapped:
        made.append(Mapped(num_bytes))
        return made[-1]

    worker = Worker(make_staging=make)
    worker.mover.store([SegmentRows(0, 30, 64, 30, 0)], SOURCE)
    assert not made, "a store needs none"
    for num_tokens in (3, 2, 20):
        rows = SegmentRows(17, 17 + num_tokens, 64, 30, 0, shift_tokens=5)
        assert worker.mover.load([rows], TARGET) == num_tokens * TOKEN_BYTES
    assert [each.num_unmapped for each in made] == [1, 0]
    for _ in range(2):
        worker.mover.close()
        assert [each.num_unmapped for each in made] == [1, 1]


def test_a_shift_of_zero_keeps_every_bit() -> None:
    worker = Worker()
    for tensor in worker.tensors:
        tensor.view(torch.int32).random_(-(1 << 31), (1 << 31) - 1)
    rows = SegmentRows(3, 36, 128, 40, 5)
    worker.mover.store([rows], SOURCE)
    stored = worker.host.clone()
    assert not torch.equal(stored, torch.zeros_like(stored))
    worker.mover.load(
        [rows], (TablePart(0, (20, 21, 22, 23, 19)), TablePart(0, (13, 14, 15, 16, 17)))
    )
    worker.host.zero_()
    worker.mover.store(
        [rows], (TablePart(0, (20, 21, 22, 23, 19)), TablePart(0, (13, 14, 15, 16, 17)))
    )
    assert torch.equal(worker.host, stored)


def test_only_the_rows_that_are_named_are_written_to_host() -> None:
    worker = Worker()
    worker.host.fill_(0xA5)
    worker.mover.store([SegmentRows(3, 10, 64, 20, 5)], SOURCE)
    *offsets, end = worker.layout.plane_offsets_bytes(20)
    is_row = torch.zeros(HOST_BYTES, dtype=torch.bool)
    for offset, row_bytes in zip(offsets, worker.layout.row_bytes, strict=True):
        is_row[64 + offset + 5 * row_bytes : 64 + offset + 12 * row_bytes] = True
    assert (worker.host[~is_row] == 0xA5).all()
    assert end == worker.layout.num_bytes(20)


def test_nothing_to_move() -> None:
    worker = Worker()
    before = worker.snapshot()
    assert worker.mover.store([], ()) == worker.mover.load([], ()) == 0
    assert all(map(torch.equal, worker.tensors, before)) and not worker.host.any()


GOOD = SegmentRows(3, 36, 64, 40, 5)
END = GOOD.first_row + GOOD.num_tokens

REFUSED: dict[str, tuple[dict[str, Any], tuple[TablePart, ...], str]] = {
    "no token": ({"end_tokens": 3}, SOURCE, "tokens: expected at least one, found 3 to 2"),
    "before the request": ({"first_tokens": -1}, SOURCE, "expected at least one, found -1 to 35"),
    "offset": (
        {"offset_bytes": 65},
        SOURCE,
        "section: expected an offset that is a multiple of 64, found 65",
    ),
    "offset below 0": ({"offset_bytes": -64}, SOURCE, "multiple of 64, found -64"),
    "rows behind the section": (
        {"section_rows": END - 1},
        SOURCE,
        f"section: expected rows within its {END - 1}, found 5 to {END - 1}",
    ),
    "rows before the section": ({"first_row": -1}, SOURCE, "expected rows within its 40, found -1"),
    "end of host memory": (
        {"offset_bytes": HOST_BYTES - 64},
        SOURCE,
        f"section: expected an end within the {HOST_BYTES} bytes of the host buffer, found ",
    ),
    "no table": ({}, SOURCE[:1], "block ids of KV cache group 1: expected a table of every group"),
    "a short table": (
        {"end_tokens": 60, "section_rows": 100},
        SOURCE,
        "block ids of KV cache group 0: expected pages 0 to 7, found 0 to 5",
    ),
    "a part that begins later": (
        {},
        (TablePart(1, (9, 4, 11, 7)), SOURCE[1]),
        "block ids of KV cache group 0: expected pages 0 to 4, found 1 to 5",
    ),
    "a null page": (
        {},
        (SOURCE[0], TablePart(0, (5, 12, 0, 10, 8))),
        "group 1: expected pages 1 to 23, found 0 for page 2 of the request, the null page",
    ),
    "a page that is not there": (
        {},
        (TablePart(0, (3, 9, 4, NUM_PAGES, 7)), SOURCE[1]),
        "group 0: expected pages 1 to 23, found 24 for page 3 of the request.",
    ),
    "a negative page": (
        {},
        (TablePart(0, (3, 9, 4, -1, 7)), SOURCE[1]),
        "group 0: expected pages 1 to 23, found -1 for page 3 of the request.",
    ),
}


@pytest.mark.parametrize("direction", ["store", "load"])
@pytest.mark.parametrize("name", REFUSED)
def test_what_does_not_fit_is_refused_before_a_byte_moves(name: str, direction: str) -> None:
    changes, tables, message = REFUSED[name]
    worker = Worker()
    worker.host.random_(0, 255)
    before, host = worker.snapshot(), worker.host.clone()
    # The first of the two would be all right.
    good = SegmentRows(36, 38, 64, 40, 5)
    jobs = [good, GOOD._replace(**changes)]
    longer = tuple(TablePart(table.first_page, (*table.ids, 22)) for table in tables)
    with pytest.raises(SegmentError, match=re.escape(message)) as caught:
        getattr(worker.mover, direction)(jobs, longer)
    assert re.fullmatch(
        r"segment with tokens .* of the request, .*: expected .*, found .*\. [A-Z].*\.",
        str(caught.value),
    )
    assert all(map(torch.equal, worker.tensors, before)) and torch.equal(worker.host, host)


def test_a_store_does_not_shift() -> None:
    with pytest.raises(SegmentError, match="shift: expected 0 for a store, found 4"):
        Worker().mover.store([GOOD._replace(shift_tokens=4)], SOURCE)


def test_a_token_is_loaded_once() -> None:
    worker = Worker()
    before = worker.snapshot()
    twice = [GOOD, SegmentRows(2, 4, 64, 40, 0)]
    with pytest.raises(SegmentError, match="tokens: expected none before 4, where another"):
        worker.mover.load(twice, SOURCE)
    assert all(map(torch.equal, worker.tensors, before))


@pytest.mark.parametrize(
    "other", [{"offset_bytes": 128}, {"section_rows": 41}, {"offset_bytes": 64 + 40 * 128}]
)
def test_sections_share_no_bytes(other: dict[str, int]) -> None:
    rows = [GOOD._replace(end_tokens=10), GOOD._replace(first_tokens=20, end_tokens=30, **other)]
    with pytest.raises(SegmentError, match="section: expected another one than at 64, which has"):
        Worker().mover.load(rows, SOURCE)


def test_parts_of_a_section_go_in_one_call(monkeypatch: pytest.MonkeyPatch) -> None:
    calls = []
    right = segment_mover.rotated_page_transfer

    def counted(*arguments: Any, **named: Any) -> None:
        calls.append(arguments)
        right(*arguments, **named)

    monkeypatch.setattr(segment_mover, "rotated_page_transfer", counted)
    worker = Worker()
    parts = [SegmentRows(3 + i, 5 + i, 64, 40, i, 7) for i in range(0, 30, 3)]
    worker.mover.load(parts, SOURCE)
    assert len(calls) == 1 and len(calls[0][3]) == 10
    worker.mover.load([*parts, SegmentRows(33, 35, 64, 40, 0, 8)], SOURCE)
    assert len(calls) == 3


def test_pages_that_are_gone_and_come_back_elsewhere() -> None:
    worker = Worker()
    worker.fill(random_rows(33), 3, SOURCE)
    worker.mover.retire()
    for move in (worker.mover.store, worker.mover.load):
        with pytest.raises(SegmentError, match="pages: expected those of a worker, found retired"):
            move([GOOD], SOURCE)
    moved = [tensor.clone() for tensor in worker.tensors]
    for tensor in worker.tensors:
        tensor.zero_()
    worker.mover.renew(worker.token_pages(moved))
    worker.mover.store([GOOD], SOURCE)
    assert worker.host.any()


def test_other_pages_are_refused() -> None:
    worker = Worker()
    fewer = CpuTokenPages(
        [CpuLayer("layers.0", 0, worker.tensors[0][:, 0], worker.tensors[0][:, 1], SIGNATURES[0])],
        worker.backend.write_rows,
    )
    with pytest.raises(SegmentError, match=r"expected planes of 6 planes \(128, .* found 2 planes"):
        worker.mover.renew(fewer)


def test_keys_of_the_first_layer_are_checked_in_host_memory() -> None:
    random = np.random.default_rng(0)
    token_ids = random.integers(0, 5, 33).tolist()
    of_token = random_rows(5)
    worker = Worker()
    rows = [row[token_ids] for row in of_token]
    # Layers behind the first one are something else.
    rows[2:] = random_rows(33)[2:]
    stored = SegmentRows(3, 36, 64, 40, 5, 0, tuple(token_ids))
    worker.fill(turned(rows, 3 + np.arange(33)), 3, SOURCE)
    worker.mover.store([stored], SOURCE)
    assert worker.mover.check_keys([stored]).outcome is KeyCheckOutcome.PASSED
    shuffled = tuple(random.permutation(token_ids).tolist())
    found = worker.mover.check_keys([stored._replace(token_ids=shuffled)])
    assert found.outcome is KeyCheckOutcome.FAILED
    worker.fill(rows, 3, SOURCE)
    worker.mover.store([stored], SOURCE)
    found = worker.mover.check_keys([stored])
    assert found.outcome is KeyCheckOutcome.FAILED and found.message.startswith("keys of the first")


def test_keys_of_small_chunks_are_checked_together() -> None:
    """Each token occurs twice, in two chunks. Sections lie in any order, with a gap before one."""
    token_ids = (*range(12), *range(10))
    of_token = random_rows(12)
    worker = Worker()
    rows = [row[list(token_ids)] for row in of_token]
    worker.fill(turned(rows, 3 + np.arange(22)), 3, SOURCE)
    chunks = [
        SegmentRows(3 + first, 3 + end, offset, end - first, 0, 0, token_ids[first:end])
        for first, end, offset in ((0, 5, 4096), (5, 10, 64), (12, 22, 8192))
    ]
    worker.mover.store(chunks, SOURCE)
    for chunk in chunks:
        assert worker.mover.check_keys([chunk]).outcome is KeyCheckOutcome.NOT_CHECKED
    found = worker.mover.check_keys(chunks)
    assert found.outcome is KeyCheckOutcome.PASSED
    assert found.message.startswith("10 pairs of equal tokens")
    swapped = [chunks[0]._replace(offset_bytes=64), chunks[1]._replace(offset_bytes=4096)]
    found = worker.mover.check_keys([*swapped, chunks[2]])
    assert found.outcome is KeyCheckOutcome.FAILED
