# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vllm-ascend-kvext project
"""Hints that are no positions inside the prompt are reported. They never fail a request."""

from __future__ import annotations

import logging
from types import SimpleNamespace

import pytest
from unit.retention.small_cache import ModelRequest

from vllm_ascend_kvext.groups.model import GroupKind
from vllm_ascend_kvext.request_arguments import MAX_TEXT_CHARACTERS
from vllm_ascend_kvext.retention.geometry import GroupGeometry, HitGeometry
from vllm_ascend_kvext.retention.hints import (
    HINT_ARGUMENT,
    MAX_HINTS,
    hinted_boundaries,
    report_unusable_hints,
)

GEOMETRY = HitGeometry(
    (GroupGeometry(GroupKind.FULL, 16), GroupGeometry(GroupKind.WINDOW, 4, 9)), 16
)
LOGGER = "vllm.ascend_kvext.retention"
PROMPT = "a" * 100


def used_and_reported(hints: object) -> list[int]:
    """Some hints are used. The others are reported once, at the admission."""
    return used_of(ModelRequest("r7", PROMPT, hints))


def used_of(request: ModelRequest) -> list[int]:
    found = hinted_boundaries(request, GEOMETRY)
    assert hinted_boundaries(request, GEOMETRY) == found
    for _ in range(2):
        report_unusable_hints(request, GEOMETRY)
    return found


@pytest.mark.parametrize(
    ("hints", "expected"),
    [
        ([48], [48]),
        ([50], [48]),
        ((50,), [48]),
        (50, [48]),
        ("50", [48]),
        (" [50, 17]\n", [16, 48]),
        ("null", []),
        ([100, 20, 33], [16, 32, 96]),
        ([33, 40, 47], [32]),
        ([], []),
        ([100], [96]),
    ],
)
def test_positions_are_rounded_down_to_boundaries(
    hints: object, expected: list[int], caplog: pytest.LogCaptureFixture
) -> None:
    assert used_and_reported(hints) == expected
    assert not caplog.records


@pytest.mark.parametrize(
    "params",
    [
        None,  # A pooling request has no hints.
        *(
            SimpleNamespace(extra_args=arguments)
            for arguments in (None, {}, {HINT_ARGUMENT: None}, {"another": [48]})
        ),
    ],
)
def test_no_hints(params: object, caplog: pytest.LogCaptureFixture) -> None:
    request = ModelRequest("r7", PROMPT)
    request.sampling_params = params
    assert used_of(request) == []
    assert not caplog.records


@pytest.mark.parametrize(
    ("hints", "expected"),
    [
        ("48 tokens", []),
        ("[48, 32", []),
        ("48.0", []),
        ("true", []),
        ("NaN", []),
        ('"48"', []),
        pytest.param("[" * 100_000, [], id="deep"),
        ({"at": 48}, []),
        (48.0, []),
        (True, []),
        ([True, 48], [48]),
        ([0, 48], [48]),
        ([15], []),
        (1, []),
        pytest.param("[48]" + " " * MAX_TEXT_CHARACTERS, [], id="long"),
        ([-16, 48], [48]),
        ([101, 48], [48]),
        ([1 << 80, 48], [48]),
        ([None, "48", 48.0, [48], {}, 48], [48]),
        ([[48, 64]], []),
    ],
)
def test_the_rest_is_reported_once_and_left_out(
    hints: object, expected: list[int], caplog: pytest.LogCaptureFixture
) -> None:
    assert used_and_reported(hints) == expected
    (record,) = caplog.records
    assert record.name == LOGGER
    assert record.levelno == logging.WARNING
    message = record.getMessage()
    assert message.startswith(f"Request r7: {HINT_ARGUMENT}: expected at most {MAX_HINTS} numbers")
    assert f"between 16, the first that can be resumed at, and the {len(PROMPT)}" in message
    assert f"leaves checkpoints at {expected or 'none of them'}, and" in message
    assert not isinstance(hints, list) or f"found {hints!r}"[:30] in message
    assert len(message) < 450


def test_the_first_of_too_many_count(caplog: pytest.LogCaptureFixture) -> None:
    hints = [16] * MAX_HINTS + [48]
    assert used_and_reported(hints) == [16]
    assert len(caplog.records) == 1
    caplog.clear()
    assert used_and_reported(hints[1:]) == [16, 48]
    assert not caplog.records


def test_the_answers_to_one_request_are_reported_once(caplog: pytest.LogCaptureFixture) -> None:
    """vLLM makes a request for each of ``n`` answers, with the answer's number before the id."""
    for request_id in ("0_r-5e", "other-5e", "1_r-5e", "15_r-5e", "0_r-6f", "1_r-6f", "r-5e"):
        assert used_of(ModelRequest(request_id, PROMPT, [1])) == []
    reported = [record.getMessage().partition(":")[0] for record in caplog.records]
    assert reported == [f"Request {each}" for each in ("0_r-5e", "other-5e", "0_r-6f", "r-5e")]
