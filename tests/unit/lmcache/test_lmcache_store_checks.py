# SPDX-License-Identifier: Apache-2.0
"""What was stored is looked up by a thread, which never holds up who submits, and counted."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable

import pytest

from vllm_ascend_kvext.lmcache import store_checks
from vllm_ascend_kvext.lmcache.store_checks import (
    BURST_END_S,
    KEPT,
    LOST,
    MOST_WAITING_TOKENS,
    UNCHECKED,
    LossBurst,
    StoreChecks,
    Stored,
)

SERVER = "tcp://host:1"
LIMIT_S = 10.0


def stored(begin_tokens: int = 0, end_tokens: int = 512, num_tokens: int = 512) -> Stored:
    return Stored("request", [1] * num_tokens, begin_tokens, end_tokens)


def counted(checks: StoreChecks, num_tokens: int) -> dict[str, int]:
    """What was counted, once it is so many tokens."""
    counts: dict[str, int] = {}
    limit_s = time.monotonic() + LIMIT_S
    while sum(counts.values()) < num_tokens and time.monotonic() < limit_s:
        for outcome, tokens in checks.take_counts().items():
            counts[outcome] = counts.get(outcome, 0) + tokens
        time.sleep(0.001)
    return counts


@pytest.fixture(autouse=True)
def at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(store_checks, "SETTLE_S", 0.0)
    monkeypatch.setattr(store_checks, "CONFIRM_S", 0.0)


@pytest.mark.parametrize(
    ("begin_tokens", "found_tokens", "counts"),
    [
        (0, 512, {KEPT: 512}),
        (0, 768, {KEPT: 512}),
        (0, 256, {KEPT: 256, LOST: 256}),
        (0, 0, {LOST: 512}),
        (256, 512, {KEPT: 256}),
        (256, 256, {LOST: 256}),
        # What was there before is gone: a lookup does not get to what came behind it.
        (256, 0, {UNCHECKED: 256}),
    ],
)
def test_what_is_not_found_of_what_was_stored_is_lost(
    begin_tokens: int, found_tokens: int, counts: dict[str, int], caplog: pytest.LogCaptureFixture
) -> None:
    checks = StoreChecks(lambda stored: found_tokens, SERVER)
    is_complete = found_tokens >= 512
    with caplog.at_level(logging.WARNING):
        assert checks.check(stored(begin_tokens), is_last=False) == is_complete
        assert not caplog.messages
        if not is_complete:
            assert checks.take_counts() == {}
            assert checks.check(stored(begin_tokens), is_last=True)
    assert checks.take_counts() == counts
    assert checks.take_counts() == {}
    assert len(caplog.messages) == (LOST in counts)


@pytest.mark.parametrize(("later_tokens", "counts"), [(512, {KEPT: 512}), (256, None)])
def test_what_is_missing_is_asked_for_once_more(
    later_tokens: int, counts: dict[str, int] | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(store_checks, "CONFIRM_S", 0.1)
    asked_s, answers = [], [0, later_tokens]

    def find(stored: Stored) -> int:
        asked_s.append(time.monotonic())
        return answers.pop(0)

    checks = StoreChecks(find, SERVER)
    checks.submit(stored())
    assert counted(checks, 512) == (counts or {KEPT: 256, LOST: 256})
    assert asked_s[1] - asked_s[0] >= 0.1
    checks.stop()
    assert checks._thread is not None
    checks._thread.join(LIMIT_S)
    assert checks._waiting_tokens == 0


def test_a_thread_looks_up_what_is_submitted() -> None:
    threads = []

    def find(stored: Stored) -> int:
        threads.append(threading.current_thread())
        return stored.end_tokens

    checks = StoreChecks(find, SERVER)
    checks.submit(stored())
    checks.submit(stored(0, 256))
    assert counted(checks, 768) == {KEPT: 768}
    assert set(threads) == {checks._thread} != {threading.current_thread()}
    checks.stop()


def test_nothing_is_looked_up_where_nothing_was_stored() -> None:
    checks = StoreChecks(lambda stored: 0, SERVER)
    checks.submit(stored(512, 512))
    assert checks._thread is None


def test_a_store_has_time_to_settle(monkeypatch: pytest.MonkeyPatch) -> None:
    """The server makes an object readable a moment after it has said that it is stored."""
    monkeypatch.setattr(store_checks, "SETTLE_S", 0.1)
    submitted_s, asked_s = [], []

    def find(stored: Stored) -> int:
        asked_s.append(time.monotonic())
        return stored.end_tokens

    checks = StoreChecks(find, SERVER)
    for _ in range(2):
        submitted_s.append(time.monotonic())
        checks.submit(stored())
    counted(checks, 1024)
    checks.stop()
    for before_s, after_s in zip(submitted_s, asked_s, strict=True):
        assert after_s - before_s >= 0.1
    # The second has waited beside the first.
    assert asked_s[1] - submitted_s[0] < 0.19


def with_stuck_server(use: Callable[[StoreChecks, threading.Event], None]) -> None:
    """While the server does not answer the first question."""
    is_asked, may_answer = threading.Event(), threading.Event()

    def find(stored: Stored) -> int:
        is_asked.set()
        may_answer.wait(LIMIT_S)
        raise TimeoutError

    checks = StoreChecks(find, SERVER)
    checks.submit(stored())
    assert is_asked.wait(LIMIT_S)
    try:
        use(checks, may_answer)
    finally:
        may_answer.set()
        checks.stop()


def test_who_submits_never_waits_for_the_server() -> None:
    def use(checks: StoreChecks, may_answer: threading.Event) -> None:
        began_s = time.monotonic()
        for _ in range(1000):
            checks.submit(stored())
        assert time.monotonic() - began_s < 0.5

    with_stuck_server(use)


def test_a_server_that_does_not_answer_is_left_alone_for_a_while(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(store_checks, "SILENCE_S", 0.2)
    asked = []

    def find(stored: Stored) -> int:
        asked.append(stored)
        if len(asked) == 1:
            raise TimeoutError
        return stored.end_tokens

    checks = StoreChecks(find, SERVER)
    checks.submit(stored())
    assert counted(checks, 512) == {UNCHECKED: 512}
    checks.submit(stored())
    assert checks.take_counts() == {UNCHECKED: 512}
    assert len(asked) == 1
    time.sleep(0.25)
    checks.submit(stored())
    assert counted(checks, 512) == {KEPT: 512}
    checks.stop()


def test_one_request_may_be_longer_than_what_may_wait() -> None:
    checks = StoreChecks(lambda stored: stored.end_tokens, SERVER)
    checks.submit(stored(num_tokens=2 * MOST_WAITING_TOKENS))
    assert counted(checks, 512) == {KEPT: 512}
    checks.stop()


def test_what_waits_is_bounded() -> None:
    def use(checks: StoreChecks, may_answer: threading.Event) -> None:
        checks.submit(stored(num_tokens=MOST_WAITING_TOKENS - 512))
        assert checks.take_counts() == {}
        checks.submit(stored())
        assert checks.take_counts() == {UNCHECKED: 512}

    with_stuck_server(use)


def test_the_thread_rests_nine_times_as_long_as_it_asks() -> None:
    asked_s = []

    def find(stored: Stored) -> int:
        asked_s.append(time.monotonic())
        time.sleep(0.02)
        return stored.end_tokens

    checks = StoreChecks(find, SERVER)
    for _ in range(3):
        checks.submit(stored())
    counted(checks, 3 * 512)
    checks.stop()
    assert asked_s[2] - asked_s[0] >= 2 * 0.2


def test_an_unknown_lmcache_ends_the_checks_with_one_warning(
    caplog: pytest.LogCaptureFixture,
) -> None:
    def find(stored: Stored) -> int:
        raise AttributeError("lookup")

    checks = StoreChecks(find, SERVER)
    with caplog.at_level(logging.WARNING):
        checks.submit(stored())
        assert counted(checks, 512) == {UNCHECKED: 512}
        checks.submit(stored())
        assert counted(checks, 512) == {UNCHECKED: 512}
    (message,) = caplog.messages
    assert "not looked up any more" in message
    assert "AttributeError: lookup" in message


def test_connections_that_are_closed_at_the_end_are_no_news(
    caplog: pytest.LogCaptureFixture,
) -> None:
    def find(stored: Stored) -> int:
        checks.stop()
        raise OSError("closed")

    checks = StoreChecks(find, SERVER)
    with caplog.at_level(logging.WARNING):
        checks.check(stored(), is_last=True)
    assert not caplog.messages
    assert checks.take_counts() == {UNCHECKED: 512}


def test_a_burst_is_logged_when_it_begins_and_when_it_is_over(
    caplog: pytest.LogCaptureFixture,
) -> None:
    burst = LossBurst(SERVER)
    with caplog.at_level(logging.WARNING):
        burst.add(0, 1024, 0.0)
        assert not caplog.messages
        burst.add(256, 512, 10.0)
        for second in range(20):
            burst.add(512, 512, 11.0 + second)
        burst.add(0, 256, 31.0)
        assert len(caplog.messages) == 1
        burst.end_if_quiet(30.0 + BURST_END_S)
        burst.end_if_quiet(31.0 + BURST_END_S)
    begin, end = caplog.messages
    for text in (SERVER, "512 tokens", "does not have 256", "--l1-size-gb", "watermark"):
        assert text in begin
    for text in (SERVER, f"{256 + 20 * 512} of {512 + 20 * 512 + 256} tokens", "in 20 s"):
        assert text in end


def test_a_second_burst_is_logged_again(caplog: pytest.LogCaptureFixture) -> None:
    burst = LossBurst(SERVER)
    with caplog.at_level(logging.WARNING):
        burst.add(256, 256, 0.0)
        burst.add(256, 256, 2 * BURST_END_S)
        burst.add(0, 256, 4 * BURST_END_S)
    assert len(caplog.messages) == 2
    burst = LossBurst(SERVER)
    caplog.clear()
    with caplog.at_level(logging.WARNING):
        burst.add(256, 256, 0.0)
        burst.end_if_quiet(BURST_END_S)
        burst.add(256, 256, 2 * BURST_END_S)
    assert [message.count("has reported") for message in caplog.messages] == [1, 0, 1]
