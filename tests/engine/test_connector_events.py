# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vllm-ascend-kvext project
"""KV events of the host tier for real requests. No engine runs."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import pytest
from support.connector.router_index import each_block
from support.scheduler.block_manager import BlockManager, Layout, full, mamba, window
from support.scheduler.layouts import Attention, Group, config_of
from vllm.distributed.kv_events import BlockRemoved, BlockStored
from vllm.lora.request import LoRARequest
from vllm.multimodal.inputs import MultiModalFeatureSpec, PlaceholderRange
from vllm.v1.core.kv_cache_utils import maybe_convert_block_hash
from vllm.v1.request import Request

from vllm_ascend_kvext.connector.common.events import TierEvents
from vllm_ascend_kvext.segments.scheduler.private_hashes import PrivateHashes
from vllm_ascend_kvext.store.entries import Entry, Piece
from vllm_ascend_kvext.store.prefix import HashedPrefix, TierGeometry
from vllm_ascend_kvext.store.tier import HostTier

HASH_TOKENS = 4
CHUNK_TOKENS = 16
PLACE_BYTES = 64
NUM_TOKENS = 2 * CHUNK_TOKENS
FULL = "full_attention"
ONE_GROUP = {0: HASH_TOKENS}


class Tier:
    """A tier whose events are collected as a connector does it.

    By default, units and blocks are as long as hashed blocks.
    """

    def __init__(
        self,
        tokens_per_block: Mapping[int, int] = ONE_GROUP,
        unit_tokens: int = HASH_TOKENS,
        chunk_tokens: int = CHUNK_TOKENS,
        num_places: int = 100,
        kinds: tuple[str, ...] = (FULL, "mla_attention"),
    ) -> None:
        self.events = TierEvents(kinds)
        self.events.begin(tokens_per_block)
        self.tier = HostTier(
            num_places * PLACE_BYTES,
            TierGeometry(chunk_tokens, unit_tokens),
            on_rows_lost=self.events.removed,
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

    def store_all(self, request: Request) -> None:
        for first_tokens in range(0, NUM_TOKENS, CHUNK_TOKENS):
            self.store(request, Piece.rows(first_tokens, first_tokens + CHUNK_TOKENS))

    def evict(self, *entries: Entry) -> None:
        self.tier.evict(lambda entry: entry in entries)

    def take(self) -> list[tuple[str, int | None, list[int]]]:
        """The events since the last call: what happened, the group, and the blocks by hash."""
        return [
            ("stored" if isinstance(event, BlockStored) else "removed", event.group_idx, hashes)
            for event in self.events.take()
            for hashes in [event.block_hashes]
        ]


def prefix_of(request: Request) -> HashedPrefix:
    return HashedPrefix(request.block_hashes, HASH_TOKENS)


def hashes_at(request: Request, *boundaries: int) -> list[Any]:
    """The hashes of the blocks that end at some boundaries, if blocks are hashed blocks."""
    return [
        maybe_convert_block_hash(request.block_hashes[tokens // HASH_TOKENS - 1])
        for tokens in boundaries
    ]


@pytest.fixture
def world() -> BlockManager:
    return BlockManager(Layout((full(HASH_TOKENS),)), events=True)


@pytest.fixture
def request_(world: BlockManager) -> Request:
    return world.request(range(NUM_TOKENS))


@pytest.mark.parametrize("are_integers", [False, True])
def test_an_event_has_all_blocks_of_an_entry(
    request_: Request, are_integers: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("VLLM_KV_EVENTS_USE_INT_BLOCK_HASHES", str(int(are_integers)))
    tier = Tier()
    tier.store(request_, Piece.rows(0, 16))
    tier.store(request_, Piece.rows(16, 24))
    first, second = tier.events.take()
    hashes = hashes_at(request_, 4, 8, 12, 16), hashes_at(request_, 20, 24)
    same = {
        "block_size": 4,
        "lora_id": None,
        "medium": "CPU",
        "lora_name": None,
        "group_idx": 0,
        "kv_cache_spec_kind": FULL,
    }
    assert first == BlockStored(
        hashes[0], None, token_ids=list(range(16)), extra_keys=[None] * 4, **same
    )
    assert second == BlockStored(
        hashes[1], hashes[0][-1], token_ids=list(range(16, 24)), extra_keys=[None] * 2, **same
    )
    assert isinstance(first.block_hashes[0], int if are_integers else bytes)


IMAGES = [
    MultiModalFeatureSpec(None, "image", name, PlaceholderRange(offset, 5))
    for name, offset in (("cat", 2), ("dog", 9), ("cow", 21))
]


@pytest.mark.parametrize("block_tokens", [HASH_TOKENS, 4 * HASH_TOKENS])
@pytest.mark.parametrize(
    "arguments",
    [
        {},
        {"cache_salt": "salt"},
        {"lora_request": LoRARequest("adapter", 7, "/adapter")},
        {"cache_salt": "salt", "lora_request": LoRARequest("adapter", 7, "/adapter")},
        {"mm_features": IMAGES},
    ],
    ids=["plain", "salt", "adapter", "salt and adapter", "images"],
)
def test_blocks_are_told_as_the_local_cache_tells_them(
    arguments: dict[str, Any], block_tokens: int
) -> None:
    world = BlockManager(Layout((full(block_tokens), window(HASH_TOKENS, 9))), events=True)
    request = world.request(range(NUM_TOKENS), **arguments)
    world.prefill(request, NUM_TOKENS)
    local = [event for event in world.manager.take_events() if event.group_idx == 0]
    assert {event.kv_cache_spec_kind for event in local} == {FULL}
    tier = Tier({0: block_tokens})
    for piece in (Piece.rows(0, 12), Piece.rows(12, 16), Piece.rows(16, 32)):
        tier.store(request, piece)
    events = tier.events.take()
    assert each_block(events) == each_block(local)
    assert len(each_block(events)) == NUM_TOKENS // block_tokens
    assert {(event.medium, event.kv_cache_spec_kind) for event in events} == {("CPU", FULL)}


def test_a_store_that_has_not_ended_or_has_failed_is_not_told(request_: Request) -> None:
    tier = Tier()
    entry = tier.begin(request_, Piece.rows(0, 16))
    assert tier.take() == []
    tier.tier.fail_store(entry)
    tier.tier.clear()
    assert tier.take() == []


def test_all_blocks_of_what_is_evicted_are_told(world: BlockManager) -> None:
    old, new = (world.request(range(start, start + 16)) for start in (0, 100))
    tier = Tier(num_places=1)
    tier.store(old, Piece.rows(0, 16))
    tier.events.take()
    tier.store(new, Piece.rows(0, 16))
    removed, stored = tier.events.take()
    assert removed == BlockRemoved(hashes_at(old, 4, 8, 12, 16), medium="CPU", group_idx=0)
    assert stored.block_hashes == hashes_at(new, 4, 8, 12, 16)


def test_an_entry_that_loses_its_end_loses_these_blocks(request_: Request) -> None:
    tier = Tier({0: HASH_TOKENS, 1: 2 * HASH_TOKENS})
    entry = tier.store(request_, Piece.rows(0, 16))
    tier.events.take()
    tier.events.removed(entry.keys[3:])
    long_blocks = tier_hashes(request_, 2 * HASH_TOKENS)
    assert tier.take() == [
        ("removed", 0, hashes_at(request_, 16)),
        ("removed", 1, long_blocks[1:2]),
    ]
    tier.events.removed(entry.keys[1:3])
    assert tier.take() == [
        ("removed", 0, hashes_at(request_, 8, 12)),
        ("removed", 1, long_blocks[:1]),
    ]
    tier.tier.clear()
    assert tier.take() == [("removed", 0, hashes_at(request_, 4))]


def tier_hashes(request: Request, block_tokens: int) -> list[Any]:
    """The hashes of longer blocks, as vLLM's local prefix cache tells them."""
    world = BlockManager(Layout((full(block_tokens), window(HASH_TOKENS, 9))), events=True)
    twin = world.request(request.all_token_ids[:])
    world.prefill(twin, NUM_TOKENS)
    events = [event for event in world.manager.take_events() if event.group_idx == 0]
    return [block_hash for event in events for block_hash in event.block_hashes]


