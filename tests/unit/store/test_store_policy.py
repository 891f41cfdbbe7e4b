# SPDX-License-Identifier: Apache-2.0
"""What is stored at all."""

from __future__ import annotations

import pytest

from vllm_ascend_kvext.store.errors import TierError
from vllm_ascend_kvext.store.remembered_keys import RememberedKeys
from vllm_ascend_kvext.store.store_policy import StoreChooser, StorePolicy


def test_what_one_request_has_seen_is_not_stored() -> None:
    chooser = StoreChooser()
    assert not chooser.is_wanted(b"key", "one")
    assert not chooser.is_wanted(b"key", "one"), "it comes back after a preemption"


def test_what_a_second_request_sees_is_stored_from_then_on() -> None:
    chooser = StoreChooser()
    chooser.is_wanted(b"key", "one")
    assert chooser.is_wanted(b"key", "two")
    assert chooser.is_wanted(b"key", "two")
    assert chooser.is_wanted(b"key", "one")


def test_a_hit_on_the_device_is_a_touch_too() -> None:
    chooser = StoreChooser()
    assert not chooser.touch(b"key", "one")
    assert chooser.is_wanted(b"key", "two")


def test_the_end_of_a_turn_is_stored_at_once_and_seen() -> None:
    chooser = StoreChooser()
    assert chooser.is_wanted(b"key", "one", is_end_of_turn=True)
    assert chooser.is_wanted(b"key", "two")


def test_all_and_never_do_what_they_say() -> None:
    assert StoreChooser(StorePolicy.ALL).is_wanted(b"key", "one")
    assert not StoreChooser(StorePolicy.NEVER).is_wanted(b"key", "one", is_end_of_turn=True)


def test_what_was_seen_too_long_ago_is_forgotten() -> None:
    chooser = StoreChooser(remembered_keys=2)
    for key in (b"one", b"two", b"one", b"three"):
        chooser.touch(key, "first")
    assert not chooser.is_wanted(b"two", "second")
    assert chooser.is_wanted(b"three", "second")
    chooser.clear()
    assert not chooser.is_wanted(b"three", "second")


def test_policies_have_the_names_of_the_option() -> None:
    assert [policy.value for policy in StorePolicy] == ["second_touch", "all", "never"]


def test_the_key_put_in_longest_ago_is_forgotten_first() -> None:
    keys: RememberedKeys[int] = RememberedKeys(2)
    for number, key in enumerate((b"one", b"two", b"one", b"three")):
        keys.put(key, number)
    assert [keys.get(key) for key in (b"one", b"two", b"three")] == [2, None, 3]
    assert len(keys) == 2


def test_a_memory_of_nothing_remembers_nothing() -> None:
    keys: RememberedKeys[int] = RememberedKeys(0)
    keys.put(b"key", 1)
    assert keys.get(b"key") is None
    with pytest.raises(TierError, match="expected 0 or more, found -1"):
        RememberedKeys(-1)
