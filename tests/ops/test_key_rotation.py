# SPDX-License-Identifier: Apache-2.0
"""The transfer op that rotates keys: exact angles, one rounding, and no other byte."""

from __future__ import annotations

import math
import re

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, assume, given, settings
from hypothesis import strategies as st
from support.transfer.cases import (
    HOST_TO_PAGES,
    PAGES_TO_HOST,
    TransferMemory,
    assert_same,
    cut_into_chunks,
    uniform_case,
)
from support.transfer.rotation import (
    RotatedCase,
    assert_rotated,
    bytes_of,
    fill_with_numbers,
    numbers_of,
    rotated_cases,
    rotated_parts,
    table,
)

from vllm_ascend_kvext.native import native
from vllm_ascend_kvext.transfer.errors import BackendError, DescriptorError
from vllm_ascend_kvext.transfer.key_rotation import KeyRotation, rotated_page_transfer
from vllm_ascend_kvext.transfer.schema import (
    Direction,
    PairStyle,
    RotationColumn,
    RowDtype,
    ShiftColumn,
)

SLOW = settings(max_examples=300, deadline=None, suppress_health_check=list(HealthCheck))

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


@SLOW
@given(rotated_cases(is_one_to_one=True))
def test_turned_and_turned_back_is_what_it_was(case: RotatedCase) -> None:
    memory = filled(case)
    originals = memory.snapshot()
    run(case, memory)
    for part in rotated_parts(case, memory):
        regions = [region.whole for region in (*memory.pools, memory.host)]
        regions[part.source[0]][part.source[1]] ^= 0xFF
    run(case.reversed(), memory)
    restored = memory.snapshot()
    for part in rotated_parts(case, memory):
        allocation, where = part.source
        dtype = RowDtype(part.rotation[RotationColumn.DTYPE])
        wanted = numbers_of(originals[allocation][where].copy(), dtype)
        found = numbers_of(restored[allocation][where].copy(), dtype)
        if part.positions == 0:
            assert np.array_equal(found, wanted)
        rounding = {0: 2e-6, 1: 2.0**-6, 2: 2.0**-9}[dtype]
        largest = np.abs(wanted).max()
        assert np.abs(found - wanted).max() <= rounding * largest + 2.0**-23


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


@pytest.mark.parametrize(("dtype", "style"), KINDS)
@pytest.mark.parametrize("wrong", ["not rotated", "one position further", "the other pairs"])
def test_the_comparison_sees_a_wrong_rotation(dtype, style, wrong) -> None:
    case = key_case(dtype=dtype, style=style)
    done = {
        "not rotated": case.moved_further(-137),
        "one position further": case.moved_further(1),
        "the other pairs": case.with_column(RotationColumn.PAIR_STYLE, 1 - style),
    }[wrong]
    memory = filled(case)
    before, expected = memory.snapshot(), memory.after(case.transfer)
    run(done, memory)
    with pytest.raises(AssertionError, match="beyond rounding"):
        assert_rotated(case, memory, before, expected)


@pytest.mark.parametrize(("dtype", "style"), KINDS)
@pytest.mark.parametrize(
    ("head_size", "num_pairs", "offset"),
    [
        (64, 32, 0),
        (128, 64, 0),
        (80, 16, 0),
        (96, 48, 0),
        (576, 32, 512),
        (20, 5, 3),
        (256, 96, 64),
    ],
)
def test_every_shape_of_heads(dtype, style, head_size, num_pairs, offset) -> None:
    shape = {"head_size": head_size, "num_pairs": num_pairs, "offset": offset}
    case = key_case(dtype=dtype, style=style, **shape)
    for direction in Direction:
        moved = RotatedCase(
            key_case(dtype=dtype, direction=direction, **shape).transfer, case.rotation
        )
        memory = filled(moved)
        before, expected = memory.snapshot(), memory.after(moved.transfer)
        run(moved, memory)
        assert_rotated(moved, memory, before, expected)


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


