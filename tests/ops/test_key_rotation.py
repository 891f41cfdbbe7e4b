# SPDX-License-Identifier: Apache-2.0
"""The transfer op that rotates keys: exact angles, one rounding, and no other byte."""

from __future__ import annotations

import math
import re

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from support.transfer.cases import (
    HOST_TO_PAGES,
    TransferMemory,
    assert_same,
    uniform_case,
)
from support.transfer.rotation import (
    RotatedCase,
    assert_rotated,
    fill_with_numbers,
    rotated_cases,
    table,
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

SLOW = settings(max_examples=300, suppress_health_check=list(HealthCheck))

MOST = 2**63 - 1
MESSAGE = re.compile(
    r"(pools|planes|runs|host|rotations|shifts)\[\d+\]\.[a-z_]+: "
    r"expected [^.]*, found [^.]*\. [A-Z][^.]*\."
)


def run(case: RotatedCase, memory: TransferMemory, num_threads: int = 1, streaming: int = -1):
    native().rotated_page_transfer(
        *memory.descriptors(case.transfer), *case.rotation, num_threads, streaming
    )


def filled(case: RotatedCase, seed: int = 0) -> TransferMemory:
    memory = TransferMemory.random(case.transfer, seed)
    fill_with_numbers(case, memory, seed)
    return memory


@SLOW
@given(rotated_cases(), st.integers(1, 3), st.sampled_from((-1, 0, 1)))
def test_keys_turn_and_nothing_else_changes(case: RotatedCase, num_threads, streaming) -> None:
    memory = filled(case)
    before, expected = memory.snapshot(), memory.after(case.transfer)
    run(case, memory, num_threads, streaming)
    assert_rotated(case, memory, before, expected)


def key_case(
    *,
    dtype: RowDtype = RowDtype.BFLOAT16,
    style: PairStyle = PairStyle.HALVES,
    positions: int = 137,
    head_size: int = 64,
    num_pairs: int = 32,
    offset: int = 0,
    num_heads: int = 2,
    pages: tuple[int, ...] = (3, 1, 2),
    num_planes: int = 1,
    direction: int = HOST_TO_PAGES,
) -> RotatedCase:
    """Keys of whole pages of 16 tokens; frequencies as of RoPE with base 10,000."""
    head_bytes = head_size * dtype.element_bytes
    transfer = uniform_case(
        row_bytes=num_heads * head_bytes,
        rows_per_page=16,
        pages=pages,
        num_planes=num_planes,
        direction=direction,
    )
    rows = [
        (plane, dtype, style, num_heads, head_bytes, offset * dtype.element_bytes, num_pairs, 0)
        for plane in range(num_planes)
    ]
    frequencies = 10_000.0 ** (-np.arange(num_pairs) / num_pairs)
    return RotatedCase(
        transfer, KeyRotation(table(rows, 8), table([(0, positions)], 2), frequencies)
    )


KINDS = [(dtype, style) for dtype in RowDtype for style in PairStyle]


def test_angles_are_not_rounded_before_they_are_reduced() -> None:
    """At a million positions a float32 angle is wrong by up to 0.03."""
    case = key_case(dtype=RowDtype.FLOAT32, positions=999_983)
    memory = filled(case)
    before, expected = memory.snapshot(), memory.after(case.transfer)
    run(case, memory)
    assert_rotated(case, memory, before, expected)
    exact = np.cos(999_983 * case.rotation.frequencies)
    in_float32 = np.cos(np.float32(999_983) * case.rotation.frequencies.astype(np.float32))
    assert np.abs(exact - in_float32).max() > 1e-3


def test_a_shift_of_zero_keeps_every_bit() -> None:
    """Of what is no number, too."""
    case = key_case(positions=0, num_planes=2)
    memory = TransferMemory.random(case.transfer)
    expected = memory.after(case.transfer)
    run(case, memory)
    assert_same(memory.snapshot(), expected)


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
    moved = memory.pools[0].region[case.transfer.planes[0, 3] :]  # behind the null page
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
        KINDS, (64, 128, 80, 96, 36, 130), (32, 64, 20, 31, 18, 65), (0, 1) * 3, strict=True
    )
]


@pytest.mark.parametrize("case", LARGE)
@pytest.mark.parametrize("num_threads", [1, 2, 3])
def test_threads_and_streaming_change_no_bit(case: RotatedCase, num_threads: int) -> None:
    memory = filled(case)
    before, unrotated = memory.snapshot(), memory.after(case.transfer)
    run(case, memory)
    expected = memory.snapshot()
    assert_rotated(case, memory, before, unrotated)
    for streaming in (0, 1):
        for region, was in zip((*memory.pools, memory.host), before, strict=True):
            region.whole[:] = was
        run(case, memory, num_threads, streaming)
        assert_same(memory.snapshot(), expected)


def test_tensors_are_what_callers_have() -> None:
    case = key_case(pages=tuple(range(1, 30)))
    memory = filled(case)
    before, expected = memory.snapshot(), memory.after(case.transfer)
    rotated_page_transfer(
        Pools([torch.from_numpy(pool.region) for pool in memory.pools]),
        torch.from_numpy(memory.host.region),
        case.transfer.planes,
        case.transfer.runs,
        Direction(case.transfer.direction),
        case.rotation,
        placement=CALLING_THREAD._replace(num_threads=2),
    )
    assert_rotated(case, memory, before, expected)


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
    """The refusal, which has written nothing."""
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
    message = said_against(wrong, filled(case))
    assert message == (
        f"frequencies: expected float64, one dimension, contiguous, found {found}. Build it with "
        "numpy.ascontiguousarray(frequencies, numpy.float64)."
    )


def test_the_columns_are_those_of_the_compiled_module() -> None:
    case = key_case()
    for name, columns in (("rotations", RotationColumn), ("shifts", ShiftColumn)):
        narrow = case.rotation._replace(**{name: np.zeros((0, len(columns) - 1), np.int64)})
        message = said_against(RotatedCase(case.transfer, narrow), filled(case))
        assert f"shape [rows, {len(columns)}]" in message
