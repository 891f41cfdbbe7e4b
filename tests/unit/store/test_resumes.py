# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vllm-ascend-kvext project
"""Tails wait until a request resumes at them, and rows without tails are of no use."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
from unit.store.small_tier import PLACE_BYTES, SmallTier
from unit.store.tier_model import TextPrefix

from vllm_ascend_kvext.store.counters import Refusal, Removal
from vllm_ascend_kvext.store.entries import Entry, EntryState, Piece
from vllm_ascend_kvext.store.eviction import USELESS
from vllm_ascend_kvext.store.prefix import TierGeometry
from vllm_ascend_kvext.store.resumes import Resumes, TailOrigin
from vllm_ascend_kvext.store.tier import HostTier

# What is learned of tails.


def keys_upto(name: str, num_turns: int) -> list[bytes]:
    return [f"{name}/{turn}".encode() for turn in range(1, num_turns + 1)]


def play_chats(resumes: Resumes, num_chats: int, num_turns: int) -> int:
    """Play chats, five at once. Each turn resumes where the turn before has ended."""
    now = 0
    for first in range(0, num_chats, 5):
        for turn in range(num_turns + 1):
            for chat in range(first, first + 5):
                now += 1
                resumes.note_admitted(keys_upto(f"{chat}", turn), now)
                now += 1
                resumes.note_tails(f"{chat}/{turn + 1}".encode(), TailOrigin.END_OF_TURN, now)
    return now


def test_earlier_tails_of_a_chat_are_worth_less_than_the_latest() -> None:
    """A turn asks for the rows before all of them, but resumes at the latest tails only."""
    resumes = Resumes(1000)
    now = play_chats(resumes, 50, 6)
    now += 1
    keys = keys_upto("new", 3)
    for key in keys:
        resumes.note_tails(key, TailOrigin.END_OF_TURN, now)
    for number in (1, 2):
        resumes.note_admitted(keys[:number], now + number)
    now += 5
    latest = resumes.density(keys[2], 0, now)
    assert latest > 5 * resumes.density(keys[1], 0, now)
    assert latest > 5 * resumes.density(keys[0], 0, now)


@pytest.mark.parametrize("used", TailOrigin)
def test_tails_of_an_origin_are_expected_to_be_used_at_the_same_rate(used: TailOrigin) -> None:
    resumes = Resumes(1000)
    now = 0
    for number in range(200):
        for origin in TailOrigin:
            now += 1
            key = f"{number}/{origin}".encode()
            resumes.note_tails(key, origin, now)
            now += 1
            resumes.note_admitted([key] if origin is used else [b"other"], now)
    new = {origin: f"new/{origin}".encode() for origin in TailOrigin}
    for origin, key in new.items():
        resumes.note_tails(key, origin, now)
    found = {origin: resumes.density(key, 0, now) for origin, key in new.items()}
    others = [density for origin, density in found.items() if origin is not used]
    assert found[used] > 10 * max(others)


def test_tails_that_are_known_keep_their_origin_and_wait_since_they_were_used() -> None:
    resumes = Resumes(1000)
    now = play_chats(resumes, 20, 4)
    resumes.note_tails(b"known", TailOrigin.END_OF_TURN, now)
    before = resumes.density(b"known", 0, now + 40)
    resumes.note_tails(b"known", TailOrigin.UNASKED, now + 40)
    assert resumes.density(b"known", 0, now + 40) == before
    assert before != resumes.density(b"known", now + 40, now + 40)


def test_nothing_is_known_after_a_reset_and_the_oldest_tails_are_forgotten() -> None:
    resumes = Resumes(3)
    for number, name in enumerate("abcd"):
        resumes.note_tails(name.encode(), TailOrigin.ASKED, number)
    assert [resumes._reuse.num_until_known([name.encode()]) for name in "abcd"] == [0, 1, 1, 1]
    play_chats(resumes, 20, 4)
    resumes.clear()
    assert not resumes._reuse.num_keys
    assert resumes.density(b"0/1", 0, 1000) == 1.0


def origins(resumes: Resumes, keys: Sequence[bytes]) -> list[int | None]:
    runs = [resumes._reuse._run_of.get(key) for key in keys]
    return [None if run is None else run.origin for run in runs]


def test_a_request_passes_the_ends_before_the_tails_at_which_it_resumes() -> None:
    resumes = Resumes(1000)
    keys = keys_upto("text", 6)
    ends = {0: TailOrigin.END_OF_TURN, 2: TailOrigin.UNASKED, 3: TailOrigin.END_OF_LATER_PROMPT}
    for number, origin in {**ends, 5: TailOrigin.END_OF_PROMPT}.items():
        resumes.note_tails(keys[number], origin, 1)
    resumes.note_answered(keys[:5], 2)
    found = [*(ends.get(number) for number in range(3)), TailOrigin.ANSWERED, None]
    assert origins(resumes, keys[:5]) == found
    assert resumes.note_admitted(keys[:4], 3) == 4
    found[0] = TailOrigin.PASSED
    assert origins(resumes, keys[:5]) == found
    assert resumes.note_admitted(keys, 4) == 6
    found[3] = TailOrigin.PASSED
    assert origins(resumes, keys) == [*found, TailOrigin.END_OF_PROMPT]
    assert resumes.note_admitted(keys[:2], 5) == 1
    assert origins(resumes, keys[:2]) == found[:2]


@pytest.mark.parametrize(
    ("origin", "found"),
    [
        (TailOrigin.END_OF_PROMPT, TailOrigin.ANSWERED),
        (TailOrigin.END_OF_LATER_PROMPT, TailOrigin.ANSWERED),
        (TailOrigin.ASKED, TailOrigin.ASKED),
        (TailOrigin.END_OF_TURN, TailOrigin.END_OF_TURN),
    ],
)
def test_an_answer_that_leaves_tails_changes_what_is_expected_of_those_of_its_prompt(
    origin: TailOrigin, found: TailOrigin
) -> None:
    resumes = Resumes(1000)
    keys = keys_upto("text", 5)
    resumes.note_answered(keys, 1)
    resumes.note_tails(keys[0], TailOrigin.END_OF_PROMPT, 1)
    resumes.note_tails(keys[2], origin, 1)
    resumes.note_answered(keys, 1)
    assert origins(resumes, keys) == [TailOrigin.END_OF_PROMPT, None, found, None, None]


def play_agents(resumes: Resumes, num_agents: int, num_turns: int) -> int:
    """Play agents, five at once. Each turn leaves tails where its prompt ends.

    Every other answer is long enough to leave tails, too, and then the next turn resumes there.
    """
    now = 0
    for first in range(0, num_agents, 5):
        paths: dict[int, list[bytes]] = {agent: [] for agent in range(first, first + 5)}
        for turn in range(num_turns):
            for agent, path in paths.items():
                now += 1
                resumes.note_admitted(path, now)
                path.append(f"{agent}/{turn}/prompt".encode())
                resumes.note_tails(path[-1], TailOrigin.END_OF_PROMPT, now)
                now += 1
                if turn % 2:
                    key = f"{agent}/{turn}/answer".encode()
                    resumes.note_tails(key, TailOrigin.END_OF_TURN, now)
                    resumes.note_answered(path, now)
                    path.append(key)
    return now


def test_the_last_tails_of_an_agent_are_worth_more_than_those_that_it_has_passed() -> None:
    resumes = Resumes(1000)
    now = play_agents(resumes, 50, 6) + 1
    for name in (b"last", b"answered", b"passed"):
        resumes.note_tails(name, TailOrigin.END_OF_PROMPT, now)
    resumes.note_tails(b"answer", TailOrigin.END_OF_TURN, now)
    resumes.note_answered([b"answered"], now)
    resumes.note_admitted([b"passed", b"answer"], now + 1)
    now += 5
    last = resumes.density(b"last", 0, now)
    assert last > 5 * resumes.density(b"answered", 0, now)
    assert last > 5 * resumes.density(b"passed", 0, now)


def test_what_is_asked_for_at_once_is_not_expected_again_when_its_answer_has_left_tails() -> None:
    """Each fifth prompt is sent twice at once. Chats go on at the ends of their answers."""
    resumes = Resumes(1000)
    now = 0
    running: list[bytes] = []
    ended: list[list[bytes]] = []
    for number in range(600):
        path = ended.pop(0) if len(ended) > 40 else []
        prompt, answer = f"{number}/prompt".encode(), f"{number}/answer".encode()
        for _ in range(2 if number % 5 == 0 else 1):
            now += 1
            resumes.note_admitted([*path, prompt], now)
            resumes.note_tails(prompt, TailOrigin.END_OF_LATER_PROMPT, now)
        running.append(prompt)
        if len(running) > 20:
            now += 1
            first = running.pop(0)
            resumes.note_tails(answer, TailOrigin.END_OF_LATER_TURN, now)
            resumes.note_answered([first], now)
            ended.append([first, answer])
    resumes.note_tails(b"prompt", TailOrigin.END_OF_LATER_PROMPT, now)
    resumes.note_tails(b"answer", TailOrigin.END_OF_LATER_TURN, now)
    at_once, later = now, now + 10
    assert resumes.density(b"prompt", 0, at_once) > resumes.density(b"answer", 0, at_once)
    assert resumes.density(b"prompt", 0, later) < resumes.density(b"answer", 0, later)


# What a tier learns of requests.


def num_resumes(tier: HostTier) -> float:
    """How many requests are known to have resumed at tails."""
    return sum(map(sum, tier._resumes._reuse.came_back))


def begin_tails(
    tier: HostTier, text: str, use: int, num_places: int = 1, **options: Any
) -> Entry | Refusal:
    prefix = TextPrefix(text)
    return tier.begin_store(
        prefix, Piece.tails(len(text)), num_places * PLACE_BYTES, use, **options
    )


def store_tails(tier: HostTier, text: str, use: int, num_places: int = 1, **options: Any) -> Entry:
    entry = begin_tails(tier, text, use, num_places, **options)
    assert isinstance(entry, Entry), entry
    tier.finish_store(entry)
    return entry


@pytest.mark.parametrize(
    ("prompt_tokens", "tails_at", "used"),
    [
        (12, [4, 12], 4),  # The last token of a prompt is always computed.
        (13, [4, 12], 12),
        (11, [4, 10], 10),
        (24, [4, 26], 4),
        (4, [4], None),
        (1, [2], None),
    ],
)
def test_a_request_resumes_at_the_latest_tails_of_its_prompt(
    prompt_tokens: int, tails_at: list[int], used: int | None
) -> None:
    tier = SmallTier(needs_tails=True)
    text = "abcdefghijklmnopqrstuvwxyz"
    for boundary in tails_at:
        store_tails(tier, text[:boundary], tier.next_use())
    reuse = tier._resumes._reuse
    waiting = {end: reuse._run_of[text[:end].encode()].asked_at for end in tails_at}
    use = tier.note_admitted(TextPrefix(text), prompt_tokens)
    assert use == tier._latest_use
    if used is not None:
        waiting[used] = use
    found = {end: reuse._run_of[text[:end].encode()].asked_at for end in tails_at}
    assert found == waiting
    assert num_resumes(tier) == (used is not None)


def test_each_turn_of_a_chat_counts_though_it_follows_at_once() -> None:
    """No other request takes a use between the end of a turn and the next turn."""
    tier = SmallTier(needs_tails=True)
    text = ""
    for turn in range(20):
        text += "ab"
        assert tier.note_admitted(TextPrefix(text), len(text)) == 2 * turn + 1
        store_tails(tier, text, tier.next_use(), origin=TailOrigin.END_OF_TURN)
    assert num_resumes(tier) == 19


@pytest.mark.parametrize("turn", [TailOrigin.END_OF_TURN, TailOrigin.END_OF_LATER_TURN])
def test_only_answers_change_what_is_expected_of_tails(turn: TailOrigin) -> None:
    tier = SmallTier(2, needs_tails=True)
    text = "abcdef"
    store_tails(tier, text[:2], tier.next_use(), origin=TailOrigin.END_OF_PROMPT)
    begin_tails(tier, text[:4], tier.next_use(), origin=TailOrigin.UNASKED)
    begin_tails(tier, text[:4] + "xy", tier.next_use(), origin=TailOrigin.END_OF_LATER_PROMPT)
    keys = [key.encode() for key in (text[:2], text[:4])]
    assert origins(tier._resumes, keys) == [TailOrigin.END_OF_PROMPT, TailOrigin.UNASKED]
    begin_tails(tier, "abxy", tier.next_use(), origin=turn)
    assert origins(tier._resumes, keys) == [TailOrigin.ANSWERED, TailOrigin.UNASKED]


def test_tails_count_as_used_whether_or_not_there_was_room_for_them() -> None:
    tier = SmallTier(1, needs_tails=True)
    assert tier.pin(tier.store("aa", Piece.rows(0, 2))) is not None
    assert begin_tails(tier, "bb", tier.next_use()) is Refusal.NO_ROOM
    tier.note_admitted(TextPrefix("bbb"), 3)
    assert num_resumes(tier) == 1
    tier.clear()
    assert num_resumes(tier) == 0


def test_a_model_without_tails_learns_no_resumes() -> None:
    tier = SmallTier()
    assert tier.note_admitted(TextPrefix("aaaa"), 4) == 1
    assert tier._resumes._reuse._num_requests == 0


# What is known of prefixes that are not stored.


@pytest.mark.parametrize("num_shared", range(0, 31, 3))
@pytest.mark.parametrize("limit_tokens", [0, 1, 2, 9, 18, 40])
@pytest.mark.parametrize("cut_tokens", [2, 4, 12])
def test_a_prefix_is_known_though_nothing_of_it_is_stored(
    num_shared: int, limit_tokens: int, cut_tokens: int
) -> None:
    tier = HostTier(PLACE_BYTES, TierGeometry(12, 2, cut_tokens=cut_tokens))
    old = "abcdefghijklmnopqrstuvwxyzABCD"
    tier.next_use()
    tier.note_ended(TextPrefix(old), 20, len(old))  # The answer counts, too.
    prefix = TextPrefix(old[:num_shared] + "=" * (40 - num_shared))
    found = tier.known_tokens(prefix, limit_tokens)
    most = min(num_shared, limit_tokens)
    assert found == max([0, *(end for end in range(2, most + 1) if (end - 2) % cut_tokens == 0)])
    assert found <= most < found + cut_tokens + 2
    tier.clear()
    assert not tier.known_tokens(prefix, limit_tokens)


def test_a_prefix_without_keys_is_not_known() -> None:
    tier = SmallTier(needs_tails=True)
    tier.note_ended(TextPrefix("aaaa"), 4, 4)
    assert tier.known_tokens(TextPrefix(""), 4) == 0


# Rows without tails, and tails without rows.


def text_of(number: int, num_chunks: int = 1) -> str:
    """A text that shares no prefix with other texts."""
    return chr(256 + number) * 12 * num_chunks


def store_chunk(tier: SmallTier, number: int, chunk: int = 0) -> Entry:
    text = text_of(number, chunk + 1)
    return tier.store(text, Piece.rows(12 * chunk, 12 * chunk + 12))


def density(tier: HostTier, entry: Entry) -> float:
    return tier._order.priority(entry, tier._latest_use).density


def pass_uses(tier: SmallTier, number: int = 50) -> None:
    """Let so much be stored elsewhere that nothing is recent any more."""
    for _ in range(number):
        tier._order.note_bytes(tier.next_use(), PLACE_BYTES)


def test_rows_without_tails_go_before_older_rows_that_have_some() -> None:
    tier = SmallTier(3, needs_tails=True)
    store_chunk(tier, 0)
    store_tails(tier, text_of(0), tier.next_use())
    without = store_chunk(tier, 1)
    pass_uses(tier)
    assert density(tier, without) == USELESS
    store_chunk(tier, 2)
    assert tier.evicted() == [without]


def test_rows_without_tails_stay_as_others_do_in_a_model_that_needs_none() -> None:
    tier = SmallTier(3)
    rows = [store_chunk(tier, number) for number in range(3)]
    pass_uses(tier)
    tier.renew(TextPrefix(text_of(0)), 12, tier.next_use())
    assert density(tier, rows[1]) > 0
    store_chunk(tier, 3)
    assert tier.evicted() == [rows[1]]


def test_rows_that_were_just_used_may_still_get_tails() -> None:
    tier = SmallTier(12, needs_tails=True)
    rows = store_chunk(tier, 0)
    assert density(tier, rows) > 0
    rows.chance = 0.2  # An answer that will hardly come back is not protected.
    assert density(tier, rows) == USELESS


def test_rows_whose_tails_are_being_stored_stay() -> None:
    tier = SmallTier(3, needs_tails=True)
    rows = store_chunk(tier, 0)
    store_chunk(tier, 1)
    tails = begin_tails(tier, text_of(0), tier.next_use())
    assert isinstance(tails, Entry)
    pass_uses(tier)
    assert begin_tails(tier, text_of(1), tier.next_use()) is Refusal.NO_ROOM
    tier.finish_store(tails)
    store_tails(tier, text_of(1), tier.next_use())
    assert tier.evicted() == [tails] and rows.state is EntryState.STORED


def test_rows_of_which_a_store_of_tails_has_failed_are_of_no_use() -> None:
    tier = SmallTier(3, needs_tails=True)
    store_chunk(tier, 1)
    rows = store_chunk(tier, 0)
    tails = begin_tails(tier, text_of(0), tier.next_use())
    assert isinstance(tails, Entry)
    pass_uses(tier)
    assert begin_tails(tier, text_of(1), tier.next_use(), num_places=2) is Refusal.NO_ROOM
    tier.fail_store(tails)
    store_tails(tier, text_of(1), tier.next_use(), num_places=2)
    assert tier.evicted() == [rows]


class SegmentPrefix(TextPrefix):
    """A prefix of a segment, which belongs to no prompt."""

    key_space = "segments"


def test_segments_need_no_tails() -> None:
    tier = SmallTier(2, needs_tails=True)
    use = tier.next_use()
    segment = tier.begin_store(SegmentPrefix(text_of(0)), Piece.rows(0, 12), PLACE_BYTES, use)
    assert isinstance(segment, Entry)
    tier.finish_store(segment)
    rows = store_chunk(tier, 1)
    pass_uses(tier)
    assert density(tier, segment) > 0
    store_chunk(tier, 2)
    assert tier.evicted() == [rows]


def test_tails_whose_rows_are_gone_are_of_no_use() -> None:
    tier = SmallTier(12, needs_tails=True)
    rows = store_chunk(tier, 0)
    tails = store_tails(tier, text_of(0), tier.next_use())
    assert density(tier, tails) > 0
    tier.evict(lambda entry: entry is rows)
    assert density(tier, tails) == USELESS


def test_tails_of_a_model_without_rows_are_of_use() -> None:
    tier = HostTier(2 * PLACE_BYTES, TierGeometry(12, 2, needs_rows=False))
    entries = [store_tails(tier, text_of(number), tier.next_use()) for number in range(3)]
    assert [entry.state for entry in entries] == [
        EntryState.GONE,
        EntryState.STORED,
        EntryState.STORED,
    ]
    assert density(tier, entries[1]) > 0


# The gap that tails need.


def test_useless_rows_go_until_tails_have_a_gap_and_no_longer() -> None:
    tier = SmallTier(6, needs_tails=True)
    store_chunk(tier, 9)
    useful = store_tails(tier, text_of(9)[:4], tier.next_use())
    useless = [store_chunk(tier, number) for number in range(4)]
    pass_uses(tier)
    tails = store_tails(tier, text_of(9), tier.next_use(), num_places=2)
    assert tier.evicted() == useless[:2]
    assert tails.num_bytes == 2 * PLACE_BYTES and useful.state is EntryState.STORED


def test_a_prefix_without_tails_goes_from_its_end_on() -> None:
    tier = SmallTier(4, needs_tails=True)
    store_chunk(tier, 9)
    chunks = [store_chunk(tier, 0, chunk) for chunk in range(3)]
    pass_uses(tier)
    store_tails(tier, text_of(9), tier.next_use(), num_places=2)
    assert tier.evicted() == [chunks[2], chunks[1]]


def test_what_a_request_can_use_goes_only_where_nothing_useless_is_left() -> None:
    """Useless entries that lie apart make no gap for large tails."""
    tier = SmallTier(5, needs_tails=True)
    store_chunk(tier, 9)
    first = store_chunk(tier, 0)
    rows = store_chunk(tier, 1)
    tails = store_tails(tier, text_of(1), tier.next_use())
    last = store_chunk(tier, 2)
    pass_uses(tier)
    store_tails(tier, text_of(9), tier.next_use(), num_places=2)
    assert tier.evicted() == [first, last, tails]
    assert rows.state is EntryState.STORED


def test_a_refusal_of_tails_evicts_only_what_is_useless() -> None:
    tier = SmallTier(4, needs_tails=True)
    store_chunk(tier, 9)
    useless = store_chunk(tier, 0)
    store_chunk(tier, 1)
    load = tier.pin(store_tails(tier, text_of(1), tier.next_use()))
    pass_uses(tier)
    assert load is not None
    assert begin_tails(tier, text_of(9), tier.next_use(), num_places=3) is Refusal.NO_ROOM
    assert tier.evicted() == [useless]


def test_recent_rows_before_useless_ones_stay() -> None:
    tier = SmallTier(12, needs_tails=True)
    store_chunk(tier, 9)
    assert tier.pin(store_tails(tier, text_of(9)[:2], tier.next_use(), num_places=9)) is not None
    chunks = [store_chunk(tier, 0, chunk) for chunk in range(2)]
    pass_uses(tier)
    use = tier.next_use()
    tier.renew(TextPrefix(text_of(0)), 12, use)
    assert begin_tails(tier, text_of(9), use, num_places=2) is Refusal.WORTH_LESS
    assert tier.evicted() == [chunks[1]]


def test_useless_tails_take_no_place_from_what_is_of_use() -> None:
    """The rows before new tails may be refused, and then the tails are of no use either."""
    tier = SmallTier(2, needs_tails=True)
    store_chunk(tier, 0)
    store_tails(tier, text_of(0), tier.next_use())
    pass_uses(tier)
    assert begin_tails(tier, text_of(1), tier.next_use()) is Refusal.WORTH_LESS
    assert tier.evicted() == []


class Cells:
    """Each unit of rows takes one place."""

    def num_bytes(self, piece: Piece) -> int:
        return (piece.end_tokens - piece.first_tokens) // 2 * PLACE_BYTES

    def rows_within(self, row_map: Any, first_tokens: int, end_tokens: int) -> Any:
        return range(first_tokens, end_tokens)


def make_cut_tier(num_places: int, removed: list[tuple[Entry, Removal]]) -> HostTier:
    return HostTier(
        num_places * PLACE_BYTES,
        TierGeometry(12, 2, cut_tokens=4),
        on_removed=lambda entry, removal: removed.append((entry, removal)),
        layout=Cells(),
    )


def store_rows(tier: HostTier, text: str, piece: Piece, use: int) -> Sequence[Entry]:
    entries = tier.begin_rows(TextPrefix(text), piece, use)
    assert not isinstance(entries, Refusal)
    for entry in entries:
        tier.finish_store(entry, range(*entry.piece[1:]))
    return entries


@pytest.mark.parametrize(("num_places", "are_recent"), [(1, True), (6, True), (7, False)])
def test_tails_no_larger_than_a_chunk_are_among_what_was_used_last(
    num_places: int, are_recent: bool
) -> None:
    tier = make_cut_tier(100, [])
    store_rows(tier, text_of(0), Piece.rows(0, 12), tier.next_use())
    tails = store_tails(tier, text_of(0), tier._latest_use, num_places)
    assert tier._order.priority(tails, tier._latest_use).is_recent is are_recent
    for _ in range(50):
        tier._order.note_bytes(tier.next_use(), PLACE_BYTES)
    assert not tier._order.priority(tails, tier._latest_use).is_recent


class NoRows(Cells):
    """A model without full attention has no rows."""

    def num_bytes(self, piece: Piece) -> int:
        return 0


def test_no_tails_are_small_in_a_model_without_rows() -> None:
    geometry = TierGeometry(12, 2, needs_rows=False)
    tier = HostTier(100 * PLACE_BYTES, geometry, layout=NoRows())
    tails = store_tails(tier, text_of(0), tier.next_use())
    assert not tier._order.priority(tails, tier._latest_use).is_recent


@pytest.mark.parametrize(("tails_at", "kept_tokens"), [(2, 4), (4, 4), (6, 8), (8, 8)])
def test_rows_lose_the_end_behind_their_last_tails(tails_at: int, kept_tokens: int) -> None:
    removed: list[tuple[Entry, Removal]] = []
    tier = make_cut_tier(9, removed)
    store_rows(tier, text_of(9), Piece.rows(0, 4), tier.next_use())
    (rows,) = store_rows(tier, text_of(0), Piece.rows(0, 12), tier.next_use())
    store_tails(tier, text_of(0)[:tails_at], tier.next_use())
    for _ in range(20):
        tier._order.note_bytes(tier.next_use(), PLACE_BYTES)
    store_tails(tier, text_of(9)[:4], tier.next_use(), num_places=2)
    assert rows.piece == Piece.rows(0, kept_tokens) and not removed
    assert rows.row_map == range(kept_tokens)


@pytest.mark.parametrize("tails_are_later", [False, True])
def test_rows_that_were_just_used_stay_when_their_end_goes(tails_are_later: bool) -> None:
    """The rows stay even if new tails, which are recent as well, are worth more than the rows."""
    removed: list[tuple[Entry, Removal]] = []
    tier = make_cut_tier(36, removed)
    store_rows(tier, text_of(9), Piece.rows(0, 4), tier.next_use())
    pinned = store_tails(tier, text_of(9)[:2], tier.next_use(), num_places=28)
    assert tier.pin(pinned) is not None
    (rows,) = store_rows(tier, text_of(0), Piece.rows(0, 12), tier.next_use())
    tier._order.note_bytes(tier.next_use(), 6 * PLACE_BYTES)
    tier._order.note_bytes(tier.next_use(), PLACE_BYTES)
    tier.renew(TextPrefix(text_of(0)), 4, tier._latest_use)
    use = tier.next_use() if tails_are_later else tier._latest_use
    store_tails(tier, text_of(9)[:4], use, num_places=4)
    assert rows.piece == Piece.rows(0, 4) and not removed


def test_rows_that_were_just_used_stay_when_the_chunk_behind_them_goes() -> None:
    removed: list[tuple[Entry, Removal]] = []
    tier = make_cut_tier(54, removed)
    store_rows(tier, text_of(9), Piece.rows(0, 4), tier.next_use())
    pinned = store_tails(tier, text_of(9)[:2], tier.next_use(), num_places=40)
    assert tier.pin(pinned) is not None
    use = tier.next_use()
    (first,) = store_rows(tier, text_of(0, 2), Piece.rows(0, 12), use)
    (second,) = store_rows(tier, text_of(0, 2), Piece.rows(12, 24), use)
    tier._order.note_bytes(tier.next_use(), 9 * PLACE_BYTES)
    tier._order.note_bytes(tier.next_use(), PLACE_BYTES)
    tier.renew(TextPrefix(text_of(0, 2)), 12, tier._latest_use)
    found = begin_tails(tier, text_of(9)[:4], tier._latest_use, num_places=8)
    assert isinstance(found, Refusal)
    assert [entry for entry, _ in removed] == [second]
    assert first.piece == Piece.rows(0, 12)