def test_what_is_cleared_is_told_once_and_can_be_told_again(request_: Request) -> None:
    tier = Tier()
    for _ in range(2):
        tier.store_all(request_)
        assert [name for name, *_ in tier.take()] == ["stored", "stored"]
        tier.tier.clear()
        assert tier.take() == [
            ("removed", 0, hashes_at(request_, 4, 8, 12, 16)),
            ("removed", 0, hashes_at(request_, 20, 24, 28, 32)),
        ]
        tier.tier.clear()
        assert tier.take() == []


def test_tails_are_not_told(request_: Request) -> None:
    tier = Tier()
    tier.store(request_, Piece.rows(0, 16))
    (stored,) = tier.events.take()
    tails = tier.store(request_, Piece.tails(16))
    assert tier.take() == []
    tier.evict(tails)  # Its key is that of the last rows.
    assert tier.take() == []
    tier.tier.clear()
    assert tier.take() == [("removed", 0, stored.block_hashes)]


def test_a_longer_piece_tells_only_the_blocks_that_are_new(request_: Request) -> None:
    tier = Tier()
    tier.store(request_, Piece.rows(0, 8))
    tier.events.take()
    tier.store(request_, Piece.rows(0, 16))
    (stored,) = tier.events.take()
    assert stored.block_hashes == hashes_at(request_, 12, 16)
    assert [stored.parent_block_hash] == hashes_at(request_, 8)
    assert stored.token_ids == list(range(8, 16))


