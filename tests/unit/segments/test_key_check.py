# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vllm-ascend-kvext project
"""The check tells keys that only rotate with their positions from other keys."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from vllm_ascend_kvext.segments.keys.key_check import (
    MAX_PAIRS,
    MIN_PAIRS,
    check_keys,
    find_pairs,
    has_enough_pairs,
    text_with_pairs,
    turn,
)
from vllm_ascend_kvext.segments.keys.rotary import RotarySignature
from vllm_ascend_kvext.transfer.schema import PairStyle, RowDtype

VOCABULARY, HEADS, HEAD, NUM_TOKENS = 40, 2, 16, 300
FIRST_POSITION = 1000


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

    def check(
        self, read_as: RotarySignature | None = None, wrong: Callable[..., Any] | None = None
    ) -> str | None:
        rows = self.stored_keys(), self.values[self.token_ids]
        rows = rows if wrong is None else wrong(*rows, self)
        keys, values = (rounded(each, self.signature.dtype) for each in rows)
        return check_keys(
            self.token_ids,
            self.positions.tolist(),
            read_as or self.signature,
            lambda tokens: keys[list(tokens)],
            [lambda tokens: values[list(tokens)]],
        )


def not_a_number(keys: np.ndarray, values: np.ndarray, model: Model) -> Any:
    keys[find_pairs(model.token_ids)[3][1], 1, 2] = np.nan
    return keys, values


WRONG: dict[str, Callable[[np.ndarray, np.ndarray, Model], Any]] = {
    # HunYuan scales keys like this: each element has a weight, applied after the rotation.
    "scaled": lambda k, v, model: (k * np.linspace(0.9, 1.1, HEAD), v),
    # Learnt positions that are added to embeddings change values, too.
    "positions added": lambda k, v, model: (
        k + 0.2 * np.sin(model.positions / 50)[:, None, None],
        v,
    ),
    "positions in values": lambda k, v, model: (
        k,
        v + 0.2 * np.cos(model.positions / 50)[:, None, None],
    ),
    # A short convolution mixes keys like this.
    "the token before": lambda k, v, model: (k + 0.3 * np.roll(k, 1, axis=0), v),
    # A temperature may grow with the position.
    "scaled by position": lambda k, v, model: (
        k * (1 + 0.1 * np.log(model.positions - 990))[:, None, None],
        v,
    ),
    "not a number": not_a_number,
}


@pytest.mark.parametrize("dtype", list(RowDtype))
@pytest.mark.parametrize("style", list(PairStyle))
@pytest.mark.parametrize(("num_pairs", "offset"), [(8, 0), (4, 0), (4, 8), (3, 2)])
def test_a_rotation_passes(dtype, style, num_pairs: int, offset: int) -> None:
    found = Model(signature_of(dtype, style, num_pairs, offset)).check()
    assert found == ""


@pytest.mark.parametrize("dtype", list(RowDtype))
@pytest.mark.parametrize("name", WRONG)
def test_another_model_fails(name: str, dtype: RowDtype) -> None:
    found = Model(signature_of(dtype)).check(wrong=WRONG[name])
    what = "values" if name == "positions in values" else "keys"
    assert found and found.startswith(f"{what} of the first layer, token ")
    assert found.endswith("Serve it without segments.")


@pytest.mark.parametrize("dtype", list(RowDtype))
@pytest.mark.parametrize(
    "read_as", [{"style": PairStyle.NEIGHBOURS}, {"num_pairs": 4}, {"num_pairs": 4, "offset": 8}]
)
def test_another_signature_fails(dtype: RowDtype, read_as: dict[str, object]) -> None:
    found = Model(signature_of(dtype)).check(signature_of(dtype, **read_as))
    assert found


def test_a_small_rotated_part_is_seen_beside_a_large_latent() -> None:
    """Most of the length of an MLA row is the latent."""
    signature = signature_of(RowDtype.BFLOAT16, num_pairs=4, offset=8)

    def latent(keys: np.ndarray, values: np.ndarray, model: Model) -> Any:
        keys[..., :8] *= 8
        keys[..., 8:] *= 1 + 0.1 * (np.arange(NUM_TOKENS) % 2)[:, None, None]
        return keys, values

    found = Model(signature).check(wrong=latent)
    assert found and float(found.partition("found ")[2].partition(";")[0]) > 0.05


def test_rounding_of_angles_far_away_is_allowed() -> None:
    """The module's angles are float32. At a million positions, their errors are 0.03 and more."""

    class Far(Model):
        def stored_keys(self) -> np.ndarray:
            angles = self.positions + 1_000_000 + 0.03 * (np.arange(NUM_TOKENS) % 2)
            return turn(self.keys[self.token_ids], self.signature, angles)

    far = Far(signature_of())
    assert far.check()
    keys = far.stored_keys()
    found = check_keys(
        far.token_ids,
        range(FIRST_POSITION + 1_000_000, FIRST_POSITION + 1_000_000 + NUM_TOKENS),
        far.signature,
        lambda tokens: keys[list(tokens)],
        [],
    )
    assert found == ""


