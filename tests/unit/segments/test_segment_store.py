# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vllm-ascend-kvext project
"""Segments in a host tier are found by all that their rows depend on, and by nothing else."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from vllm_ascend_kvext.segments.scheduler.segment_contexts import SegmentContexts, key_space
from vllm_ascend_kvext.segments.scheduler.segment_store import (
    SegmentPrefix,
    SegmentStore,
    StoredTokens,
    rows_to_load,
)
from vllm_ascend_kvext.segments.token_rows import SegmentLayout
from vllm_ascend_kvext.store.counters import Refusal
from vllm_ascend_kvext.store.entries import EntryState
from vllm_ascend_kvext.store.prefix import TierGeometry
from vllm_ascend_kvext.store.tier import HostTier

UNIT = 4
CHUNK = 16
SINK = (1, 2, 3)
LAYOUT = SegmentLayout(row_bytes=(64, 128))


class SmallStore(SegmentStore):
    """A tier of some bytes. Each call of a request takes one line."""

    def __init__(self, capacity_bytes: int = 1 << 20) -> None:
        self.tier = HostTier(capacity_bytes, TierGeometry(CHUNK, UNIT, needs_tails=False))
        super().__init__(self.tier, LAYOUT, SegmentContexts(SINK, 0))

    def store(self, token_ids: Sequence[int], cache_salt: str | None = None) -> None:
        (prefix,) = self.prefixes(token_ids, cache_salt)
        entries = self.begin_store(prefix)
        assert not isinstance(entries, Refusal)
        for entry in entries:
            self.finish_store(prefix, entry)

    def found_tokens(self, token_ids: Sequence[int], cache_salt: str | None = None) -> int:
        found = self.find(self.prefixes(token_ids, cache_salt), 0)
        return found[-1].end_tokens if found else 0


@pytest.mark.parametrize("num_tokens", [1, 3, 4, 5, 15, 16, 17, 40])
def test_a_segment_is_found_whole_whatever_its_length(num_tokens: int) -> None:
    store = SmallStore()
    store.store(range(num_tokens))
    assert store.found_tokens(range(num_tokens)) == num_tokens
    assert store.found_tokens([*range(num_tokens - 1), 99]) <= num_tokens - 1


def test_a_segment_of_another_space_is_another() -> None:
    store = SmallStore()
    store.store(range(20), "salt")
    assert store.found_tokens(range(20)) == 0
    assert store.found_tokens(range(20), "other") == 0
    assert store.found_tokens(range(20), "salt") == 20
    spaces = {
        key_space([1], None),
        key_space([1, 2], None),
        key_space([], None),
        key_space([1], "a"),
    }
    assert len(spaces) == 4
    assert key_space([1], None) == key_space([1], "")


def test_tokens_are_compared_and_not_only_their_hash(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(
        SegmentPrefix, "key_at", lambda self, boundary: boundary.to_bytes(8, "little")
    )
    store = SmallStore()
    store.store(range(20))
    assert store.found_tokens(range(20)) == 20
    assert store.found_tokens(range(50, 70)) == 0
    assert store.found_tokens([*range(16), 50, 51, 52, 53]) == 16


def test_a_segment_begins_at_its_first_token() -> None:
    store = SmallStore()
    store.store(range(40))
    store.tier.evict(lambda entry: entry.piece.first_tokens == 0)
    assert store.found_tokens(range(40)) == 0


def test_what_is_there_is_not_stored_again() -> None:
    store = SmallStore()
    store.store(range(20))
    assert store.begin_store(*store.prefixes(range(20), None)) == []
    entries = store.begin_store(*store.prefixes(range(36), None))
    assert not isinstance(entries, Refusal)
    assert [entry.piece[1:] for entry in entries] == [(20, 32), (32, 36)]
    for entry in entries:
        store.tier.fail_store(entry)
    assert {entry.state for entry in entries} == {EntryState.GONE}


@settings(max_examples=60)
@given(st.data())
def test_what_is_found_is_what_was_stored(data: st.DataObject) -> None:
    """Segments with equal beginnings, in a tier that is too small for all of them."""
    store = SmallStore(capacity_bytes=12 * LAYOUT.num_bytes(CHUNK))
    contents: dict[int, tuple[int, ...]] = {}  # The token ids, by the place of their entry.
    lengths = st.integers(1, 60)
    for _ in range(30):
        tokens = [data.draw(st.integers(0, 1))] * data.draw(st.integers(0, 20))
        tokens += [2] * data.draw(lengths)
        (prefix,) = store.prefixes(tokens, None)
        if data.draw(st.booleans()):
            entries = store.begin_store(prefix)
            for entry in entries if not isinstance(entries, Refusal) else ():
                rows = store.rows_of(prefix, entry, tokens)
                contents[entry.number] = tuple(rows.token_ids)
                store.finish_store(prefix, entry)
        position = 0
        for placed in store.find([prefix], 0):
            assert placed.first_tokens == placed.entry_tokens == position
            assert isinstance(placed.entry.row_map, StoredTokens)
            first_row = rows_to_load(placed).first_row
            num_tokens = placed.end_tokens - placed.first_tokens
            stored = contents[placed.entry.number][first_row : first_row + num_tokens]
            assert list(stored) == tokens[placed.first_tokens : placed.end_tokens]
            position = placed.end_tokens


def test_without_room_nothing_is_stored() -> None:
    store = SmallStore(capacity_bytes=LAYOUT.num_bytes(CHUNK))
    (prefix,) = store.prefixes(range(40), None)
    assert isinstance(store.begin_store(prefix), Refusal)
    assert not store.tier._entries
