# SPDX-License-Identifier: Apache-2.0
"""A table of prefixes against a plain dictionary."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from vllm_ascend_kvext.retention.prefix_table import MOST_PROBES, PrefixTable

STEP_TOKENS = 4
CAPACITY = 6

texts = st.text("ab", min_size=1, max_size=5).map(lambda t: "".join(c * STEP_TOKENS for c in t))


def keys_of(prompt: str) -> Callable[[int], bytes]:
    return lambda num_tokens: prompt[:num_tokens].encode()


class PrefixTableMachine(RuleBasedStateMachine):
    def __init__(self) -> None:
        super().__init__()
        self.table: PrefixTable[int] = PrefixTable(CAPACITY)
        self.model: dict[str, int] = {}

    @rule(text=texts, value=st.integers())
    def put(self, text: str, value: int) -> None:
        self.table.put(text.encode(), len(text), value)
        self.model.pop(text, None)
        self.model[text] = value
        if len(self.model) > CAPACITY:
            del self.model[next(iter(self.model))]

    @rule(text=texts)
    def pop(self, text: str) -> None:
        assert self.table.pop(text.encode()) == self.model.pop(text, None)

    @rule(text=texts)
    def get(self, text: str) -> None:
        assert self.table.get(text.encode()) == self.model.get(text)

    @rule(prompt=texts, after=st.integers(0, 20), upto=st.integers(0, 20))
    def find(self, prompt: str, after: int, upto: int) -> None:
        upto = min(upto, len(prompt))
        lengths = [len(text) for text in self.model if prompt.startswith(text)]
        expected = max((n for n in lengths if after < n <= upto), default=None)
        assert self.table.longest(keys_of(prompt), after, upto) == expected

    @rule()
    def clear(self) -> None:
        self.table.clear()
        self.model.clear()

    @invariant()
    def is_as_long(self) -> None:
        assert len(self.table) == len(self.model)


TestPrefixTable = PrefixTableMachine.TestCase


@given(lengths=st.sets(st.integers(1, 900)), after=st.integers(0, 60), upto=st.integers(0, 4000))
def test_tries_each_length_in_the_range_once_and_a_bounded_number_of_them(
    lengths: set[int], after: int, upto: int
) -> None:
    table: PrefixTable[None] = PrefixTable(1000)
    for units in lengths:
        table.put(str(units).encode(), units * STEP_TOKENS, None)
    probed: list[int] = []

    def probe(num_tokens: int) -> bytes:
        probed.append(num_tokens)
        return b"another prompt"

    assert table.longest(probe, after, upto) is None
    expected = [n * STEP_TOKENS for n in sorted(lengths) if after < n * STEP_TOKENS <= upto]
    assert probed == expected[::-1][:MOST_PROBES]


@pytest.mark.parametrize("is_cleared", [False, True])
def test_lengths_that_are_gone_are_not_probed(is_cleared: bool) -> None:
    table: PrefixTable[None] = PrefixTable(100)
    for units in range(1, 6):
        table.put(b"%d" % units, units * STEP_TOKENS, None)
    if is_cleared:
        table.clear()
    else:
        for units in range(1, 6):
            table.pop(b"%d" % units)
    probed: list[int] = []

    def probe(num_tokens: int) -> bytes:
        probed.append(num_tokens)
        return b"a prompt"

    assert table.longest(probe, 0, 500 * STEP_TOKENS) is None
    assert not probed


@pytest.mark.parametrize("kept", [1, 3])
def test_the_oldest_gives_way(kept: int) -> None:
    table: PrefixTable[int] = PrefixTable(kept)
    for value in range(5):
        table.put(str(value).encode(), STEP_TOKENS, value)
    assert [table.get(str(value).encode()) for value in range(5)] == [
        value if value >= 5 - kept else None for value in range(5)
    ]