def test_pairs_are_of_equal_tokens_and_far_apart() -> None:
    token_ids = [1, 2, 1, 3, 2, 1, 9]
    assert find_pairs(token_ids) == [(0, 5), (1, 4), (2, 5), (0, 2)]
    many = [0] * 500
    assert len(find_pairs(many)) == MAX_PAIRS and find_pairs(many)[0] == (0, 499)


@pytest.mark.parametrize("num_tokens", [MIN_PAIRS, 9, 48, 64, 65, 500])
@pytest.mark.parametrize("max_tokens", [2 * MIN_PAIRS, 41, 128, 10_000])
@pytest.mark.parametrize("num_different", [1, 5, 500])
def test_a_text_with_enough_pairs_is_made_of_any(
    num_tokens: int, max_tokens: int, num_different: int
) -> None:
    document = [token % num_different for token in range(num_tokens)]
    text = text_with_pairs(document, max_tokens)
    assert len(text) <= min(max_tokens, 2 * MAX_PAIRS) and set(text) <= set(document)
    pairs = find_pairs(text)
    assert has_enough_pairs(text) and len(pairs) >= MIN_PAIRS
    assert len({other - one for one, other in pairs}) > 1 or num_different == 1
    # Otherwise its first chunk would be the document's. It would not be stored and compared again.
    assert num_different == 1 or text[:5] != document[:5]


@pytest.mark.parametrize(("num_tokens", "max_tokens"), [(MIN_PAIRS - 1, 100), (100, 15)])
def test_of_too_few_tokens_there_is_none(num_tokens: int, max_tokens: int) -> None:
    assert not has_enough_pairs(text_with_pairs(range(num_tokens), max_tokens))


@pytest.mark.parametrize("name", WRONG)
@pytest.mark.parametrize("dtype", list(RowDtype))
def test_another_model_fails_by_a_text_of_different_tokens(name: str, dtype: RowDtype) -> None:
    class Short(Model):
        def __init__(self, signature: RotarySignature) -> None:
            super().__init__(signature)
            self.token_ids = text_with_pairs(range(VOCABULARY), 2 * MAX_PAIRS)
            self.positions = FIRST_POSITION + np.arange(len(self.token_ids))

    assert Short(signature_of(dtype)).check() == ""
    assert Short(signature_of(dtype)).check(wrong=WRONG[name])


def test_positions_between_which_tokens_are_missing_are_turned_as_far() -> None:
    """Stored chunks of a segment are not stored again, so tokens may be missing in between."""
    model = Model(signature_of())
    model.positions[NUM_TOKENS // 2 :] += 160
    found = model.check()
    assert found == ""


# Fingerprints of signatures.
