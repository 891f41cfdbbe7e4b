# SPDX-License-Identifier: Apache-2.0
"""Which boundaries outlive a request, and which intervals are refused."""

from __future__ import annotations

import pytest

from vllm_ascend_kvext.retention.geometry import GroupGeometry, GroupKind, HitGeometry
from vllm_ascend_kvext.retention.policy import RetentionPolicy, parse_interval


def policy(interval_tokens: int, looks_ahead: bool = False) -> RetentionPolicy:
    groups = (
        GroupGeometry(GroupKind.FULL, 16, margin_tokens=16),
        GroupGeometry(GroupKind.WINDOW, 4, 9, looks_ahead, margin_tokens=4),
    )
    return RetentionPolicy(HitGeometry(groups, 16), interval_tokens)


@pytest.mark.parametrize(
    ("num_prompt_tokens", "looks_ahead", "expected"),
    [
        (16, False, 0),  # the last token is always computed
        (17, False, 16),
        (100, False, 96),
        (97, True, 80),  # no room for the look-ahead block [96, 100) within 96 tokens
        (101, True, 96),
    ],
)
def test_replay_boundary(num_prompt_tokens: int, looks_ahead: bool, expected: int) -> None:
    assert policy(0, looks_ahead).replay_boundary_tokens(num_prompt_tokens) == expected


def test_interval_zero_keeps_the_replay_boundary_only() -> None:
    assert policy(0).lasting_boundaries(100, 0, 96) == [96]
    assert policy(0).lasting_boundaries(100, 0, 80) == []
    assert policy(0).lasting_boundaries(100, 96, 500) == []


def test_interval_keeps_a_checkpoint_per_interval_and_the_replay_boundary() -> None:
    assert policy(32).lasting_boundaries(120, 0, 112) == [32, 64, 96, 112]
    assert policy(32).lasting_boundaries(120, 64, 200) == [96, 112, 128, 160, 192]


@pytest.mark.parametrize(("text", "value"), [("0", 0), ("64", 64), (" 128 ", 128)])
def test_valid_interval(text: str, value: int) -> None:
    assert parse_interval(text, 64) == value


@pytest.mark.parametrize(
    ("text", "problem", "nearest"),
    [
        ("-5", "negative", "0 and 64"),
        ("abc", "not an integer", "0 and 64"),
        ("100.5", "not an integer", "64 and 128"),
        ("nan", "not an integer", "0 and 64"),
        ("inf", "not an integer", "0 and 64"),
        ("1e2", "not an integer", "64 and 128"),
        ("63", "not a multiple of 64", "0 and 64"),
        ("200", "not a multiple of 64", "192 and 256"),
    ],
)
def test_refused_interval(text: str, problem: str, nearest: str) -> None:
    with pytest.raises(ValueError, match=problem) as caught:
        parse_interval(text, 64)
    message = str(caught.value)
    assert nearest in message
    assert repr(text) in message
    assert "64 tokens" in message


def test_unit_is_not_checked_where_nothing_is_sparse() -> None:
    assert parse_interval("100", 64, check_unit=False) == 100
    with pytest.raises(ValueError, match="negative"):
        parse_interval("-64", 64, check_unit=False)
