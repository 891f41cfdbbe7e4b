# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vllm-ascend-kvext project
"""A tier that would lose nothing, or far less, as a plain LRU keeps what a plain LRU keeps."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    invariant,
    rule,
    run_state_machine_as_test,
)
from unit.store.test_cut_machine import CellLayout
from unit.store.test_tier_machine import UNIT_TOKENS
from unit.store.tier_model import ALIGNMENT_BYTES, TextPrefix

from vllm_ascend_kvext.store.entries import Kind, Piece
from vllm_ascend_kvext.store.prefix import TierGeometry
from vllm_ascend_kvext.store.recency import Recency
from vllm_ascend_kvext.store.resumes import TailOrigin
from vllm_ascend_kvext.store.reuse import Reuse
from vllm_ascend_kvext.store.tier import HostTier

CUT_TOKENS = 4
CUT_BYTES = CUT_TOKENS // UNIT_TOKENS * ALIGNMENT_BYTES
PROMPT_CUTS = 3
PROMPT_TOKENS = PROMPT_CUTS * CUT_TOKENS
NUM_CUTS = 3 * PROMPT_CUTS


class Layout(CellLayout):
    """Rows and tails take places of their own size."""

    def __init__(self, tails_bytes: int = 0) -> None:
        self.tails_bytes = tails_bytes

    def num_bytes(self, piece: Piece) -> int:
        return self.tails_bytes if piece.kind is Kind.TAILS else super().num_bytes(piece)


def make_tier(tails_bytes: int = 0, capacity_bytes: int = NUM_CUTS * CUT_BYTES) -> HostTier:
    geometry = TierGeometry(
        PROMPT_TOKENS, UNIT_TOKENS, needs_tails=tails_bytes > 0, cut_tokens=CUT_TOKENS
    )
    return HostTier(capacity_bytes, geometry, layout=Layout(tails_bytes))


def recency_of(tier: HostTier) -> Recency:
    assert tier._order.recency is not None
    return tier._order.recency


def text_of(num_units: int, changes: frozenset[int]) -> str:
    """A text of a family. Its texts part where one has a change and another has none."""
    letters = ["b" if unit in changes else "a" for unit in range(num_units)]
    return "".join(letter * UNIT_TOKENS for letter in letters)


texts = st.builds(
    text_of, st.integers(1, 40), st.frozensets(st.sampled_from([0, 1, 3, 6, 9, 14]), max_size=2)
)


class PlainLru:
    """A plain LRU of cuts as a list, and the tails at the ends of requests."""

    def __init__(self, capacity_bytes: int, tails_bytes: int) -> None:
        self.capacity_bytes = capacity_bytes
        self.tails_bytes = tails_bytes
        self.uses: list[tuple[bytes, int]] = []
        self.ends: list[bytes] = []
        self.lost_use = 0

    @property
    def keys(self) -> list[bytes]:
        return [key for key, _ in self.uses]

    @property
    def num_bytes(self) -> int:
        return len(self.uses) * CUT_BYTES + len(self.ends) * self.tails_bytes

    def cuts_of(self, text: str) -> list[bytes]:
        ends = range(UNIT_TOKENS, len(text) + 1, CUT_TOKENS)
        return [text[:end].encode() for end in ends]

    def num_found(self, text: str) -> int:
        cuts = self.cuts_of(text)
        return next((n for n, cut in enumerate(cuts) if cut not in self.keys), len(cuts))

    def touch(self, cuts: list[bytes], use: int) -> None:
        for cut in reversed(cuts):
            self.uses = [each for each in self.uses if each[0] != cut]
            self.uses.append((cut, use))
        if cuts and self.tails_bytes and cuts[-1] not in self.ends:
            self.ends.append(cuts[-1])
        while self.num_bytes > self.capacity_bytes:
            lost, self.lost_use = self.uses.pop(0)
            self.ends = [end for end in self.ends if end != lost]


class LruMachine(RuleBasedStateMachine):
    """Requests begin, end and stop. What the tier takes for a plain LRU is compared with one."""

    tails_bytes = 0

    def __init__(self) -> None:
        super().__init__()
        self.tier = make_tier(self.tails_bytes)
        self.recency = recency_of(self.tier)
        self.compared: list[tuple[int, ...]] = []
        self.note_prompt = self.recency.note_prompt
        self.recency.note_prompt = self._note_prompt  # type: ignore[method-assign]
        self._begin()

    def _begin(self) -> None:
        # Prompts and answers leave tails.
        self.lru = PlainLru(self.tier.capacity_bytes, 2 * self.tails_bytes)
        self.endless: set[bytes] = set()
        self.tails: set[str] = set()

    def _note_prompt(self, *compared: int) -> None:
        self.compared.append(compared)
        self.note_prompt(*compared)

    @rule(text=texts, is_again=st.booleans(), hit_tokens=st.integers(0, 80))
    def admitted(self, text: str, is_again: bool, hit_tokens: int) -> None:
        limit_tokens = (len(text) - 1) // UNIT_TOKENS * UNIT_TOKENS
        asked = text[:limit_tokens]
        num_found = self.lru.num_found(asked)
        cuts = self.lru.cuts_of(asked)
        if self.tails_bytes:
            ends = [len(tails) for tails in self.tails if asked.startswith(tails)]
            within = [end for end in ends if end <= num_found * CUT_TOKENS]
            known, lru = (-(-max(each, default=0) // CUT_TOKENS) for each in (ends, within))
        else:
            numbers = range(len(cuts), num_found, -1)
            known = next((n for n in numbers if cuts[n - 1] in self.endless), num_found)
            lru = num_found
        self.compared.clear()
        self.tier.note_admitted(TextPrefix(text), len(text), is_again, None, hit_tokens)
        found = -(-hit_tokens // CUT_TOKENS)  # Nothing is stored here.
        assert self.compared == ([] if is_again else [(known, lru, found)])
        assert lru <= known

    @rule(text=texts, prompt_tokens=st.integers(1, 80), is_kept=st.booleans())
    def ended(self, text: str, prompt_tokens: int, is_kept: bool) -> None:
        """The same prompt may get the same answer, and an answer that was not kept may return."""
        prompt_tokens = min(prompt_tokens, len(text))
        use = self.tier.next_use()
        self.tier.note_ended(TextPrefix(text), prompt_tokens, len(text), is_kept)
        cuts = self.lru.cuts_of(text)
        self.endless |= {*cuts}
        self.lru.touch(cuts if is_kept else self.lru.cuts_of(text[:prompt_tokens]), use)

    @rule(text=texts)
    def stopped(self, text: str) -> None:
        self.tier.note_stopped(TextPrefix(text), len(text))
        self.lru.touch(self.lru.cuts_of(text), self.tier._latest_use)

    @rule(text=texts)
    def tails_are_stored(self, text: str) -> None:
        if self.tails_bytes:
            key = text.encode()
            self.tier._resumes.note_tails(key, TailOrigin.ASKED, self.tier._latest_use)
            self.tails.add(text)

    @rule()
    def cleared(self) -> None:
        self.tier.clear()
        self._begin()

    @invariant()
    def has_what_a_plain_lru_has(self) -> None:
        assert list(self.recency._used_at.items()) == self.lru.uses
        assert self.recency._ends == {*self.lru.ends}
        assert 0 <= self.recency.num_bytes == self.lru.num_bytes <= self.tier.capacity_bytes
        assert self.recency.lost_use == self.lru.lost_use

    @invariant()
    def loses_a_prefix_from_its_end_on(self) -> None:
        keys = {*self.lru.keys}
        for key in keys:
            assert keys.issuperset(self.lru.cuts_of(key.decode()))

    @invariant()
    def says_what_a_plain_lru_has(self) -> None:
        for number in range(40):
            text = text_of(number, frozenset())
            for cut in self.lru.cuts_of(text):
                assert self.recency.has(cut, 0) is (cut in self.lru.keys)
        assert self.recency.has(b"running", self.lru.lost_use + 1)
        assert not self.recency.has(b"running", self.lru.lost_use)


@pytest.mark.parametrize("tails_bytes", [0, 64, 200])
def test_the_tier_knows_what_a_plain_lru_has(tails_bytes: int) -> None:
    machine = type("Machine", (LruMachine,), {"tails_bytes": tails_bytes})
    run_state_machine_as_test(
        machine,
        settings=settings(
            max_examples=25,
            stateful_step_count=40,
            deadline=None,
            suppress_health_check=list(HealthCheck),
        ),
    )


@pytest.mark.parametrize("tails_bytes", [0, 64])
def test_memory_grows_with_what_the_tier_holds_and_not_with_requests(tails_bytes: int) -> None:
    tier = make_tier(tails_bytes, 1000 * CUT_BYTES)
    recency = recency_of(tier)
    prefix = TextPrefix("a" * 2 * PROMPT_TOKENS)
    for _ in range(300):
        tier.note_admitted(prefix, PROMPT_TOKENS)
        tier.next_use()
        tier.note_ended(prefix, PROMPT_TOKENS, 2 * PROMPT_TOKENS)
    assert len(recency._used_at) == 2 * PROMPT_CUTS
    assert len(recency._ends) == (tails_bytes > 0)
    for number in range(600):
        tier.next_use()
        tier.note_ended(TextPrefix(f"{number:04d}" * PROMPT_CUTS), 4, PROMPT_TOKENS)
    assert len(recency._used_at) <= 1000
    assert len(recency._ends) <= len(recency._used_at)


def test_a_prompt_larger_than_the_tier_leaves_its_beginning() -> None:
    recency = Recency(3 * CUT_BYTES, CUT_BYTES, 1)
    keys = [bytes([number]) for number in range(9)]
    recency.note_used(keys, 1)
    assert recency.num_found(keys) == 3
    assert recency.num_bytes == 3 * CUT_BYTES
    recency.note_used([], 2)
    assert recency.num_found(keys) == 3


def test_a_tier_smaller_than_a_cut_has_nothing() -> None:
    recency = Recency(CUT_BYTES - 1, CUT_BYTES)
    recency.note_used([b"a", b"b"], 1)
    assert not recency.num_bytes
    assert not recency.has(b"a", 1)


def note_prompts(recency: Recency, *found_cuts: int, tier_cuts: int = 100) -> None:
    """Note prompts of 100 known cuts."""
    for number in found_cuts:
        recency.note_prompt(100, number, tier_cuts)


def test_a_plain_lru_that_finds_nearly_all_is_followed() -> None:
    recency = Recency(100, 1)
    assert not recency.is_followed  # Nothing was seen.
    recency.note_prompt(50, 50, 50)
    assert not recency.is_followed  # It has not yet shown that it finds nearly all.
    note_prompts(recency, 100, 100)
    assert recency.is_followed
    note_prompts(recency, 98)
    assert recency.is_followed
    note_prompts(recency, 0)
    for _ in range(5):
        assert not recency.is_followed  # What was found counts by half each time.
        note_prompts(recency, 100)
    assert recency.is_followed
    recency.clear()
    assert not recency.is_followed


def test_a_plain_lru_that_has_lost_less_than_the_tier_is_followed() -> None:
    recency = Recency(1000, 1)
    note_prompts(recency, 100, tier_cuts=98)
    assert not recency.is_followed  # The tier has lost hardly anything.
    note_prompts(recency, 98, tier_cuts=97)
    assert not recency.is_followed  # The LRU has lost as much.
    note_prompts(recency, 100, tier_cuts=90)
    assert recency.is_followed
    note_prompts(recency, 90, tier_cuts=90)
    assert not recency.is_followed
    note_prompts(recency, 100, tier_cuts=0)
    assert recency.is_followed
    recency.clear()
    assert not recency.is_followed


def test_an_lru_that_the_tier_cannot_match_is_not_followed_for_long() -> None:
    """Following it loses everything, as the tier stores more than the LRU is thought to store."""
    recency = Recency(1000, 1)
    note_prompts(recency, 100, tier_cuts=90)
    followed = []
    for _ in range(200):
        followed.append(recency.is_followed)
        note_prompts(recency, 100, tier_cuts=0 if followed[-1] else 100)
    # What the tier lacks at first, it may have lost before.
    assert followed[:10] == 9 * [True] + [False]
    assert sum(followed) == 45


def test_tokens_that_no_earlier_request_had_are_not_lost_by_the_lru() -> None:
    """The device may have more of a prompt than earlier requests, as its keys are forgotten."""
    recency = Recency(1000, 1)
    note_prompts(recency, 50, tier_cuts=300)
    assert not recency.is_followed
    note_prompts(recency, 100, tier_cuts=90)
    assert not recency.is_followed


@pytest.fixture
def tier(monkeypatch: pytest.MonkeyPatch) -> HostTier:
    """A tier that holds three prompts, and expects most hits of what has waited longest."""
    monkeypatch.setattr(Reuse, "density", lambda _, key, use, now: float(now - use))
    return make_tier()


def ask(tier: HostTier, name: str, **options: Any) -> int:
    """Serve a prompt of its own. Returns the tokens that were found of it."""
    prefix = TextPrefix(name * (PROMPT_TOKENS + 1))
    found_tokens = tier.look_up(prefix, PROMPT_TOKENS).boundary_tokens
    use = tier.note_admitted(prefix, PROMPT_TOKENS + 1)
    tier.renew(prefix, found_tokens, use)
    use = tier.next_use()
    tier.note_ended(prefix, PROMPT_TOKENS, PROMPT_TOKENS)
    for piece in tier.lookup(prefix).missing_pieces(0, PROMPT_TOKENS):
        entries = tier.begin_rows(prefix, piece, use, **options)
        if isinstance(entries, list):
            for entry in entries:
                tier.finish_store(entry, range(*entry.piece[1:]))
    tier.renew(prefix, PROMPT_TOKENS, use)
    return found_tokens


def test_prompts_that_a_plain_lru_would_have_stay_whatever_was_learned(tier: HostTier) -> None:
    for name in 4 * "abc":
        ask(tier, name)
    # Three prompts fit. One that is new takes the place of the one that was used first.
    found = [bool(ask(tier, name)) for name in "ddcbebcdbc"]
    assert found == [False, True, True, True, False, True, True, False, True, True]


def test_all_that_fits_is_found(tier: HostTier) -> None:
    assert [ask(tier, name) for name in "abcabcabc"] == 3 * [0] + 6 * [PROMPT_TOKENS]
    assert recency_of(tier).lost_use == 0


def test_what_was_learned_decides_where_a_plain_lru_finds_nothing(tier: HostTier) -> None:
    for name in 4 * "abc":
        ask(tier, name)
    assert recency_of(tier).is_followed
    found = [ask(tier, name) for name in 10 * "abcde"]
    assert sum(found[10:]) > 4 * PROMPT_TOKENS
    assert not recency_of(tier).is_followed


def test_a_cleared_tier_knows_nothing_of_a_plain_lru(tier: HostTier) -> None:
    for name in 4 * "abc":
        ask(tier, name)
    recency = recency_of(tier)
    assert recency.is_followed and recency.num_bytes
    tier.clear()
    assert not recency.is_followed and not recency.num_bytes


def test_a_large_lru_loses_many_cuts_at_once() -> None:
    recency = Recency(200 * CUT_BYTES, CUT_BYTES)
    for number in range(201):
        recency.note_used([number.to_bytes(2, "big")], number + 1)
    assert recency.num_bytes == 197 * CUT_BYTES
    assert recency.lost_use == 4


@pytest.mark.parametrize(
    ("tails_bytes", "is_known"), [(PROMPT_CUTS * CUT_BYTES, True), (3000, False)]
)
def test_tails_that_are_judged_by_themselves_leave_rows_to_what_was_learned(
    tails_bytes: int, is_known: bool
) -> None:
    tier = make_tier(tails_bytes, 1 << 16)
    assert (tier._order.recency is not None) is is_known


def test_what_the_tier_or_the_device_has_is_not_lost(tier: HostTier) -> None:
    for name in "abc":
        ask(tier, name)
    prefix = TextPrefix("d" * (PROMPT_TOKENS + 1))
    tier.note_ended(prefix, PROMPT_TOKENS, PROMPT_TOKENS)
    recency = recency_of(tier)
    for found in ({"hit_tokens": PROMPT_TOKENS}, {"present_tokens": PROMPT_TOKENS}):
        tier.note_admitted(prefix, PROMPT_TOKENS + 1, **found)
    assert [bool(ask(tier, name)) for name in "abc"] == 3 * [True]
    assert recency._lost_by_tier_cuts == 0
    tier.note_admitted(prefix, PROMPT_TOKENS + 1)
    assert recency._lost_by_tier_cuts == PROMPT_CUTS


@pytest.mark.parametrize(("remembered_keys", "is_known"), [(19, True), (17, False)])
def test_no_lru_is_followed_whose_losses_would_be_forgotten(
    remembered_keys: int, is_known: bool
) -> None:
    """It has 9 cuts. If what it lost is not known, it seems to find all that comes back."""
    geometry = TierGeometry(PROMPT_TOKENS, UNIT_TOKENS, needs_tails=False, cut_tokens=CUT_TOKENS)
    tier = HostTier(NUM_CUTS * CUT_BYTES, geometry, remembered_keys, layout=Layout())
    assert (tier._order.recency is not None) is is_known


def test_answers_that_hardly_come_back_do_not_stay(tier: HostTier) -> None:
    """What a plain LRU would have stays; rows that hardly come back do not."""
    for name in 4 * "abc":
        ask(tier, name, chance=0.3 if name == "b" else 1.0)
    assert recency_of(tier).is_followed
    ask(tier, "d")
    assert [bool(ask(tier, name)) for name in "ab"] == [True, False]
