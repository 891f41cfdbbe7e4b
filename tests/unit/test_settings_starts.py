# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vllm-ascend-kvext project
"""Every variable and option of the pages is part of a start, and every pair runs this start."""

from __future__ import annotations

from pathlib import Path

import pytest
from support.settings_starts import (
    CHECKOUT,
    KEYS,
    LEFT_OUT,
    NOT_SHOWN,
    NUMBER,
    OTHER,
    SEGMENT_KEYS,
    UNSET,
    documented,
    lacking,
    mentioned,
    started,
    starts,
)

from vllm_ascend_kvext.segments.options import OPTION
from vllm_ascend_kvext.settings import (
    DISABLE_VARIABLE,
    RETENTION_INTERVAL_VARIABLE,
    VARIABLE_NAMES,
)

SETTINGS = (CHECKOUT / "docs" / "settings.md").read_text(encoding="utf-8")
DOCUMENTED = documented(SETTINGS)
STARTED = started(starts(Path("/x")).values())


def found(name: str) -> set[str]:
    return STARTED.get(name, set())


def test_every_value_that_the_page_of_settings_names_is_in_a_start_and_so_is_unset() -> None:
    assert list(DOCUMENTED) == [*VARIABLE_NAMES, *KEYS, OPTION, *SEGMENT_KEYS]
    assert lacking(DOCUMENTED, found) == []


def test_the_page_is_read_word_by_word() -> None:
    assert DOCUMENTED[RETENTION_INTERVAL_VARIABLE] == {UNSET, "0", NUMBER}
    assert {"connector", "lmcache", "failed-loads"} < DOCUMENTED[DISABLE_VARIABLE]
    assert DOCUMENTED["store_policy"] == {UNSET, "second_touch", "all", "never"}
    assert DOCUMENTED["learn"] == {UNSET, "true", "false"}
    assert DOCUMENTED["chunk_tokens"] == {UNSET, OTHER}


def test_readme_and_pages_mention_nothing_that_is_in_no_start() -> None:
    pages = [CHECKOUT / "README.md", *CHECKOUT.glob("docs/*.md")]
    names = mentioned(page.read_text(encoding="utf-8") for page in pages)
    assert {RETENTION_INTERVAL_VARIABLE, DISABLE_VARIABLE, "host_memory_gib"} <= names
    assert lacking({name: {UNSET} for name in names}, found) == []


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("### `VLLM_NEW`\n\nDefault: 0.\n\n`1`: more.\n", [("VLLM_NEW", "1"), ("VLLM_NEW", UNSET)]),
        ("### `new_key`\n\nDefault: 7.\n\nSize.\n", [("new_key", OTHER), ("new_key", UNSET)]),
        ("### `state_policy`\n\nDefault: exact.\n\n`none`: x.\n", [("state_policy", "none")]),
    ],
)
def test_what_is_added_to_the_page_is_lacking(text: str, expected: list[tuple[str, str]]) -> None:
    """This is the control of the tests above."""
    assert lacking(documented(text), found) == expected


@pytest.mark.parametrize(
    "text",
    [
        "Set `VLLM_ASCEND_KVEXT_NEW=1`.",
        "VLLM_NEW_RETENTION_INTERVAL",
        '"kv_connector_extra_config": {"host_memory_gib": 8, "new_key": 1}',
    ],
)
def test_what_is_added_to_another_page_is_lacking(text: str) -> None:
    ((name, _),) = lacking({name: {UNSET} for name in mentioned([text])}, found)
    assert "new" in name.lower()


def test_what_is_left_out_is_documented_and_in_no_start() -> None:
    for name, value in LEFT_OUT:
        assert value in DOCUMENTED[name] and value not in found(name)
    assert {*NOT_SHOWN} <= {*DOCUMENTED}