def test_segments_have_shifts_of_their_own() -> None:
    """Three in one call: their rows begin anywhere in a page and in the host buffer."""
    planes = [(group, pool, 0, 2048, 0, 128, 16, 9, group * 4096 + pool * 2048)
              for group in range(3) for pool in range(2)]  # fmt: skip
    runs = [(0, 1, 5, 11, 0), (0, 2, 0, 4, 11), (1, 2, 4, 12, 3), (1, 5, 0, 1, 15), (2, 5, 1, 9, 0)]
    transfer = uniform_case(row_bytes=128, rows_per_page=16, pages=tuple(range(1, 9)), num_planes=2)
    transfer = type(transfer)(
        pool_bytes=transfer.pool_bytes,
        host_bytes=3 * 4096,
        planes=table(planes, 9),
        runs=table(runs, 5),
        direction=HOST_TO_PAGES,
        misalignment_bytes=transfer.misalignment_bytes,
    )
    # Plane 2 * group is the keys', the next one the values'.
    keys = [
        (2 * group, RowDtype.BFLOAT16, PairStyle.HALVES, 1, 128, 0, 32, 0) for group in range(3)
    ]
    shifts = [(0, 1000), (1, 0), (2, -77)]
    frequencies = 500_000.0 ** (-np.arange(32) / 32)
    case = RotatedCase(transfer, KeyRotation(table(keys, 8), table(shifts, 2), frequencies))
    memory = filled(case)
    before, expected = memory.snapshot(), memory.after(transfer)
    run(case, memory)
    assert_rotated(case, memory, before, expected)


@SLOW
@given(rotated_cases(), st.data())
def test_segments_cut_anywhere_turn_alike(case: RotatedCase, data: st.DataObject) -> None:
    """A transfer's rows as several groups with one shift: the same keys."""
    assume(len(case.rotation.rotations))
    parts = cut_into_chunks(case.transfer, data.draw)
    num_groups = int(case.transfer.planes[:, 0].max()) + 1
    shift_of = dict(case.rotation.shifts.tolist())
    of_plane = {row[0]: row for row in case.rotation.rotations.tolist()}
    # A plane of a part is the original that has its place in the pages.
    originals = [tuple(plane[1:8]) for plane in case.transfer.planes.tolist()]
    rows = []
    for index, plane in enumerate(parts.planes.tolist()):
        rotation = of_plane.get(originals.index(tuple(plane[1:8])))
        if rotation is not None:
            rows.append((index, *rotation[1:]))
    groups = sorted({int(group) for group in parts.planes[:, 0]})
    shifts = [(group, shift_of[group % num_groups]) for group in groups]
    cut = RotatedCase(
        parts, KeyRotation(table(rows, 8), table(shifts, 2), case.rotation.frequencies)
    )
    memory = filled(cut)
    before, expected = memory.snapshot(), memory.after(parts)
    run(cut, memory)
    assert_rotated(cut, memory, before, expected)


def through_tensors(case: RotatedCase, memory: TransferMemory, **options) -> None:
    rotated_page_transfer(
        [torch.from_numpy(pool.region) for pool in memory.pools],
        torch.from_numpy(memory.host.region),
        case.transfer.planes,
        case.transfer.runs,
        Direction(case.transfer.direction),
        case.rotation,
        **options,
    )


@pytest.mark.parametrize("num_threads", [None, 2])
def test_tensors_are_what_callers_have(num_threads: int | None) -> None:
    case = key_case(pages=tuple(range(1, 30)))
    memory = filled(case)
    before, expected = memory.snapshot(), memory.after(case.transfer)
    through_tensors(case, memory, num_threads=num_threads)
    assert_rotated(case, memory, before, expected)


def test_no_runs_move_nothing() -> None:
    case = key_case()
    memory = filled(case)
    before = memory.snapshot()
    tables = case.transfer.planes, case.transfer.runs[:0]
    pools = [torch.from_numpy(pool.region) for pool in memory.pools]
    host = torch.from_numpy(memory.host.region)
    no_shifts = case.rotation._replace(shifts=case.rotation.shifts[:0])
    for rotation in (case.rotation, no_shifts):
        rotated_page_transfer(pools, host, *tables, Direction.HOST_TO_PAGES, rotation)
    assert_same(memory.snapshot(), before)


def test_pools_on_a_device_are_refused() -> None:
    case = key_case()
    pools = [torch.zeros(8, dtype=torch.uint8, device="meta")]
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


