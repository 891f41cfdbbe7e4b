# SPDX-License-Identifier: Apache-2.0
"""Rotations of random transfers, and what must come out: in numpy, in float64, row by row.

Knows the descriptor tables and their rules, nothing of how the compiled module rotates.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
from hypothesis import strategies as st
from numpy.typing import NDArray

from support.transfer.cases import (
    PAGES_TO_HOST,
    Bytes,
    GuardedBytes,
    Table,
    TransferCase,
    TransferMemory,
    assert_same,
    cases,
)
from vllm_ascend_kvext.transfer.key_rotation import KeyRotation
from vllm_ascend_kvext.transfer.schema import PairStyle, RotationColumn, RowDtype

ROW_BYTES = (4, 16, 64, 80, 128, 144, 256, 512, 1152, 2304, 4608, 9216)
"""As `cases` draws them; others are drawn, too, and those of odd sizes are not rotated."""

MAX_POSITIONS = 1 << 30

Numbers = NDArray[np.float64]


@dataclass(frozen=True, slots=True)
class RotatedCase:
    """A transfer, and how its keys turn."""

    transfer: TransferCase
    rotation: KeyRotation


def table(rows: list[tuple[int, ...]], num_columns: int) -> Table:
    return np.array(rows, np.int64).reshape(len(rows), num_columns)


@st.composite
def rotated_cases(draw: st.DrawFn) -> RotatedCase:
    """Valid transfers some of whose planes are rotated."""
    transfer = draw(cases(row_bytes=ROW_BYTES, max_page_bytes=30_000))
    num_frequencies = draw(st.integers(1, 150))
    random = np.random.default_rng(draw(st.integers(0, 1000)))
    frequencies = random.random(num_frequencies) ** draw(st.sampled_from((1, 8)))
    frequencies[: draw(st.integers(0, 2))] = 0.0
    rows = []
    for plane in draw(st.permutations(range(len(transfer.planes)))):
        row_bytes = int(transfer.planes[plane, 5])
        dtype = draw(st.sampled_from(list(RowDtype)))
        num_elements, rest = divmod(row_bytes, dtype.element_bytes)
        num_heads = draw(st.sampled_from([n for n in (1, 2, 3, 8) if num_elements % n == 0] or [1]))
        head_elements = num_elements // num_heads
        max_pairs = min(head_elements // 2, num_frequencies)
        if rest or max_pairs == 0 or draw(st.integers(0, 4)) == 0:
            continue
        num_pairs = draw(st.sampled_from((max_pairs, max_pairs, 1, (max_pairs + 1) // 2)))
        offset = draw(st.integers(0, head_elements - 2 * num_pairs))
        rows.append(
            (
                *(plane, dtype, draw(st.sampled_from(list(PairStyle))), num_heads),
                *(head_elements * dtype.element_bytes, offset * dtype.element_bytes, num_pairs),
                draw(st.integers(0, num_frequencies - num_pairs)),
            )
        )
    positions = st.one_of(
        st.sampled_from((0, 1, -1, 1_000_000, -999_983, MAX_POSITIONS)),
        st.integers(-100_000, 100_000),
    )
    groups = sorted({int(group) for group in transfer.planes[:, 0]})
    shifts = [(group, draw(positions)) for group in groups]
    return RotatedCase(transfer, KeyRotation(table(rows, 8), table(shifts, 2), frequencies))


def numbers_of(data: Bytes, dtype: RowDtype) -> Numbers:
    """Of bytes, in their order."""
    if dtype == RowDtype.FLOAT32:
        return data.view(np.float32).astype(np.float64)
    if dtype == RowDtype.FLOAT16:
        return data.view(np.float16).astype(np.float64)
    return (data.view(np.uint16).astype(np.uint32) << 16).view(np.float32).astype(np.float64)


def bytes_of(numbers: NDArray[np.float32], dtype: RowDtype) -> Bytes:
    """The lower half of a bfloat16 is cut off."""
    if dtype == RowDtype.FLOAT32:
        return numbers.astype(np.float32).view(np.uint8)
    if dtype == RowDtype.FLOAT16:
        return numbers.astype(np.float16).view(np.uint8)
    upper = numbers.astype(np.float32).view(np.uint32) >> 16
    return upper.astype(np.uint16).view(np.uint8)


def pairs_of(numbers: Numbers, style: int) -> tuple[Numbers, Numbers]:
    """First and second numbers, shape ``[..., num_pairs]``, of ``[..., 2 * num_pairs]``."""
    if style == PairStyle.NEIGHBOURS:
        return numbers[..., ::2], numbers[..., 1::2]
    half = numbers.shape[-1] // 2
    return numbers[..., :half], numbers[..., half:]


@dataclass(frozen=True, slots=True)
class _RotatedPart:
    """The rotated part of one head of one row, on both sides."""

    source: tuple[int, slice]  # allocation as of `TransferMemory.snapshot`, bytes
    destination: tuple[int, slice]
    rotation: tuple[int, ...]
    positions: int


def rotated_parts(case: RotatedCase, memory: TransferMemory) -> Iterator[_RotatedPart]:
    """Of all planes that are named, also where the shift is 0."""
    shifts = dict(case.rotation.shifts.tolist())
    host = len(memory.pools)
    for rotation in case.rotation.rotations.tolist():
        plane, dtype, _, num_heads, head_bytes, offset, num_pairs, _ = rotation
        group, pool, base, stride, region, row_bytes, _, _, host_offset = (
            case.transfer.planes.tolist()[plane]
        )
        num_bytes = 2 * num_pairs * RowDtype(dtype).element_bytes
        for run_group, page, first_row, num_rows, host_row in case.transfer.runs.tolist():
            if run_group != group:
                continue
            for row in range(num_rows):
                in_pool = base + page * stride + region + (first_row + row) * row_bytes
                in_host = host_offset + (host_row + row) * row_bytes
                for head in range(num_heads):
                    skipped = head * head_bytes + offset
                    sides = (
                        (pool, _span(memory.pools[pool], in_pool + skipped, num_bytes)),
                        (host, _span(memory.host, in_host + skipped, num_bytes)),
                    )
                    is_store = case.transfer.direction == PAGES_TO_HOST
                    yield _RotatedPart(
                        sides[0] if is_store else sides[1],
                        sides[1] if is_store else sides[0],
                        tuple(rotation),
                        shifts[group],
                    )


def _span(region: GuardedBytes, first_byte: int, num_bytes: int) -> slice:
    start = region.address - region.whole.ctypes.data + first_byte
    return slice(start, start + num_bytes)


def fill_with_numbers(case: RotatedCase, memory: TransferMemory, seed: int = 0) -> None:
    """Gives the parts that will be rotated numbers of their types: random bytes may be none."""
    random = np.random.default_rng(seed)
    regions = [region.whole for region in (*memory.pools, memory.host)]
    for part in rotated_parts(case, memory):
        allocation, where = part.source
        count = 2 * part.rotation[RotationColumn.NUM_PAIRS]
        numbers = random.normal(size=count) * random.choice((1.0, 1e-3, 30.0))
        dtype = RowDtype(part.rotation[RotationColumn.DTYPE])
        regions[allocation][where] = bytes_of(numbers.astype(np.float32), dtype)


def assert_rotated(
    case: RotatedCase,
    memory: TransferMemory,
    before: tuple[Bytes, ...],
    expected: tuple[Bytes, ...],
) -> None:
    """The keys have turned, and every other byte is as after a transfer that rotates nothing.

    Args:
        case: What has run.
        memory: Where.
        before: Its snapshot from before.
        expected: `TransferMemory.after` the transfer, from before.
    """
    found = memory.snapshot()
    for part in rotated_parts(case, memory):
        if part.positions == 0:
            continue
        source, destination = before[part.source[0]], found[part.destination[0]]
        _assert_turned(
            part, case.rotation, source[part.source[1]], destination[part.destination[1]]
        )
        expected_part = expected[part.destination[0]][part.destination[1]]
        destination[part.destination[1]] = expected_part
    assert_same(found, expected)


# Half a unit in the last place, relative to the number; and of the smallest number.
ROUNDING = {
    RowDtype.FLOAT32: (2.0**-24, 2.0**-149),
    RowDtype.BFLOAT16: (2.0**-8, 2.0**-134),
    RowDtype.FLOAT16: (2.0**-11, 2.0**-25),
}


def _assert_turned(
    part: _RotatedPart, rotation: KeyRotation, source: Bytes, destination: Bytes
) -> None:
    _, dtype, style, *_, num_pairs, first = part.rotation
    angles = part.positions * rotation.frequencies[first : first + num_pairs]
    a, b = pairs_of(numbers_of(source.copy(), RowDtype(dtype)), style)
    found = pairs_of(numbers_of(destination.copy(), RowDtype(dtype)), style)
    wanted = a * np.cos(angles) - b * np.sin(angles), b * np.cos(angles) + a * np.sin(angles)
    # Float32 inside: angles, products and sum are rounded once each.
    inside = 5 * 2.0**-24 * (np.abs(a) + np.abs(b))
    relative, absolute = ROUNDING[RowDtype(dtype)]
    for number, exact in zip(found, wanted, strict=True):
        limit = inside + relative * (np.abs(exact) + inside) + absolute
        worst = np.max(np.abs(number - exact) - limit)
        assert worst <= 0, f"{part.rotation} by {part.positions}: off by {worst} beyond rounding"
