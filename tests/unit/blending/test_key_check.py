# SPDX-License-Identifier: Apache-2.0
"""Keys that turn with their positions alone are told from those that do not."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np
import pytest

from vllm_ascend_kvext.blending.key_check import (
    FEWEST_PAIRS,
    MOST_PAIRS,
    KeyCheck,
    KeyCheckOutcome,
    KeyGate,
    check_keys,
    find_pairs,
    turn,
)
from vllm_ascend_kvext.blending.rotary_signature import RotarySignature
from vllm_ascend_kvext.blending.segment_rows import SegmentRows
from vllm_ascend_kvext.transfer.schema import PairStyle, RowDtype

VOCABULARY, HEADS, HEAD, NUM_TOKENS = 40, 2, 16, 300
FIRST_POSITION = 1000
PASSED, FAILED, NOT_CHECKED = KeyCheckOutcome


def signature_of(
    dtype: RowDtype = RowDtype.FLOAT32,
    style: PairStyle = PairStyle.HALVES,
    num_pairs: int = HEAD // 2,
    offset: int = 0,
) -> RotarySignature:
    frequencies = tuple(10_000.0 ** (-i / num_pairs) for i in range(num_pairs))
    return RotarySignature(frequencies, style, HEAD, offset, dtype)


def rounded(numbers: np.ndarray, dtype: RowDtype) -> np.ndarray:
    if dtype is RowDtype.FLOAT16:
        return numbers.astype(np.float16).astype(np.float64)
    single = numbers.astype(np.float32)
    if dtype is RowDtype.BFLOAT16:
        bits = single.view(np.uint32)
        single = ((bits + 0x7FFF + ((bits >> 16) & 1)) & 0xFFFF0000).astype(np.uint32)
        single = single.view(np.float32)
    return single.astype(np.float64)


class Model:
    """The first layer of a model: keys and values of tokens at positions."""

    def __init__(self, signature: RotarySignature) -> None:
        random = np.random.default_rng(1)
        self.signature = signature
        self.token_ids = random.integers(0, VOCABULARY, NUM_TOKENS).tolist()
        self.keys = random.standard_normal((VOCABULARY, HEADS, HEAD))
        self.values = random.standard_normal((VOCABULARY, HEADS, HEAD))
        self.positions = FIRST_POSITION + np.arange(NUM_TOKENS)

    def stored_keys(self) -> np.ndarray:
        return turn(self.keys[self.token_ids], self.signature, self.positions)

    def stored_values(self) -> np.ndarray:
        return self.values[self.token_ids]

    def check(self, read_as: RotarySignature | None = None) -> KeyCheck:
        dtype = self.signature.dtype
        keys, values = (rounded(rows, dtype) for rows in (self.stored_keys(), self.stored_values()))
        return check_keys(
            self.token_ids,
            self.positions.tolist(),
            read_as or self.signature,
            lambda tokens: keys[list(tokens)],
            [lambda tokens: values[list(tokens)]],
        )


class ScaledBehindTheRotation(Model):
    """As HunYuan's: a weight per element, after the rotation."""

    def stored_keys(self) -> np.ndarray:
        return super().stored_keys() * np.linspace(0.9, 1.1, HEAD)


class WithPositionsAdded(Model):
    """As with learnt positions, which are added to embeddings: values know them, too."""

    def stored_keys(self) -> np.ndarray:
        return super().stored_keys() + 0.2 * np.sin(self.positions / 50)[:, None, None]

    def stored_values(self) -> np.ndarray:
        return super().stored_values() + 0.2 * np.cos(self.positions / 50)[:, None, None]


class WithPositionsInValues(WithPositionsAdded):
    def stored_keys(self) -> np.ndarray:
        return Model.stored_keys(self)


class WithTheTokenBefore(Model):
    """As with a short convolution."""

    def stored_keys(self) -> np.ndarray:
        keys = super().stored_keys()
        return keys + 0.3 * np.roll(keys, 1, axis=0)


class ScaledByPosition(Model):
    """As a temperature that grows with the position."""

    def stored_keys(self) -> np.ndarray:
        return super().stored_keys() * (1 + 0.1 * np.log(self.positions - 990))[:, None, None]


class NotANumber(Model):
    def stored_keys(self) -> np.ndarray:
        keys = super().stored_keys()
        keys[find_pairs(self.token_ids)[3][1], 1, 2] = np.nan
        return keys


WRONG = [
    ScaledBehindTheRotation,
    WithPositionsAdded,
    WithPositionsInValues,
    WithTheTokenBefore,
    ScaledByPosition,
    NotANumber,
]


