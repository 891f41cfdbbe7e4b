# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vllm-ascend-kvext project
"""The transfer op that rotates keys: exact angles, one rounding, and no other byte.

The expected rows are computed in numpy, in float64, row by row.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import product

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray
from support.sample import sampled
from support.transfer.cases import (
    HOST_TO_PAGES,
    PAGES_TO_HOST,
    Bytes,
    Table,
    TransferCase,
    TransferMemory,
    assert_same,
    cases,
    uniform_case,
)

from vllm_ascend_kvext.native import native
from vllm_ascend_kvext.transfer.errors import BackendError, DescriptorError
from vllm_ascend_kvext.transfer.key_rotation import KeyRotation, rotated_page_transfer
from vllm_ascend_kvext.transfer.placement import CALLING_THREAD
from vllm_ascend_kvext.transfer.pools import Pools
from vllm_ascend_kvext.transfer.schema import (
    Direction,
    PairStyle,
    RotationColumn,
    RowDtype,
    ShiftColumn,
)

MOST = 2**63 - 1
MESSAGE = re.compile(
    r"(pools|planes|runs|host|rotations|shifts)\[\d+\]\.[a-z_]+: "
    r"expected [^.]*, found [^.]*\. [A-Z][^.]*\."
)

ROW_BYTES = (4, 16, 64, 80, 128, 144, 256, 512, 1152, 2304, 4608, 9216)
"""`cases` also draws others. Rows of odd sizes are not rotated."""

MAX_POSITIONS = 1 << 30

Numbers = NDArray[np.float64]


@dataclass(frozen=True, slots=True)
class RotatedCase:
    """A transfer, and the rotation of its keys."""

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
    """The numbers of bytes, in their order."""
    if dtype == RowDtype.FLOAT32:
        return data.view(np.float32).astype(np.float64)
    if dtype == RowDtype.FLOAT16:
        return data.view(np.float16).astype(np.float64)
    return (data.view(np.uint16).astype(np.uint32) << 16).view(np.float32).astype(np.float64)


def bytes_of(numbers: NDArray[np.float32], dtype: RowDtype) -> Bytes:
    """The lower half of a float32 is cut off to make a bfloat16."""
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


def rotated_parts(
    case: RotatedCase, memory: TransferMemory, allocations: tuple[Bytes, ...], of_source: bool
) -> Iterator[tuple[list[int], int, Bytes]]:
    """The rotated part of each run: its row of rotations, its shift, and a view of its bytes.

    ``allocations`` are as of ``TransferMemory.snapshot``. shape: [rows, heads, bytes].
    """
    shifts = dict(case.rotation.shifts.tolist())
    is_in_pool = (case.transfer.direction == PAGES_TO_HOST) == of_source
    planes, runs = case.transfer.planes.tolist(), case.transfer.runs.tolist()
    for rotation in case.rotation.rotations.tolist():
        plane, dtype, _, num_heads, head_bytes, offset, num_pairs, _ = rotation
        group, pool, base, stride, region, row_bytes, _, _, host_offset = planes[plane]
        end = offset + 2 * num_pairs * RowDtype(dtype).element_bytes
        for run_group, page, first_row, num_rows, host_row in runs:
            if run_group != group or shifts[group] == 0:
                continue
            index, guarded, first = -1, memory.host, host_offset + host_row * row_bytes
            if is_in_pool:
                index, guarded = pool, memory.pools[pool]
                first = base + page * stride + region + first_row * row_bytes
            first += guarded.address - guarded.whole.ctypes.data
            rows = allocations[index][first : first + num_rows * row_bytes]
            heads = rows.reshape(num_rows, num_heads, head_bytes)
            yield rotation, shifts[group], heads[..., offset:end]


def filled(case: RotatedCase, seed: int = 0) -> TransferMemory:
    """Rotated parts have numbers of their types. The random bytes of other parts may be NaN."""
    memory = TransferMemory.random(case.transfer, seed)
    random = np.random.default_rng(seed)
    allocations = tuple(region.whole for region in (*memory.pools, memory.host))
    for rotation, _, part in rotated_parts(case, memory, allocations, of_source=True):
        dtype = RowDtype(rotation[RotationColumn.DTYPE])
        shape = *part.shape[:2], part.shape[2] // dtype.element_bytes
        numbers = random.normal(size=shape) * random.choice((1.0, 1e-3, 30.0))
        part[:] = bytes_of(numbers.astype(np.float32), dtype)
    return memory


def run(case: RotatedCase, memory: TransferMemory, num_threads: int = 1, streaming: int = -1):
    """Run a case as callers do. A ``streaming`` of 0 or 1 says whether copies bypass the caches."""
    if streaming in (0, 1):
        native().rotated_page_transfer(
            *memory.descriptors(case.transfer), *case.rotation, num_threads, streaming
        )
        return
    rotated_page_transfer(
        Pools([torch.from_numpy(pool.region) for pool in memory.pools]),
        torch.from_numpy(memory.host.region),
        case.transfer.planes,
        case.transfer.runs,
        Direction(case.transfer.direction),
        case.rotation,
        placement=CALLING_THREAD._replace(num_threads=num_threads),
    )


def assert_rotates(case: RotatedCase, memory: TransferMemory, *options: int) -> None:
    """The keys turn, and every other byte is as after a transfer without rotation."""
    before, expected = memory.snapshot(), memory.after(case.transfer)
    run(case, memory, *options)
    found = memory.snapshot()
    sides = (before, True), (found, False), (expected, False)
    parts = (rotated_parts(case, memory, *side) for side in sides)
    for (rotation, shift, source), (*_, destination), (*_, unrotated) in zip(*parts, strict=True):
        assert_turned(case.rotation.frequencies, rotation, shift, source, destination)
        destination[:] = unrotated
    assert_same(found, expected)


# Half a unit in the last place, relative to the number, and half of the smallest number.
ROUNDING = {
    RowDtype.FLOAT32: (2.0**-24, 2.0**-149),
    RowDtype.BFLOAT16: (2.0**-8, 2.0**-134),
    RowDtype.FLOAT16: (2.0**-11, 2.0**-25),
}


def assert_turned(
    frequencies: Numbers, rotation: list[int], shift: int, source: Bytes, destination: Bytes
) -> None:
    _, dtype, style, *_, num_pairs, first = rotation
    angles = shift * frequencies[first : first + num_pairs]
    a, b = pairs_of(numbers_of(source.copy(), RowDtype(dtype)), style)
    found = pairs_of(numbers_of(destination.copy(), RowDtype(dtype)), style)
    wanted = a * np.cos(angles) - b * np.sin(angles), b * np.cos(angles) + a * np.sin(angles)
    # The op computes in float32: angles, products and the sum are rounded once each.
    inside = 5 * 2.0**-24 * (np.abs(a) + np.abs(b))
    relative, absolute = ROUNDING[RowDtype(dtype)]
    for number, exact in zip(found, wanted, strict=True):
        limit = inside + relative * (np.abs(exact) + inside) + absolute
        worst = np.max(np.abs(number - exact) - limit)
        assert worst <= 0, f"{rotation} by {shift}: off by {worst} beyond rounding"


@settings(max_examples=sampled(300), suppress_health_check=list(HealthCheck))
@given(rotated_cases(), st.integers(1, 3), st.sampled_from((-1, 0, 1)))
def test_keys_turn_and_nothing_else_changes(case: RotatedCase, num_threads, streaming) -> None:
    """A shift of zero keeps every bit, of NaN, too."""
    assert_rotates(case, filled(case), num_threads, streaming)


def key_case(
    *,
    dtype: RowDtype = RowDtype.BFLOAT16,
    style: PairStyle = PairStyle.HALVES,
    positions: int = 137,
    head_size: int = 64,
    num_pairs: int = 32,
    num_heads: int = 2,
    pages: tuple[int, ...] = (3, 1, 2),
    num_planes: int = 1,
    direction: int = HOST_TO_PAGES,
) -> RotatedCase:
    """Keys of whole pages of 16 tokens, with the frequencies of RoPE with base 10,000."""
    head_bytes = head_size * dtype.element_bytes
    transfer = uniform_case(
        row_bytes=num_heads * head_bytes,
        rows_per_page=16,
        pages=pages,
        num_planes=num_planes,
        direction=direction,
    )
    rows = [
        (plane, dtype, style, num_heads, head_bytes, 0, num_pairs, 0) for plane in range(num_planes)
    ]
    frequencies = 10_000.0 ** (-np.arange(num_pairs) / num_pairs)
    return RotatedCase(
        transfer, KeyRotation(table(rows, 8), table([(0, positions)], 2), frequencies)
    )


@pytest.mark.parametrize("dtype", [RowDtype.BFLOAT16, RowDtype.FLOAT16])
@pytest.mark.parametrize("style", list(PairStyle))
@pytest.mark.parametrize("frequency", [0.0, 1.0, math.acos(0.75), math.pi / 3])
def test_every_half_is_widened_and_rounded_as_torch_does(dtype, style, frequency) -> None:
    """All 65,536 of them, each beside a zero: the product with cosine and sine is all there is.

    Three quarters make many ties, and a half those of the smallest numbers.
    """
    halves = np.arange(1 << 16, dtype=np.uint16)
    pairs = np.zeros((len(halves) // 16, 2, 16), np.uint16)
    pairs[:, 0] = halves.reshape(-1, 16)
    if style == PairStyle.NEIGHBOURS:
        pairs = pairs.swapaxes(1, 2)
    positions = 1
    case = key_case(
        dtype=dtype,
        style=style,
        positions=positions,
        head_size=32,
        num_pairs=16,
        num_heads=1,
        pages=tuple(range(1, len(pairs) // 16 + 1)),
    )
    case = RotatedCase(case.transfer, case.rotation._replace(frequencies=np.full(16, frequency)))
    memory = TransferMemory.random(case.transfer)
    memory.host.region[:] = np.ascontiguousarray(pairs).view(np.uint8).reshape(-1)
    run(case, memory)
    # The page lies behind the null page.
    moved = memory.pools[0].region[case.transfer.planes[0, 3] :]
    found = np.ascontiguousarray(moved).view(np.uint16).reshape(pairs.shape)
    if style == PairStyle.NEIGHBOURS:
        found = found.swapaxes(1, 2)
    as_torch = torch.bfloat16 if dtype == RowDtype.BFLOAT16 else torch.float16
    numbers = torch.from_numpy(halves.view(np.int16).copy()).view(as_torch).float()
    for side, factor in enumerate(
        (math.cos(positions * frequency), math.sin(positions * frequency))
    ):
        wanted = (numbers * torch.tensor(factor, dtype=torch.float32)).to(as_torch)
        got = torch.from_numpy(found[:, side].reshape(-1).view(np.int16).copy()).view(as_torch)
        is_number = torch.isfinite(numbers)
        assert torch.equal(got[is_number], wanted[is_number])
        assert not torch.isfinite(got[~is_number]).any() or factor == 0
        assert torch.isnan(got[torch.isnan(numbers)]).all()


LARGE = [
    key_case(
        dtype=dtype,
        style=style,
        head_size=head_size,
        num_pairs=num_pairs,
        num_heads=3,
        pages=tuple(range(1, 90)),
        num_planes=2,
        direction=direction,
    )
    for (dtype, style), head_size, num_pairs, direction in zip(
        product(RowDtype, PairStyle),
        (64, 128, 80, 96, 36, 130),
        (32, 64, 20, 31, 18, 65),
        (0, 1) * 3,
        strict=True,
    )
]


@pytest.mark.parametrize("case", LARGE)
@pytest.mark.parametrize("num_threads", [1, 2, 3])
def test_threads_and_streaming_change_no_bit(case: RotatedCase, num_threads: int) -> None:
    memory = filled(case)
    before = memory.snapshot()
    assert_rotates(case, memory)
    expected = memory.snapshot()
    for streaming in (0, 1):
        for region, was in zip((*memory.pools, memory.host), before, strict=True):
            region.whole[:] = was
        run(case, memory, num_threads, streaming)
        assert_same(memory.snapshot(), expected)


def test_no_runs_move_nothing() -> None:
    case = key_case()
    memory = filled(case)
    before = memory.snapshot()
    tables = case.transfer.planes, case.transfer.runs[:0]
    pools = Pools([torch.from_numpy(pool.region) for pool in memory.pools])
    host = torch.from_numpy(memory.host.region)
    no_shifts = case.rotation._replace(shifts=case.rotation.shifts[:0])
    for rotation in (case.rotation, no_shifts):
        rotated_page_transfer(pools, host, *tables, Direction.HOST_TO_PAGES, rotation)
    assert_same(memory.snapshot(), before)


def test_pools_on_a_device_are_refused() -> None:
    case = key_case()
    pools = Pools([torch.zeros(8, dtype=torch.uint8, device="meta")])
    host = torch.zeros(8, dtype=torch.uint8)
    tables = case.transfer.planes, case.transfer.runs
    with pytest.raises(BackendError, match="pools: expected all of them on cpu, found meta: keys"):
        rotated_page_transfer(pools, host, *tables, Direction.HOST_TO_PAGES, case.rotation)


# Two planes of 2 heads of 64 bfloat16, 32 pairs each, of group 0.
WRONG_CELLS = [
    (1, RotationColumn.PLANE, 2, "a row of planes, which has 2"),
    (1, RotationColumn.PLANE, -1, "a row of planes, which has 2"),
    (1, RotationColumn.PLANE, 0, "a plane that no other row names: rotations[0] does"),
    (0, RotationColumn.DTYPE, 3, "0 (float32), 1 (bfloat16) or 2 (float16)"),
    (0, RotationColumn.DTYPE, -1, "0 (float32), 1 (bfloat16) or 2 (float16)"),
    (0, RotationColumn.PAIR_STYLE, 2, "0 (halves) or 1 (neighbours)"),
    (0, RotationColumn.NUM_HEADS, 0, "at least 1"),
    (0, RotationColumn.NUM_HEADS, 3, "heads that fill the 256 bytes of a row of planes[0]"),
    (0, RotationColumn.NUM_HEADS, 1, "heads that fill the 256 bytes of a row of planes[0]"),
    (0, RotationColumn.NUM_HEADS, MOST, "heads that fill the 256 bytes of a row of planes[0]"),
    (0, RotationColumn.HEAD_BYTES, 0, "at least 1"),
    (0, RotationColumn.HEAD_BYTES, 127, "a multiple of the element's 2 bytes"),
    (0, RotationColumn.HEAD_BYTES, 256, "heads that fill the 256 bytes"),
    (0, RotationColumn.OFFSET_BYTES, -2, "at least 0"),
    (0, RotationColumn.OFFSET_BYTES, 1, "a multiple of the element's 2 bytes"),
    (0, RotationColumn.OFFSET_BYTES, 2, "pairs that end within the 128 bytes of a head"),
    (0, RotationColumn.OFFSET_BYTES, MOST - 1, "pairs that end within the 128 bytes of a head"),
    (0, RotationColumn.NUM_PAIRS, 0, "at least 1"),
    (0, RotationColumn.NUM_PAIRS, 33, "pairs that end within the 128 bytes of a head"),
    (0, RotationColumn.NUM_PAIRS, MOST, "pairs that end within the 128 bytes of a head"),
    (0, RotationColumn.FIRST_FREQUENCY, -1, "at least 0"),
    (0, RotationColumn.FIRST_FREQUENCY, 1, "pairs with a frequency each, of 32"),
    (0, RotationColumn.FIRST_FREQUENCY, MOST, "pairs with a frequency each, of 32"),
]


def said_against(case: RotatedCase, memory: TransferMemory) -> str:
    """The refusal. Nothing has been written."""
    before = memory.snapshot()
    with pytest.raises(DescriptorError) as caught:
        run(case, memory)
    assert_same(memory.snapshot(), before)
    return str(caught.value)


@pytest.mark.parametrize(("row", "column", "value", "expected"), WRONG_CELLS)
def test_it_names_the_cell_and_what_was_found(row, column, value, expected) -> None:
    case = key_case(num_planes=2)
    case.rotation.rotations[row, column] = value
    message = said_against(case, filled(key_case(num_planes=2)))
    assert message.startswith(f"rotations[{row}].") and MESSAGE.fullmatch(message), message
    assert expected in message


@pytest.mark.parametrize(
    ("shifts", "where", "expected"),
    [
        ([], "rotations[0].plane", "a plane of a group that shifts names, as it has runs"),
        ([(0, 1), (0, 2)], "shifts[1].group", "more than 0, the group before it"),
        ([(1, 5), (0, 5)], "shifts[0].group", "a group that one of the 2 planes has"),
        ([(-1, 5)], "shifts[0].group", "a group that one of the 2 planes has"),
        ([(0, 2**30 + 1)], "shifts[0].positions", "-1073741824 to 1073741824"),
        ([(0, -(2**30) - 1)], "shifts[0].positions", "-1073741824 to 1073741824"),
        ([(0, -MOST - 1)], "shifts[0].positions", "-1073741824 to 1073741824"),
    ],
)
def test_a_wrong_shift_is_refused(shifts, where: str, expected: str) -> None:
    case = key_case(num_planes=2)
    wrong = RotatedCase(case.transfer, case.rotation._replace(shifts=table(shifts, 2)))
    message = said_against(wrong, filled(case))
    assert message.startswith(f"{where}: ") and MESSAGE.fullmatch(message), message
    assert expected in message


@pytest.mark.parametrize("value", [-1e-9, 6.2832, math.nan, math.inf])
def test_a_wrong_frequency_is_refused(value: float) -> None:
    case = key_case()
    frequencies = case.rotation.frequencies.copy()
    frequencies[7] = value
    wrong = RotatedCase(case.transfer, case.rotation._replace(frequencies=frequencies))
    message = said_against(wrong, filled(case))
    assert message.startswith("frequencies[7]: expected 0 to 2 pi radians per position, found")


@pytest.mark.parametrize(
    ("frequencies", "found"),
    [
        (np.zeros(32, np.float32), "format 'f', 1 dimensions"),
        (np.zeros((32, 1)), "format 'd', 2 dimensions"),
        (np.zeros(64)[::2], "format 'd', 1 dimensions"),
        (None, "an object without a buffer"),
    ],
)
def test_frequencies_have_the_right_type(frequencies, found: str) -> None:
    case = key_case()
    wrong = RotatedCase(case.transfer, case.rotation._replace(frequencies=frequencies))
    assert said_against(wrong, filled(case)) == (
        f"frequencies: expected float64, one dimension, contiguous, found {found}. Build it with "
        "numpy.ascontiguousarray(frequencies, numpy.float64)."
    )


def test_the_columns_are_those_of_the_compiled_module() -> None:
    case = key_case()
    for name, columns in (("rotations", RotationColumn), ("shifts", ShiftColumn)):
        narrow = case.rotation._replace(**{name: np.zeros((0, len(columns) - 1), np.int64)})
        message = said_against(RotatedCase(case.transfer, narrow), filled(case))
        assert f"shape [rows, {len(columns)}]" in message
