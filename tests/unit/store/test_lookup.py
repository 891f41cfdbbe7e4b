# SPDX-License-Identifier: Apache-2.0
"""What a lookup costs, what is remembered, and prefixes; the rest is checked by the machine."""

from __future__ import annotations

import pytest
from unit.store.small_tier import CHUNK_TOKENS, UNIT_TOKENS, SmallTier
from unit.store.tier_model import TextPrefix

from vllm_ascend_kvext.store.entries import Piece
from vllm_ascend_kvext.store.errors import TierError
from vllm_ascend_kvext.store.lookup import Shortfall
from vllm_ascend_kvext.store.pieces import MAX_PIECES
from vllm_ascend_kvext.store.prefix import HashedPrefix, TierGeometry


class CountingPrefix(TextPrefix):
    """Counts how often a lookup asks for a key."""

    num_asked = 0

    def key_at(self, boundary_tokens: int) -> bytes:
        CountingPrefix.num_asked += 1
        return super().key_at(boundary_tokens)


def test_a_lookup_asks_for_one_key_per_chunk() -> None:
    num_chunks = 100
    tier = SmallTier(200)
    text = "".join(chr(256 + index) for index in range(num_chunks * CHUNK_TOKENS))
    tier.store_prefix(text)
    CountingPrefix.num_asked = 0
    assert tier.look_up(CountingPrefix(text), len(text)).boundary_tokens == len(text)
    assert CountingPrefix.num_asked == num_chunks
    CountingPrefix.num_asked = 0
    assert tier.find_runs(CountingPrefix("x" * len(text)), len(text)) == []
    assert CountingPrefix.num_asked == CHUNK_TOKENS // UNIT_TOKENS + num_chunks - 1


def test_a_chunk_in_too_many_pieces_is_stored_as_one_and_they_go() -> None:
    tier = SmallTier()
    text = "abcdefghijkl"
    for index in range(MAX_PIECES):
        tier.store(text, Piece.rows(2 * index, 2 * index + 2))
    assert tier.missing_pieces(TextPrefix(text), 0, 12) == [Piece.rows(0, 12)]
    whole = tier.store(text, Piece.rows(0, 12))
    assert [entry.piece.end_tokens for entry, _ in tier.removed] == [2, 4, 6, 8]
    assert tier.counters.entries_held == 1
    assert tier.find(text[:6] + "another").entries == (whole,)


def test_an_old_eviction_is_forgotten_and_a_reset_forgets_all() -> None:
    tier = SmallTier(1, remembered_keys=1)
    for text in ("aa", "bb", "cc"):
        tier.store(text, Piece.rows(0, 2))
    assert tier.find("aa").shortfall is Shortfall.NEVER_STORED
    assert tier.find("bb").shortfall is Shortfall.EVICTED
    tier.clear()
    assert tier.find("bb").shortfall is Shortfall.NEVER_STORED


@pytest.mark.parametrize(
    ("chunk", "unit", "others", "message"),
    [
        *[(*c, {}, f"found {c[0]}; choose another chunk size") for c in [(12, 5), (0, 0), (2, 4)]],
        (12, 2, {"needs_rows": False, "needs_tails": False}, "leave the tier out"),
    ],
)
def test_a_geometry_that_cannot_be_is_refused(
    chunk: int, unit: int, others: dict[str, bool], message: str
) -> None:
    with pytest.raises(TierError, match=message):
        TierGeometry(chunk, unit, **others)


@pytest.mark.parametrize("step", [16, 32, 48])
@pytest.mark.parametrize("first", [16, 48])
@pytest.mark.parametrize("stop", [1, 17, 65, 129])
def test_the_hashes_of_a_request_are_keys(first: int, stop: int, step: int) -> None:
    hashes = [bytes([number]) for number in range(7)]
    prefix = HashedPrefix(hashes, 16)
    hashes.append(bytes([7]))  # The list grows with the request.
    assert prefix.num_tokens == 128
    boundaries = range(first, stop, step)
    keys = [hashes[each // 16 - 1] for each in boundaries]
    assert list(prefix.keys_at(boundaries)) == keys == [prefix.key_at(each) for each in boundaries]


@pytest.mark.parametrize(
    "boundaries", [range(0, 33, 16), range(16, 145, 16), range(16, 65, 24), [15], [144], [-16]]
)
def test_keys_where_nothing_is_hashed_are_refused(boundaries: range | list[int]) -> None:
    prefix = HashedPrefix([b"one"] * 8, 16)
    with pytest.raises(TierError, match="ask at boundaries that are hashed"):
        if isinstance(boundaries, range):
            prefix.keys_at(boundaries)
        else:
            prefix.key_at(boundaries[0])
