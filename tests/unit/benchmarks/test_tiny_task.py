# SPDX-License-Identifier: Apache-2.0
"""The language that the tiny models learn."""

from __future__ import annotations

import numpy as np
import pytest
from blending.tiny import task


@pytest.mark.parametrize("num_documents", (1, 2, 8))
def test_the_answer_is_what_the_documents_say(num_documents: int) -> None:
    prompts = task.make_prompts(np.random.default_rng(0), 50, num_documents)
    assert prompts.contexts.shape == (50, 1 + 15 * num_documents)
    for row in range(50):
        tokens = prompts.contexts[row].tolist()
        said = {
            key: (relation, value, place)
            for place, (relation, key, value, end) in enumerate(
                zip(tokens, tokens[1:], tokens[2:], tokens[3:], strict=False)
            )
            if end == task.END
        }
        assert len(said) == 3 * num_documents
        for key, answer, is_reference in zip(
            prompts.keys[row], prompts.answers[row], prompts.is_reference[row], strict=True
        ):
            relation, value, place = said[key]
            assert relation == (task.SAME if is_reference else task.IS)
            if is_reference:
                other_relation, answered, other_place = said[value]
                assert other_relation == task.IS
                assert answered == answer
                # In an earlier document.
                assert (other_place - 1) // 15 < (place - 1) // 15
            else:
                assert value == answer


def test_there_are_references_from_the_second_document_on() -> None:
    prompts = task.make_prompts(np.random.default_rng(0), 500, 8)
    shares = prompts.is_reference.reshape(500, 8, 3).mean(axis=(0, 2))
    assert shares[0] == 0
    assert shares[1:] == pytest.approx([task.SHARE_OF_REFERENCES] * 7, abs=0.06)


def test_repeats_have_a_period_each() -> None:
    tokens, is_told = task.make_repeats(np.random.default_rng(0), 40, (8, 20), 64)
    assert tokens.shape == is_told.shape == (40, 65)
    periods = set()
    for row, told in zip(tokens, is_told, strict=True):
        first = int(told.argmax())
        period = first - 2  # Behind the beginning of sequence, and the second round's first token.
        periods.add(period)
        assert told[first:].all()
        assert (row[first:] == row[first - period : len(row) - period]).all()
    assert min(periods) >= 8
    assert max(periods) <= 20
    assert len(periods) > 5