def test_what_another_entry_still_has_is_not_removed(request_: Request) -> None:
    tier = Tier()
    entries = [tier.begin(request_, Piece.rows(first, 16)) for first in (8, 4)]
    tier.finish(request_, entries[0])
    tier.store(request_, Piece.rows(0, 8))
    tier.finish(request_, entries[1])  # It replaces the first one.
    stored = [block for name, _, blocks in tier.take() if name == "stored" for block in blocks]
    assert stored == hashes_at(request_, 4, 8, 12, 16)
    tier.evict(entries[1])
    assert tier.take() == [("removed", 0, hashes_at(request_, 12, 16))]


def test_each_full_group_has_its_own_events(world: BlockManager) -> None:
    request = world.request(range(NUM_TOKENS))
    tier = Tier({0: HASH_TOKENS, 1: CHUNK_TOKENS})
    tier.store_all(request)
    events = tier.events.take()
    assert {
        (event.group_idx, event.kv_cache_spec_kind, event.block_size, len(event.block_hashes))
        for event in events
    } == {(0, FULL, 4, 4), (1, "mla_attention", 16, 1)}
    assert len(events) == 4


def test_a_block_shorter_than_a_unit_comes_and_goes_with_the_unit(request_: Request) -> None:
    tier = Tier(unit_tokens=8)
    entry = tier.store(request_, Piece.rows(0, 16))
    assert tier.take() == [("stored", 0, hashes_at(request_, 4, 8, 12, 16))]
    tier.events.removed(entry.keys[1:])
    assert tier.take() == [("removed", 0, hashes_at(request_, 12, 16))]


def test_a_block_before_which_prompts_have_not_parted_stays_with_either(
    world: BlockManager,
) -> None:
    """They part within a unit of three blocks: in its last block, or in the last but one."""
    ends = ([0] * 16, [0] * 8 + [1] * 8, [0] * 4 + [1] * 12)
    requests = [world.request([*range(12), *end]) for end in ends]
    tier = Tier(unit_tokens=12, chunk_tokens=24)
    entries = [tier.store(request, Piece.rows(0, 24)) for request in requests]
    told = [blocks for _, _, blocks in tier.take()]
    assert told == [
        hashes_at(requests[0], *range(4, 25, 4)),
        hashes_at(requests[1], 24),
        hashes_at(requests[2], 20, 24),
    ]
    gone = []
    for entry in entries:
        tier.events.removed(entry.keys[1:])
        gone.append([block for _, _, blocks in tier.take() for block in blocks])
    assert gone == [
        hashes_at(requests[0], 24),
        hashes_at(requests[1], 20, 24),
        hashes_at(requests[2], 16, 20, 24),
    ]


def test_a_block_of_several_entries_is_told_when_all_of_it_is_there(request_: Request) -> None:
    tier = Tier({1: CHUNK_TOKENS})
    begin = tier.store(request_, Piece.rows(0, 8))
    assert tier.take() == []
    end = tier.store(request_, Piece.rows(8, 16))
    assert [(name, group) for name, group, _ in tier.take()] == [("stored", 1)]
    tier.evict(begin)
    assert [(name, group) for name, group, _ in tier.take()] == [("removed", 1)]
    tier.evict(end)
    assert tier.take() == []
    for piece in (Piece.rows(8, 16), Piece.rows(0, 8)):
        tier.store(request_, piece)
    assert [(name, group) for name, group, _ in tier.take()] == [("stored", 1)]


def test_blocks_that_part_in_their_middle_go_one_by_one(world: BlockManager) -> None:
    same = range(8)
    requests = [world.request([*same, *range(start, start + 8)]) for start in (100, 200)]
    tier = Tier({1: CHUNK_TOKENS})
    begin = tier.store(requests[0], Piece.rows(0, 8))
    ends = [tier.store(request, Piece.rows(8, 16)) for request in requests]
    assert [name for name, *_ in tier.take()] == ["stored"] * 2
    tier.evict(ends[0])
    ((_, _, first),) = tier.take()
    tier.store(requests[0], Piece.rows(8, 16))
    assert tier.take() == [("stored", 1, first)]
    tier.evict(begin)
    ((name, _, both),) = tier.take()
    assert (name, len(set(both))) == ("removed", 2)


