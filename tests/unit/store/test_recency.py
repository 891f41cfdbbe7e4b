# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vllm-ascend-kvext project
"""A tier that would lose nothing as a plain LRU keeps what a plain LRU keeps."""

from __future__ import annotations

import random
from collections import OrderedDict

import pytest
from unit.store.test_cut_machine import CellLayout
from unit.store.tier_model import ALIGNMENT_BYTES, TextPrefix

from vllm_ascend_kvext.store.prefix import TierGeometry
from vllm_ascend_kvext.store.recency import NEVER, Recency
from vllm_ascend_kvext.store.reuse import Reuse
from vllm_ascend_kvext.store.tier import HostTier

CUT_TOKENS = 4
CUT_BYTES = 2 * ALIGNMENT_BYTES
PROMPT_CUTS = 3
PROMPT_TOKENS = PROMPT_CUTS * CUT_TOKENS


@pytest.mark.parametrize("seed", range(5))
def test_a_plain_lru_has_what_was_used_at_its_reach_or_later(seed: int) -> None:
    """Between a plain LRU and the reach lies at most what was used last at one use."""
    rng = random.Random(seed)
    num_bytes = 40
    recency = Recency(num_bytes)
    used_at: OrderedDict[int, int] = OrderedDict()  # By key, the latest use. Keys have one byte.
    has_lost = False
    for use in range(1, 300):
        keys = rng.sample(range(60), rng.randint(1, 6))
        for key in keys:
            if key in used_at:
                recency.note_moved(used_at.pop(key), 1)
            used_at[key] = use
        recency.note_used(use, len(keys))
        lru = list(used_at)[-num_bytes:]
        within = [key for key, latest in used_at.items() if latest >= recency.reach]
        assert set(within) <= set(lru)
        has_lost = has_lost or len(within) < len(used_at)
        if not has_lost:
            assert within == lru
        assert len(within) <= num_bytes
    assert has_lost
    recency.clear()
    assert recency.reach == recency.kept_from == 0


def test_what_comes_back_decides_whether_a_plain_lru_is_followed() -> None:
    recency = Recency(100)
    recency.note_used(1, 60)
    recency.note_used(2, 60)
    assert recency.reach == recency.kept_from == 2
    recency.note_found(50, 50, 50)
    assert recency.is_best
    recency.note_found(50, 20, 20)  # A plain LRU has lost 30 bytes, which others might have kept.
    assert recency.kept_from == NEVER
    recency.note_found(20, 20, 0)  # The other order has lost 20 bytes.
    assert not recency.is_best
    recency.note_found(20, 20, 0)
    assert recency.kept_from == 2
    for _ in range(10):
        recency.note_found(100, 100, 100)
    recency.note_found(1, 0, 0)  # What was found long ago hardly counts.
    assert not recency.is_best


@pytest.fixture
def tier(monkeypatch: pytest.MonkeyPatch) -> HostTier:
    """A tier that holds three prompts, and expects most hits of what has waited longest."""
    monkeypatch.setattr(Reuse, "density", lambda _, key, use, now: float(now - use))
    geometry = TierGeometry(12, 2, needs_tails=False, cut_tokens=CUT_TOKENS)
    return HostTier(3 * PROMPT_CUTS * CUT_BYTES, geometry, layout=CellLayout())


def ask(tier: HostTier, name: str) -> int:
    """Serve a prompt of its own. Returns the tokens that were found of it."""
    prefix = TextPrefix(name * (PROMPT_TOKENS + 1))
    found_tokens = tier.look_up(prefix, PROMPT_TOKENS).boundary_tokens
    use = tier.note_admitted(prefix, PROMPT_TOKENS + 1, found_tokens)
    tier.renew(prefix, found_tokens, use)
    use = tier.next_use()
    tier.note_ended(prefix, PROMPT_TOKENS, PROMPT_TOKENS)
    for piece in tier.lookup(prefix).missing_pieces(0, PROMPT_TOKENS):
        entries = tier.begin_rows(prefix, piece, use)
        if isinstance(entries, list):
            for entry in entries:
                tier.finish_store(entry, range(*entry.piece[1:]))
    tier.renew(prefix, PROMPT_TOKENS, use)
    return found_tokens


def test_prompts_that_a_plain_lru_would_have_stay_whatever_was_learned(tier: HostTier) -> None:
    for name in "abc":
        assert not ask(tier, name)
    # Three prompts fit. One that is new takes the place of the one that was used first.
    found = [bool(ask(tier, name)) for name in "ddcbebcdbc"]
    assert found == [False, True, True, True, False, True, True, False, True, True]


def test_a_prompt_that_comes_back_takes_its_place_once(tier: HostTier) -> None:
    assert [ask(tier, name) for name in "abcabcabc"] == 3 * [0] + 6 * [PROMPT_TOKENS]
    assert tier._order.recency is not None and tier._order.recency.reach == 0


def test_what_was_learned_decides_where_a_plain_lru_finds_nothing(tier: HostTier) -> None:
    found = [ask(tier, name) for name in 10 * "abcde"]
    assert not any(found[:6])
    assert sum(found[6:]) > PROMPT_TOKENS


def test_a_cleared_tier_begins_as_a_plain_lru(tier: HostTier) -> None:
    for name in 3 * "abcde":
        ask(tier, name)
    recency = tier._order.recency
    assert recency is not None and recency.kept_from == NEVER
    tier.clear()
    assert recency.kept_from == 0


@pytest.mark.parametrize(("tails_bytes", "is_followed"), [(3 * CUT_BYTES, True), (3000, False)])
def test_tails_that_are_judged_by_themselves_leave_rows_to_what_was_learned(
    tails_bytes: int, is_followed: bool
) -> None:
    class Layout(CellLayout):
        def num_bytes(self, piece: object) -> int:
            return super().num_bytes(piece) or tails_bytes  # type: ignore[arg-type]

    tier = HostTier(1 << 16, TierGeometry(12, 2, cut_tokens=CUT_TOKENS), layout=Layout())
    assert (tier._order.recency is not None) is is_followed


@pytest.mark.parametrize("is_kept", [False, True])
def test_answers_that_are_not_kept_take_no_place_in_a_plain_lru(
    tier: HostTier, is_kept: bool
) -> None:
    recency = tier._order.recency
    assert recency is not None
    for name in "abc":
        use = tier.next_use()
        text = TextPrefix(name * 3 * PROMPT_TOKENS)
        tier.note_ended(text, PROMPT_TOKENS, 3 * PROMPT_TOKENS, is_kept)
    assert recency.reach == (use if is_kept else 0)


@pytest.mark.parametrize("device_tokens", [0, PROMPT_TOKENS])
def test_what_the_device_has_is_not_lost(tier: HostTier, device_tokens: int) -> None:
    recency = tier._order.recency
    assert recency is not None
    ask(tier, "a")
    tier.evict(lambda _: True)
    recency.note_found(1, 0, 0)  # What was learned decides.
    prefix = TextPrefix("a" * (PROMPT_TOKENS + 1))
    tier.note_admitted(prefix, PROMPT_TOKENS + 1, device_tokens)
    assert recency.is_best is not bool(device_tokens)


def test_what_the_tier_has_is_not_lost_if_it_is_not_loaded(tier: HostTier) -> None:
    recency = tier._order.recency
    assert recency is not None
    ask(tier, "a")
    recency.note_found(1, 0, 0)
    tier.note_admitted(TextPrefix("a" * (PROMPT_TOKENS + 1)), PROMPT_TOKENS + 1, 0)
    assert not recency.is_best
