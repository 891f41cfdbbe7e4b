# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vllm-ascend-kvext project
"""A fault in a request's arguments is logged once, even if the request has several answers."""

from __future__ import annotations

import pytest

from vllm_ascend_kvext import request_arguments
from vllm_ascend_kvext.request_arguments import MAX_REMEMBERED, is_first_answer


@pytest.fixture(autouse=True)
def nothing_remembered(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(request_arguments, "_answered", {})


def test_of_several_answers_one_is_the_first_for_each_argument() -> None:
    asked = [(about, f"{index}_r") for about in ("a", "b") for index in (2, 0, 11)]
    assert [is_first_answer(*each) for each in asked] == [True, False, False] * 2


@pytest.mark.parametrize("request_id", ["r", "_r", "x_r", "0r", "-1_r"])
def test_a_request_of_its_own_is_always_the_first(request_id: str) -> None:
    assert is_first_answer("a", request_id) and is_first_answer("a", request_id)
    assert request_arguments._answered == {}


def test_the_newest_requests_are_remembered() -> None:
    for number in range(3 * MAX_REMEMBERED):
        assert is_first_answer("a", f"0_r{number}")
        assert not is_first_answer("a", "1_r0") or number >= MAX_REMEMBERED
        assert not is_first_answer("a", f"1_r{number}")
    assert len(request_arguments._answered) == MAX_REMEMBERED