@pytest.mark.parametrize("dtype", list(RowDtype))
@pytest.mark.parametrize("style", list(PairStyle))
@pytest.mark.parametrize(("num_pairs", "offset"), [(8, 0), (4, 0), (4, 8), (3, 2)])
def test_a_rotation_passes(dtype, style, num_pairs: int, offset: int) -> None:
    found = Model(signature_of(dtype, style, num_pairs, offset)).check()
    assert found.outcome is PASSED, found.message
    assert found.message.startswith(f"{MOST_PAIRS} pairs of equal tokens differ by at most ")


@pytest.mark.parametrize("dtype", list(RowDtype))
@pytest.mark.parametrize("model", WRONG)
def test_another_model_fails(model: Callable[..., Model], dtype: RowDtype) -> None:
    found = model(signature_of(dtype)).check()
    assert found.outcome is FAILED
    what = "values" if model is WithPositionsInValues else "keys"
    assert found.message.startswith(f"{what} of the first layer, token ")
    assert found.message.endswith("Serve it without blending.")


@pytest.mark.parametrize("dtype", list(RowDtype))
@pytest.mark.parametrize(
    "read_as",
    [
        {"style": PairStyle.NEIGHBOURS},
        {"num_pairs": 4},
        {"num_pairs": 4, "offset": 8},
    ],
)
def test_another_signature_fails(dtype: RowDtype, read_as: dict[str, object]) -> None:
    found = Model(signature_of(dtype)).check(signature_of(dtype, **read_as))
    assert found.outcome is FAILED


def test_a_small_rotated_part_is_seen_beside_a_large_latent() -> None:
    """Of MLA: the latent is most of a row's length."""
    signature = signature_of(RowDtype.BFLOAT16, num_pairs=4, offset=8)

    class Latent(Model):
        def stored_keys(self) -> np.ndarray:
            keys = super().stored_keys()
            keys[..., :8] *= 8
            keys[..., 8:] *= 1 + 0.1 * (np.arange(NUM_TOKENS) % 2)[:, None, None]
            return keys

    found = Latent(signature).check()
    assert found.outcome is FAILED
    assert float(found.message.partition("found ")[2].partition(";")[0]) > 0.05


def test_rounding_of_angles_far_away_is_allowed() -> None:
    """The module's angles are float32: at a million positions they are wrong by 0.03 and more."""

    class Far(Model):
        def stored_keys(self) -> np.ndarray:
            angles = self.positions + 1_000_000 + 0.03 * (np.arange(NUM_TOKENS) % 2)
            return turn(self.keys[self.token_ids], self.signature, angles)

    far = Far(signature_of())
    assert far.check().outcome is FAILED
    keys = far.stored_keys()
    found = check_keys(
        far.token_ids,
        range(FIRST_POSITION + 1_000_000, FIRST_POSITION + 1_000_000 + NUM_TOKENS),
        far.signature,
        lambda tokens: keys[list(tokens)],
        [],
    )
    assert found.outcome is PASSED, found.message


def test_too_few_pairs_say_nothing() -> None:
    def read(tokens: Sequence[int]) -> np.ndarray:
        raise AssertionError("nothing is read")

    few = [*range(100), *range(FEWEST_PAIRS - 1)]
    found = check_keys(few, range(len(few)), signature_of(), read, [read])
    assert found.outcome is NOT_CHECKED
    assert found.message == "expected at least 8 pairs of equal tokens among 107, found 7"


def test_pairs_are_of_equal_tokens_and_far_apart() -> None:
    token_ids = [1, 2, 1, 3, 2, 1, 9]
    assert find_pairs(token_ids) == [(0, 5), (1, 4), (2, 5), (0, 2)]
    many = [0] * 500
    assert len(find_pairs(many)) == MOST_PAIRS and find_pairs(many)[0] == (0, 499)


def test_positions_between_which_tokens_are_missing_are_turned_as_far() -> None:
    """Chunks of a segment that are stored already are not stored again."""
    model = Model(signature_of())
    model.positions[NUM_TOKENS // 2 :] += 160
    found = model.check()
    assert found.outcome is PASSED, found.message


CHUNKS = [SegmentRows(0, 10, 0, 10, 0), SegmentRows(10, 20, 640, 10, 0)]


def test_a_gate_asks_about_whole_stores_until_it_knows() -> None:
    asked: list[Sequence[SegmentRows]] = []
    answers = [NOT_CHECKED, NOT_CHECKED, PASSED]

    def check(rows: Sequence[SegmentRows]) -> KeyCheck:
        asked.append(rows)
        return KeyCheck(answers[len(asked) - 1], "")

    gate = KeyGate()
    found = [gate.check(check, CHUNKS) for _ in range(4)]
    assert found == [*(KeyCheck(answer, "") for answer in answers), None]
    assert asked == [CHUNKS] * 3


def test_a_gate_reports_a_failure_once() -> None:
    gate = KeyGate()
    failed = KeyCheck(FAILED, "they differ")
    assert gate.check(lambda rows: failed, CHUNKS) == failed
    assert gate.check(lambda rows: KeyCheck(PASSED, ""), CHUNKS) is None
