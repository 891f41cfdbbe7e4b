# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vllm-ascend-kvext project
"""Checks that the keys of a model depend on their positions by the rotation alone.

In the first layer, a key depends only on its token and its position. So two tokens with the same id
in one text have equal values. Their keys are equal once the key of one token is turned to the
position of the other token. The check finds a model that scales keys behind the rotation, adds
positions to embeddings, or turns keys by other angles than its rotary module says.

Angles are computed here in float64, without the transfer op. This module knows neither pages nor
torch.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Sequence
from itertools import pairwise

import numpy as np
import numpy.typing as npt

from vllm_ascend_kvext.segments.keys.rotary import RotarySignature
from vllm_ascend_kvext.segments.keys.rotation_check import HALF_UNITS

Numbers = npt.NDArray[np.float64]
ReadRows = Callable[[Sequence[int]], Numbers]
"""Returns the rows of tokens, by their places among the checked tokens. shape: [tokens, heads,
head_elements]."""

MIN_PAIRS = 8
MAX_PAIRS = 64

# The next three errors are relative to the length of the compared rows.
_ROUNDINGS = 10
"""The maximum number of roundings of a pair of keys, each by half a unit in the last place. A key
is rounded once as a product of matrices. Its rotation rounds cosine, sine, two products and a
sum."""

_OTHER_ORDER_OF_SUMS = 1e-4
"""The error of float32 sums of thousands of products that are added in another order."""

_ANGLE_ERROR = 2.0**-23
"""The error of an angle per position: the module multiplies position and frequency in float32."""

_SMALL_PART = 0.1
"""The error of a part of a key is divided by at least this share of the length of the whole key."""


def check_keys(
    token_ids: Sequence[int],
    positions: Sequence[int],
    signature: RotarySignature,
    read_keys: ReadRows,
    read_values: Sequence[ReadRows],
) -> str | None:
    """Compare the keys of the first layer, and the values, of tokens that occur more than once.

    The tokens belong to one segment, and their positions ascend. ``read_values`` is empty for
    latents, which have no values of their own.

    Returns:
        What is wrong, or an empty text if all are equal. None if there are fewer than `MIN_PAIRS`
        pairs to compare.
    """
    pairs = find_pairs(token_ids)
    if len(pairs) < MIN_PAIRS:
        return None
    ones, others = [one for one, _ in pairs], [other for _, other in pairs]
    other_positions = np.array(positions)[others]
    shifts = other_positions - np.array(positions)[ones]
    wanted = read_keys(others)
    limit = _ROUNDINGS * HALF_UNITS[signature.dtype] + _OTHER_ORDER_OF_SUMS
    angle_errors = 2 * other_positions * _ANGLE_ERROR
    compared = [
        (
            "keys",
            _differences(turn(read_keys(ones), signature, shifts), wanted, signature),
            limit + angle_errors,
        )
    ]
    compared += [
        ("values", _relative(read(ones), read(others)), np.full(len(pairs), limit))
        for read in read_values
    ]
    for what, found, limits in compared:
        is_wrong = ~(found <= limits)  # NaN counts as wrong.
        if is_wrong.any():
            worst = int(np.argmax(np.where(is_wrong, np.nan_to_num(found, nan=np.inf), -1)))
            one, other = pairs[worst]
            return (
                f"{what} of the first layer, token {token_ids[one]} at positions "
                f"{positions[one]} and {positions[other]}: expected them equal within "
                f"{limits[worst]:.2g} of their length, keys once one is turned to the other, found "
                f"{found[worst]:.2g}; so in {int(is_wrong.sum())} of {len(pairs)} pairs. What the "
                "model does to them depends on more than their token and a rotation. Serve it "
                "without segments."
            )
    return ""


def find_pairs(token_ids: Sequence[int]) -> list[tuple[int, int]]:
    """Pairs of places with equal tokens, the farthest apart first, at most `MAX_PAIRS`."""
    places: dict[int, list[int]] = defaultdict(list)
    for place, token_id in enumerate(token_ids):
        places[token_id].append(place)
    pairs = {
        pair
        for of_token in places.values()
        if len(of_token) > 1
        for pair in ((of_token[0], of_token[-1]), *pairwise(of_token))
    }
    return sorted(pairs, key=lambda pair: (pair[0] - pair[1], pair))[:MAX_PAIRS]


def has_enough_pairs(token_ids: Sequence[int]) -> bool:
    """Whether a text has enough pairs of equal tokens to compare its keys."""
    return len(find_pairs(token_ids)) >= MIN_PAIRS


def text_with_pairs(token_ids: Sequence[int], max_tokens: int) -> list[int]:
    """Make a text from tokens of another text. Keys of the model can be compared in the new text.

    Each of its tokens occurs at least twice, near and far. The new text has enough pairs if the
    other text has `MIN_PAIRS` tokens, and ``max_tokens`` is at least twice `MIN_PAIRS`. The new
    text does not begin like the other text.
    """
    first_ids = list(token_ids[: min(MAX_PAIRS, max_tokens // 2)])
    return first_ids[::-1] + first_ids


def turn(keys: Numbers, signature: RotarySignature, shifts: npt.NDArray[np.int64]) -> Numbers:
    """Turn keys to positions that are ``shifts`` further on.

    Shape of ``keys``: [tokens, heads, head_elements]. Shape of ``shifts``: [tokens].
    """
    angles = (shifts[:, None] * np.array(signature.frequencies))[:, None, :]
    of_pair = signature.pairs
    left, right = keys[..., of_pair[0]], keys[..., of_pair[1]]
    turned: Numbers = keys.copy()
    turned[..., of_pair[0]] = left * np.cos(angles) - right * np.sin(angles)
    turned[..., of_pair[1]] = right * np.cos(angles) + left * np.sin(angles)
    return turned


def _differences(turned: Numbers, wanted: Numbers, signature: RotarySignature) -> Numbers:
    """The larger relative difference of the rotated and the other part of keys. shape: [tokens]."""
    rotated = np.zeros(signature.head_elements, bool)
    rotated[signature.rotated] = True
    whole = _SMALL_PART * np.linalg.norm(wanted, axis=-1)
    largest: Numbers = np.max(
        [
            _relative(turned[..., part], wanted[..., part], whole)
            for part in (rotated, ~rotated)
            if part.any()
        ],
        axis=0,
    )
    return largest


def _relative(rows: Numbers, wanted: Numbers, least: Numbers | float = 0.0) -> Numbers:
    """The largest difference of a head, relative to its length or ``least``. shape: [tokens]."""
    lengths = np.maximum(np.linalg.norm(wanted, axis=-1), least)
    differences = np.linalg.norm(rows - wanted, axis=-1)
    tiny = np.finfo(np.float64).tiny
    found: Numbers = (differences / np.maximum(lengths, tiny)).max(axis=-1)
    return found
