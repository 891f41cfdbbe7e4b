# SPDX-License-Identifier: Apache-2.0
"""KV events of the host tier for real requests. No engine runs."""

from __future__ import annotations

from typing import Any

import pytest
from support.scheduler.block_manager import BlockManager, Layout, full
from vllm.distributed.kv_events import BlockRemoved, BlockStored
from vllm.lora.request import LoRARequest
from vllm.v1.core.kv_cache_utils import maybe_convert_block_hash
from vllm.v1.request import Request

from vllm_ascend_kvext.connector.common.events import TierEvents
from vllm_ascend_kvext.store.entries import Entry, Piece
from vllm_ascend_kvext.store.prefix import HashedPrefix, TierGeometry
from vllm_ascend_kvext.store.tier import HostTier

UNIT_TOKENS = 4
CHUNK_TOKENS = 16
PLACE_BYTES = 64
NUM_TOKENS = 2 * CHUNK_TOKENS


class Tier:
    """A tier whose events are collected as a connector does it."""

    def __init__(self, num_places: int = 100, is_enabled: bool = True) -> None:
        self.events = TierEvents(is_enabled)
        self.tier = HostTier(
            num_places * PLACE_BYTES,
            TierGeometry(CHUNK_TOKENS, UNIT_TOKENS),
            on_removed=lambda entry, _: self.events.removed(entry),
        )

    def begin(self, request: Request, piece: Piece) -> Entry:
        entry = self.tier.begin_store(prefix_of(request), piece, PLACE_BYTES, self.tier.next_use())
        assert isinstance(entry, Entry), entry
        return entry

    def finish(self, request: Request, entry: Entry) -> None:
        if self.tier.finish_store(entry):
            self.events.stored(entry, prefix_of(request), request)

    def store(self, request: Request, piece: Piece) -> Entry:
        entry = self.begin(request, piece)
        self.finish(request, entry)
        return entry


def prefix_of(request: Request) -> HashedPrefix:
    return HashedPrefix(request.block_hashes, UNIT_TOKENS)