def test_a_block_waits_until_its_parent_is_told(request_: Request) -> None:
    tier = Tier()
    tier.store(request_, Piece.rows(16, 24))
    assert tier.take() == []
    tier.store(request_, Piece.rows(24, 32))
    assert tier.take() == []
    tier.store(request_, Piece.rows(0, 16))
    events = tier.events.take()
    found = [block for event in events for block in event.block_hashes]
    assert found == hashes_at(request_, *range(4, 33, 4))
    blocks = each_block(events)
    assert [block[1] for block in blocks] == [None, *found[:-1]]
    assert [token for block in blocks for token in block[2]] == list(range(NUM_TOKENS))


def test_a_block_that_goes_while_it_waits_is_never_told(request_: Request) -> None:
    tier = Tier()
    waiting = tier.store(request_, Piece.rows(16, 32))
    tier.events.removed(waiting.keys[2:3])
    tier.store(request_, Piece.rows(0, 16))
    assert [blocks for *_, blocks in tier.take()] == [
        hashes_at(request_, 4, 8, 12, 16),
        hashes_at(request_, 20),
        hashes_at(request_, 24),
    ]
    tier.evict(waiting)
    assert tier.take() == [("removed", 0, hashes_at(request_, 20, 24))]


def test_a_block_that_parts_from_a_waiting_one_waits_too(world: BlockManager) -> None:
    requests = [world.request([*range(16), *range(start, start + 8)]) for start in (100, 200)]
    tier = Tier()
    for request in requests:
        tier.store(request, Piece.rows(16, 24))
    assert tier.take() == []
    tier.store(requests[0], Piece.rows(0, 16))
    found = [block for *_, blocks in tier.take() for block in blocks]
    assert set(found) == {
        *hashes_at(requests[0], *range(4, 25, 4)),
        *hashes_at(requests[1], 20, 24),
    }


def test_a_block_stays_when_its_parent_goes_and_comes_back(request_: Request) -> None:
    tier = Tier()
    begin = tier.store(request_, Piece.rows(0, 16))
    tier.store(request_, Piece.rows(16, 20))
    tier.events.take()
    tier.evict(begin)
    assert tier.take() == [("removed", 0, hashes_at(request_, 4, 8, 12, 16))]
    tier.store(request_, Piece.rows(16, 24))
    assert tier.take() == [("stored", 0, hashes_at(request_, 24))]
    tier.store(request_, Piece.rows(0, 16))
    assert tier.take() == [("stored", 0, hashes_at(request_, 4, 8, 12, 16))]


@pytest.mark.parametrize("block_tokens", [HASH_TOKENS, CHUNK_TOKENS])
def test_blocks_have_the_hashes_of_the_time_when_the_store_was_planned(
    request_: Request, block_tokens: int
) -> None:
    """A request may reuse a segment after an entry for its exact tokens has begun."""
    tier = Tier({0: block_tokens})
    entries = [tier.begin(request_, Piece.rows(first, first + 16)) for first in (0, 16)]
    exact = hashes_at(request_, *range(block_tokens, NUM_TOKENS + 1, block_tokens))
    prefix = tier.events.fixed(prefix_of(request_))
    PrivateHashes(request_, 24, HASH_TOKENS)
    assert prefix.hashes != request_.block_hashes
    for entry in entries:
        assert tier.tier.finish_store(entry)
        tier.events.stored(entry, prefix, request_)
    assert [block for *_, blocks in tier.take() for block in blocks] == exact
    tier.tier.clear()
    assert [block for *_, blocks in tier.take() for block in blocks] == exact


def test_kinds_are_those_of_the_local_events() -> None:
    specs = (
        full(4),
        window(4, 9),
        mamba(4),
        Group(Attention.MLA, 4).to_spec(),
    )
    world = BlockManager(Layout(specs))
    kinds = [kind for kind, _ in world.manager.kv_cache_event_metadata]
    assert list(TierEvents.of(config_of(specs, (), 16))._kinds) == kinds
    assert kinds[0] == FULL


def test_without_events_nothing_is_kept(request_: Request) -> None:
    tier = Tier(kinds=())
    assert not tier.events.are_on
    tier.store_all(request_)
    tier.tier.clear()
    assert tier.take() == []
    assert not tier.events._groups