@pytest.mark.parametrize("direction", [PAGES_TO_HOST, HOST_TO_PAGES])
@pytest.mark.parametrize(("row", "column", "value", "expected"), WRONG_CELLS)
def test_it_names_the_cell_and_what_was_found(row, column, value, expected, direction) -> None:
    case = key_case(num_planes=2, direction=direction)
    case.rotation.rotations[row, column] = value
    message = said_against(case, filled(key_case(num_planes=2, direction=direction)))
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


@pytest.mark.parametrize(("name", "num_columns"), [("rotations", 8), ("shifts", 2)])
def test_tables_have_the_right_type(name: str, num_columns: int) -> None:
    case = key_case()
    wrong = case.rotation._replace(**{name: getattr(case.rotation, name).astype(np.int32)})
    message = said_against(RotatedCase(case.transfer, wrong), filled(case))
    assert message.startswith(f"{name}: expected int64, shape [rows, {num_columns}], C-contiguous")


def is_rotation_valid(case: RotatedCase) -> bool:
    """The definition, for transfers that are valid themselves: Python integers."""
    planes = case.transfer.planes.tolist()
    rotations, shifts = case.rotation.rotations.tolist(), case.rotation.shifts.tolist()
    groups = {plane[0] for plane in planes}
    with_runs = set(case.transfer.runs[:, 0].tolist())
    for plane, dtype, style, heads, head_bytes, offset, pairs, first in rotations:
        unit = {0: 4, 1: 2, 2: 2}.get(dtype)
        if unit is None or style not in (0, 1) or not 0 <= plane < len(planes):
            return False
        is_valid = (
            min(heads, head_bytes, pairs) > 0
            and min(offset, first) >= 0
            and head_bytes % unit == offset % unit == 0
            and heads * head_bytes == planes[plane][5]
            and offset + 2 * pairs * unit <= head_bytes
            and first + pairs <= len(case.rotation.frequencies)
        )
        is_shifted = any(group == planes[plane][0] for group, _ in shifts)
        if not is_valid or (planes[plane][0] in with_runs and not is_shifted):
            return False
    named = [group for group, _ in shifts]
    return (
        len({row[0] for row in rotations}) == len(rotations)
        and named == sorted(set(named))
        and set(named) <= groups
        and all(abs(positions) <= 2**30 for _, positions in shifts)
    )


@settings(SLOW, max_examples=600)
@given(st.data(), rotated_cases())
def test_it_agrees_with_the_definition(data: st.DataObject, case: RotatedCase) -> None:
    assume(len(case.rotation.rotations))
    rotation = case.rotation._replace(
        rotations=case.rotation.rotations.copy(), shifts=case.rotation.shifts.copy()
    )
    for _ in range(data.draw(st.integers(1, 3))):
        chosen = data.draw(st.sampled_from((rotation.rotations, rotation.shifts)))
        row = data.draw(st.integers(0, len(chosen) - 1))
        column = data.draw(st.integers(0, chosen.shape[1] - 1))
        was = int(chosen[row, column])
        value = data.draw(
            st.one_of(
                st.integers(-2, 9),
                st.sampled_from((was - 1, was + 1, was * 2, was + 2, was // 2)),
                st.sampled_from([int(value) for value in chosen[:, column]]),
                st.sampled_from((MOST, MOST - 1, -MOST - 1, 2**62, 2**32, 2**31)),
            )
        )
        chosen[row, column] = min(max(value, -MOST - 1), MOST)
    damaged = RotatedCase(case.transfer, rotation)
    memory = filled(case)
    if is_rotation_valid(damaged):
        run(damaged, memory)
    else:
        message = said_against(damaged, memory)
        assert MESSAGE.fullmatch(message), message


def test_the_columns_are_those_of_the_compiled_module() -> None:
    case = key_case()
    for name, columns in (("rotations", RotationColumn), ("shifts", ShiftColumn)):
        narrow = case.rotation._replace(**{name: np.zeros((0, len(columns) - 1), np.int64)})
        message = said_against(RotatedCase(case.transfer, narrow), filled(case))
        assert f"shape [rows, {len(columns)}]" in message


def test_numbers_survive_their_bytes() -> None:
    """Of the comparison's own helpers."""
    numbers = np.float32([1.5, -0.25, 3.0])
    for dtype in RowDtype:
        assert numbers_of(bytes_of(numbers, dtype), dtype).tolist() == numbers.tolist()