def hash_at(request: Request, boundary_tokens: int) -> Any:
    return maybe_convert_block_hash(request.block_hashes[boundary_tokens // UNIT_TOKENS - 1])


def removal_at(request: Request, boundary_tokens: int) -> BlockRemoved:
    return BlockRemoved(block_hashes=[hash_at(request, boundary_tokens)], medium="CPU")


@pytest.fixture
def world() -> BlockManager:
    return BlockManager(Layout((full(UNIT_TOKENS),)), events=True)


@pytest.fixture
def request_(world: BlockManager) -> Request:
    return world.request(range(NUM_TOKENS))


@pytest.mark.parametrize("are_integers", [False, True])
def test_an_entry_of_rows_is_one_block(
    request_: Request, are_integers: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("VLLM_KV_EVENTS_USE_INT_BLOCK_HASHES", str(int(are_integers)))
    tier = Tier()
    tier.store(request_, Piece.rows(0, 16))
    tier.store(request_, Piece.rows(16, 24))
    first, second = tier.events.take()
    hashes = [hash_at(request_, 16)], [hash_at(request_, 24)]
    same = {"lora_id": None, "medium": "CPU", "lora_name": None, "extra_keys": [None]}
    assert first == BlockStored(hashes[0], None, token_ids=list(range(16)), block_size=16, **same)
    assert second == BlockStored(
        hashes[1], hashes[0][0], token_ids=list(range(16, 24)), block_size=8, **same
    )
    assert isinstance(first.block_hashes[0], int if are_integers else bytes)


@pytest.mark.parametrize(
    "arguments",
    [
        {},
        {"cache_salt": "salt"},
        {"lora_request": LoRARequest("adapter", 7, "/adapter")},
        {"cache_salt": "salt", "lora_request": LoRARequest("adapter", 7, "/adapter")},
    ],
    ids=["plain", "salt", "adapter", "both"],
)
def test_a_piece_of_one_block_is_told_as_the_local_cache_tells_it(
    world: BlockManager, arguments: dict[str, Any]
) -> None:
    request = world.request(range(NUM_TOKENS), **arguments)
    tier = Tier()
    world.prefill(request, UNIT_TOKENS)
    local = world.manager.take_events()
    assert len(local) == NUM_TOKENS // UNIT_TOKENS
    for first_tokens in range(0, NUM_TOKENS, UNIT_TOKENS):
        tier.store(request, Piece.rows(first_tokens, first_tokens + UNIT_TOKENS))
    names = (
        *("block_hashes", "parent_block_hash", "token_ids", "block_size"),
        *("lora_id", "lora_name", "extra_keys"),
    )
    stored = [event for event in tier.events.take() if isinstance(event, BlockStored)]
    for ours, theirs in zip(stored, local, strict=True):
        for name in names:
            assert getattr(ours, name) == getattr(theirs, name), name
        assert (ours.medium, theirs.medium) == ("CPU", "GPU")


def test_a_store_that_has_not_ended_or_has_failed_is_not_told(request_: Request) -> None:
    tier = Tier()
    entry = tier.begin(request_, Piece.rows(0, 16))
    assert tier.events.take() == []
    tier.tier.fail_store(entry)
    tier.tier.clear()
    assert tier.events.take() == []


def test_what_is_evicted_is_told(world: BlockManager) -> None:
    old, new = (world.request(range(start, start + 16)) for start in (0, 100))
    tier = Tier(num_places=1)
    tier.store(old, Piece.rows(0, 16))
    tier.events.take()
    tier.store(new, Piece.rows(0, 16))
    removed, stored = tier.events.take()
    assert removed == removal_at(old, 16)
    assert stored.block_hashes == [hash_at(new, 16)]


def test_what_is_cleared_is_told_once_and_can_be_told_again(request_: Request) -> None:
    tier = Tier()
    for _ in range(2):
        for first_tokens in (0, 16):
            tier.store(request_, Piece.rows(first_tokens, first_tokens + 16))
        assert [type(event) for event in tier.events.take()] == [BlockStored] * 2
        tier.tier.clear()
        assert tier.events.take() == [removal_at(request_, 16), removal_at(request_, 32)]
        tier.tier.clear()
        assert tier.events.take() == []


def test_tails_are_not_told(request_: Request) -> None:
    tier = Tier()
    tier.store(request_, Piece.rows(0, 16))
    (stored,) = tier.events.take()
    tails = tier.store(request_, Piece.tails(16))
    assert tier.events.take() == []
    tier.events.removed(tails)  # The events' key is that of the rows.
    assert tier.events.take() == []
    tier.tier.clear()
    assert tier.events.take() == [BlockRemoved(block_hashes=stored.block_hashes, medium="CPU")]


def test_a_longer_piece_takes_over(request_: Request) -> None:
    tier = Tier()
    tier.store(request_, Piece.rows(0, 8))
    tier.events.take()
    tier.store(request_, Piece.rows(0, 16))
    removed, stored = tier.events.take()
    assert removed == removal_at(request_, 8)
    assert (stored.block_hashes, stored.parent_block_hash) == ([hash_at(request_, 16)], None)


def test_what_another_entry_still_ends_at_is_not_removed(request_: Request) -> None:
    made, prefix = Tier(), prefix_of(request_)
    events = made.events
    short, long = (made.begin(request_, Piece.rows(first, 16)) for first in (8, 0))
    for entry in (short, long):
        events.stored(entry, prefix, request_)
    assert [event.block_size for event in events.take()] == [8, 16]
    events.removed(short)
    assert events.take() == []
    events.removed(short)
    assert events.take() == []
    for _ in range(2):
        events.removed(long)
    assert events.take() == [removal_at(request_, 16)]
