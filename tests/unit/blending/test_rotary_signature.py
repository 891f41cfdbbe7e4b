# SPDX-License-Identifier: Apache-2.0
"""Signatures of keys, and the tables that are made of them."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from vllm_ascend_kvext.blending.rotary_signature import KeyPlane, RotarySignature, key_rotation
from vllm_ascend_kvext.transfer.schema import PairStyle, RotationColumn, RowDtype, ShiftColumn

GLOBAL = RotarySignature((1.0, 0.1), PairStyle.HALVES, 8, 0, RowDtype.BFLOAT16)
LOCAL = replace(GLOBAL, frequencies=(1.0, 0.5, 0.25))
LATENT = RotarySignature((1.0,), PairStyle.NEIGHBOURS, 18, 16, RowDtype.FLOAT32)


def test_a_row_per_plane_in_bytes() -> None:
    rotation = key_rotation([KeyPlane(4, GLOBAL, 3), KeyPlane(0, LATENT, 1)], {})
    assert rotation.rotations.tolist() == [
        [4, RowDtype.BFLOAT16, PairStyle.HALVES, 3, 16, 0, 2, 0],
        [0, RowDtype.FLOAT32, PairStyle.NEIGHBOURS, 1, 72, 64, 1, 2],
    ]
    assert rotation.frequencies.tolist() == [1.0, 0.1, 1.0]


def test_layers_that_turn_alike_share_their_frequencies() -> None:
    planes = [KeyPlane(plane, (GLOBAL, LOCAL)[plane % 2], 1) for plane in range(6)]
    rotation = key_rotation(planes, {})
    assert rotation.frequencies.tolist() == [1.0, 0.1, 1.0, 0.5, 0.25]
    assert rotation.rotations[:, RotationColumn.FIRST_FREQUENCY].tolist() == [0, 2] * 3


def test_shifts_ascend_by_group() -> None:
    rotation = key_rotation([], {7: -5, 0: 0, 2: 1_000_000})
    assert rotation.shifts.tolist() == [[0, 0], [2, 1_000_000], [7, -5]]
    assert rotation.rotations.shape == (0, len(RotationColumn))


def test_no_shifts_are_a_table_too() -> None:
    rotation = key_rotation([KeyPlane(0, GLOBAL, 1)], {})
    assert rotation.shifts.shape == (0, len(ShiftColumn))
    tables = rotation.rotations, rotation.shifts
    assert all(table.dtype == np.int64 and table.flags.c_contiguous for table in tables)
    assert rotation.frequencies.dtype == np.float64


def test_the_rotated_part_has_two_elements_per_pair() -> None:
    assert LOCAL.rotary_elements == 6


@pytest.mark.parametrize(
    "other",
    [
        replace(GLOBAL, frequencies=(1.0, float(np.nextafter(0.1, 1)))),
        replace(GLOBAL, frequencies=(0.1, 1.0)),
        replace(GLOBAL, pair_style=PairStyle.NEIGHBOURS),
        replace(GLOBAL, head_elements=9),
        replace(GLOBAL, offset_elements=1),
        replace(GLOBAL, dtype=RowDtype.FLOAT16),
        replace(GLOBAL, attention_factor=1.25),
    ],
)
def test_whatever_decides_keys_is_in_the_fingerprint(other: RotarySignature) -> None:
    assert other.fingerprint != GLOBAL.fingerprint


def test_a_fingerprint_is_the_same_everywhere() -> None:
    """Stored keys are found by it: change it only where they change."""
    assert GLOBAL.fingerprint == (
        "46dae749b18cbf1a63dcb9d1638cf67c27d3c6f754cc33b6c046542f8f0fbf5b"
    )
