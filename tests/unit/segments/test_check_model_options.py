# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vllm-ascend-kvext project
"""The options with which `check-model` starts an engine."""

from __future__ import annotations

from typing import Any

import pytest

from vllm_ascend_kvext.commands.check_model import _options

CHECKED = {"selector": "heads", "context": False, "learn": False}


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        ({}, {"host_memory_gib": 1, "segments": CHECKED}),
        ({"segments": None}, {"host_memory_gib": 1, "segments": CHECKED}),
        (
            {"host_memory_gib": 4, "segments": {"selector": "question", "head_tokens": 8}},
            {"host_memory_gib": 4, "segments": {**CHECKED, "head_tokens": 8}},
        ),
        # The engine refuses these options.
        ({"segments": True}, {"host_memory_gib": 1, "segments": True}),
        ({"segments": False}, {"host_memory_gib": 1, "segments": False}),
    ],
)
def test_keys_of_the_user_hold_but_for_those_that_change_what_is_asked(
    given: dict[str, Any], expected: dict[str, Any]
) -> None:
    assert _options({"store_policy": "all", **given}) == {"store_policy": "never", **expected}
