# SPDX-License-Identifier: Apache-2.0
"""What answers are worth."""

from __future__ import annotations

import math

import numpy as np
import pytest
from blending.metrics import (
    Interval,
    answer_in,
    divergence,
    exact_match,
    f1,
    paired_difference,
    recovered,
    same_top,
    words,
)


def log(**shares: float) -> dict[int, float]:
    """By the letter's number."""
    return {ord(letter): math.log(share) for letter, share in shares.items()}


class TestTexts:
    @pytest.mark.parametrize(
        "said, expected",
        [
            (" silver. Most of the visitors", "silver"),
            ("\nblue lamp\nand", "blue lamp"),
            (' "Falcon".', "Falcon"),
            (" 592 dollars", "592 dollars"),
            ("", ""),
        ],
    )
    def test_an_answer_ends_where_its_clause_ends(self, said: str, expected: str) -> None:
        assert answer_in(said) == expected

    def test_case_articles_and_punctuation_do_not_count(self) -> None:
        assert words("The red-haired Man, an owl") == ["red", "haired", "man", "owl"]
        assert exact_match("the Red car", "red car!") == 1.0
        assert exact_match("red", "red car") == 0.0

    def test_f1_is_of_common_words(self) -> None:
        assert f1("592 dollars", "592") == pytest.approx(2 / 3)
        assert f1("red red", "red") == pytest.approx(2 / 3)
        assert f1("blue", "red") == f1("", "red") == 0.0
        assert f1("The red car", "red car") == 1.0


class TestDivergence:
    def test_of_the_same_it_is_nothing(self) -> None:
        top = log(a=0.5, b=0.25)
        assert divergence(top, top) == pytest.approx(0.0)

    def test_it_is_exact_where_everything_is_known(self) -> None:
        found = divergence(log(a=0.75, b=0.25), log(a=0.25, b=0.75))
        assert found == pytest.approx(0.5 * math.log(3))

    def test_what_only_one_knows_counts_as_the_rest(self) -> None:
        found = divergence(log(a=0.5, b=0.4), log(a=0.8, c=0.1))
        expected = 0.5 * math.log(0.5 / 0.8) + 0.5 * math.log(0.5 / 0.2)
        assert found == pytest.approx(expected)

    @pytest.mark.parametrize("seed", range(5))
    def test_it_is_a_lower_bound(self, seed: int) -> None:
        rng = np.random.default_rng(seed)
        one, other = rng.dirichlet(np.ones(30), 2)
        whole = float((one * np.log(one / other)).sum())

        def top(shares: np.ndarray) -> dict[int, float]:
            return {int(n): math.log(shares[n]) for n in shares.argsort()[-8:]}

        assert 0.0 <= divergence(top(one), top(other)) <= whole

    def test_the_most_probable_token_is_compared(self) -> None:
        assert same_top(log(a=0.6, b=0.3), log(b=0.3, a=0.4))
        assert not same_top(log(a=0.6, b=0.3), log(a=0.3, b=0.4))


class TestIntervals:
    def test_a_difference_is_paired(self) -> None:
        """Each question is one worse: the interval has no width, whatever the questions' spread."""
        found = paired_difference([0.0, 4.0, 9.0], [1.0, 5.0, 10.0])
        assert found == Interval(-1.0, -1.0, -1.0)

    def test_its_interval_narrows_with_more_questions(self) -> None:
        few = paired_difference([1.0, 0.0] * 10, [0.0] * 20)
        many = paired_difference([1.0, 0.0] * 250, [0.0] * 500)
        assert few.mean == many.mean == 0.5
        assert few.low < many.low < 0.5 < many.high < few.high
        # Of 500 draws: 0.5 plus or minus 1.96 * sqrt(0.25 / 500).
        assert many.low == pytest.approx(0.5 - 0.0438, abs=0.005)

    def test_values_of_other_questions_are_refused(self) -> None:
        with pytest.raises(ValueError, match="the same questions, found 1 and 2"):
            paired_difference([1.0], [1.0, 0.0])

    def test_recovered_is_the_share_of_what_was_lost(self) -> None:
        full, plain = [1.0] * 10, [0.0] * 8 + [1.0] * 2
        found = recovered([1.0] * 6 + [0.0] * 2 + [1.0] * 2, plain, full)
        assert found is not None
        assert found.mean == pytest.approx(6 / 8)
        assert found.low < 0.75 < found.high <= 1.0

    def test_nothing_can_be_recovered_where_nothing_is_lost(self) -> None:
        assert recovered([0.0, 1.0], [1.0, 0.0], [0.0, 1.0]) is None

    def test_it_is_printed_with_its_ends(self) -> None:
        assert f"{Interval(-0.05, -0.11, 0.02):+.0%}" == "-5% [-11%, +2%]"
