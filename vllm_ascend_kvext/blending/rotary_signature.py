# SPDX-License-Identifier: Apache-2.0
"""How the keys of a layer turn with their position, and the tables that say so to the transfer op.

Knows no module of vLLM and no torch.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

import numpy as np

from vllm_ascend_kvext.transfer.key_rotation import KeyRotation
from vllm_ascend_kvext.transfer.schema import (
    DTYPE,
    PairStyle,
    RotationColumn,
    RowDtype,
    ShiftColumn,
)


@dataclass(frozen=True, slots=True)
class RotarySignature:
    """The rotary embedding of one layer's keys, as they lie in a row.

    Attributes:
        frequencies: Radians per position, one per pair; those of a scaled embedding are scaled.
        pair_style: Which elements are a pair.
        head_elements: Elements of one head of a row; of the whole row where heads share a latent.
        offset_elements: Where the rotated part of a head begins.
        dtype: Of the stored keys.
        attention_factor: What the embedding has multiplied rotated parts with (YaRN). It is in the
            stored keys, so that a rotation must not apply it. Keys with another one are other keys.
    """

    frequencies: tuple[float, ...]
    pair_style: PairStyle
    head_elements: int
    offset_elements: int
    dtype: RowDtype
    attention_factor: float = 1.0

    @property
    def rotary_elements(self) -> int:
        """Elements of a head that are rotated, from `offset_elements` on."""
        return 2 * len(self.frequencies)

    @property
    def fingerprint(self) -> str:
        """Equal for keys that turn alike, and lie alike; 64 hexadecimal digits."""
        facts = (
            [frequency.hex() for frequency in self.frequencies],
            self.pair_style.name,
            self.head_elements,
            self.offset_elements,
            self.dtype.name,
            float(self.attention_factor).hex(),
        )
        return hashlib.sha256(json.dumps(facts).encode()).hexdigest()


@dataclass(frozen=True, slots=True)
class KeyPlane:
    """A plane of a transfer whose rows are keys.

    Attributes:
        plane: Its row in the table of planes.
        signature: How the keys turn.
        num_heads: Heads of a row.
    """

    plane: int
    signature: RotarySignature
    num_heads: int


def key_rotation(key_planes: Iterable[KeyPlane], shifts: Mapping[int, int]) -> KeyRotation:
    """The tables of a transfer that moves keys.

    Args:
        key_planes: The planes that are rotated, each once.
        shifts: By how many positions, by transfer group.
    """
    frequencies: list[float] = []
    first_frequencies: dict[tuple[float, ...], int] = {}
    rows = []
    for key_plane in key_planes:
        signature = key_plane.signature
        first = first_frequencies.setdefault(signature.frequencies, len(frequencies))
        if first == len(frequencies):
            frequencies += signature.frequencies
        element_bytes = signature.dtype.element_bytes
        rows.append(
            (
                key_plane.plane,
                signature.dtype,
                signature.pair_style,
                key_plane.num_heads,
                signature.head_elements * element_bytes,
                signature.offset_elements * element_bytes,
                len(signature.frequencies),
                first,
            )
        )
    return KeyRotation(
        np.array(rows, DTYPE).reshape(len(rows), len(RotationColumn)),
        np.array(sorted(shifts.items()), DTYPE).reshape(len(shifts), len(ShiftColumn)),
        np.array(frequencies, np.float64),
    )
