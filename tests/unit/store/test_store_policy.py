# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vllm-ascend-kvext project
"""Which chunks are stored."""

from __future__ import annotations

import pytest

from vllm_ascend_kvext.store.remembered_keys import RememberedKeys
from vllm_ascend_kvext.store.store_policy import StoreChooser, StorePolicy

ASKED = [
    # A key, and the request that looks it up.
    (b"key", "one"),
    (b"key", "one"),  # The same request looks it up again after a preemption.
    (b"key", "two"),
    (b"key", "two"),
    (b"key", "one"),
]


@pytest.mark.parametrize(
    ("policy", "wanted"),
    [
        ("second_touch", [False, False, True, True, True]),
        ("all", [True] * len(ASKED)),
        ("never", [False] * len(ASKED)),
    ],
)
def test_policies_store_what_they_say(policy: str, wanted: list[bool]) -> None:
    chooser = StoreChooser(StorePolicy(policy))
    assert [chooser.is_wanted(*each) for each in ASKED] == wanted


def test_what_was_seen_too_long_ago_is_forgotten() -> None:
    chooser = StoreChooser(remembered_keys=2)
    for key in (b"one", b"two", b"one", b"three"):
        assert not chooser.is_wanted(key, "first")
    assert not chooser.is_wanted(b"two", "second")
    assert chooser.is_wanted(b"three", "second")
    chooser.clear()
    assert not chooser.is_wanted(b"three", "second")


@pytest.mark.parametrize(("max_keys", "known"), [(2, [2, None, 3]), (0, [None] * 3)])
def test_the_key_put_in_longest_ago_is_forgotten_first(
    max_keys: int, known: list[int | None]
) -> None:
    keys: RememberedKeys[int] = RememberedKeys(max_keys)
    for number, key in enumerate((b"one", b"two", b"one", b"three")):
        keys.put(key, number)
    assert [keys.get(key) for key in (b"one", b"two", b"three")] == known
    assert len(keys) == max_keys
