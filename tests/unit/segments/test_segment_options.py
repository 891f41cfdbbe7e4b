# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vllm-ascend-kvext project
"""The values of the object ``segments``, and the options that are made from them."""

from __future__ import annotations

import re
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest

from vllm_ascend_kvext.connector.common.extension_registry import register_extension
from vllm_ascend_kvext.connector.common.options import ConnectorOptions
from vllm_ascend_kvext.connector.extension import parse_configuration
from vllm_ascend_kvext.errors import SettingsError
from vllm_ascend_kvext.segments.options import (
    SEGMENT_OPTIONS,
    SegmentOptions,
    Selector,
    parse_segment_options,
)
from vllm_ascend_kvext.store.store_policy import StorePolicy

PAGE = Path(__file__).parents[3] / "docs" / "settings.md"
KEYS = [option.key for option in SEGMENT_OPTIONS]
FLAG = {True: True, False: False, "true": True, "false": False, " True ": True}
NO_FLAG = (1, 0, "1", "yes", "", [True])

# The key, its default as shown, accepted values with their results, and wrong values.
TABLE: dict[str, tuple[str, list[tuple[Any, Any]], tuple[Any, ...]]] = {
    "selector": ("unset", [("question", Selector.QUESTION)], ("head", "QUESTION", True, "")),
    "head_tokens": ("unset", [(0, 0), (8, 8)], (-1, True, "16", 16.0)),
    "ratio": ("0.16", [(0, 0.0), (1, 1.0)], (-0.1, 1.1, True, "0.1", float("nan"), [0.1])),
    "check_layer": ("unset", [(0, 0), (18, 18)], (-1, True, "1", 1.0)),
    "separator": (
        "unset",
        [(" ", " "), ([3, 0], (3, 0))],
        ("", [], 5, [True], [-1], ["a"], {}),
    ),
    "sink": (
        "unset",
        [("Once upon a time.", "Once upon a time."), ([1, 2], (1, 2)), ([], ())],
        (1, "", [True], [-1], [1.0], {}),
    ),
    "context": ("unset", list(FLAG.items()), NO_FLAG),
    "learn": ("unset", list(FLAG.items()), NO_FLAG),
}


@pytest.fixture(autouse=True)
def registered() -> None:
    register_extension("segments", "vllm_ascend_kvext.segments.extension", "SegmentsExtension")


def parse(**options: Any) -> SegmentOptions:
    return parse_segment_options(options, ConnectorOptions())


def refusal(extra_config: dict[str, Any]) -> str:
    with pytest.raises(SettingsError) as raised:
        parse_configuration(extra_config, 1)
    return str(raised.value)


def test_users_read_the_default_of_every_key() -> None:
    page = PAGE.read_text(encoding="utf-8").partition("## Keys of `segments`")[2]
    documented = re.findall(r"^### `(.+)`\n\nDefault: (.*)\.\n\n.+\.$", page, re.MULTILINE)
    assert documented == [(key, default) for key, (default, _, _) in TABLE.items()]
    assert list(TABLE) == KEYS


def test_an_empty_object_turns_segments_on_with_the_defaults() -> None:
    assert parse() == SegmentOptions() == parse(**dict.fromkeys(KEYS)), "null must count as absent"
    _, extension = parse_configuration({"segments": {}}, 1)
    assert extension is not None and extension.key == "segments"


@pytest.mark.parametrize("extra_config", [None, {}, {"segments": None}])
def test_without_the_object_there_is_no_extension(extra_config: dict[str, Any] | None) -> None:
    assert parse_configuration(extra_config, 1) == (ConnectorOptions(), None)


@pytest.mark.parametrize(
    ("key", "value", "expected"),
    [(key, value, made) for key, (_, values, _) in TABLE.items() for value, made in values],
)
def test_a_value_changes_its_option_and_no_other(key: str, value: Any, expected: Any) -> None:
    found = asdict(parse(**{key: value}))
    assert found == {**asdict(SegmentOptions()), key: expected}
    assert type(found[key]) is type(expected)


@pytest.mark.parametrize(
    ("key", "value"), [(key, value) for key, (_, _, wrong) in TABLE.items() for value in wrong]
)
def test_a_wrong_value_is_refused_with_where_expected_and_found(key: str, value: Any) -> None:
    message = refusal({"segments": {key: value}})
    assert message.startswith(f"kv_connector_extra_config: segments: {key}: expected ")
    assert f"found {value!r}. " in message


@pytest.mark.parametrize("value", [True, False, "", "{}", 1, [], ["separator"]])
def test_what_is_no_object_is_refused(value: Any) -> None:
    message = refusal({"segments": value})
    assert message.startswith("kv_connector_extra_config: segments: expected an object, such as {")
    assert f"found {value!r}. Correct it, or leave the key out" in message


def test_an_unknown_key_is_refused_with_the_nearest() -> None:
    message = refusal({"segments": {"separators": "#"}})
    assert message.startswith("kv_connector_extra_config: segments: unknown key 'separators'")
    assert "Did you mean separator?" in message and all(key in message for key in KEYS)
    assert "segments" in refusal({"segment": {}})


def test_holes_are_needed() -> None:
    assert "segments: expected hole_reuse" in refusal({"segments": {}, "hole_reuse": False})


@pytest.mark.parametrize(
    ("given", "separator", "store_policy", "learns"),
    [
        (None, None, "all", False),
        (None, " # ", "all", True),
        (None, [3, 2], "all", True),
        (False, " # ", "all", False),
        (True, None, "all", True),
        (None, " # ", "never", False),
        (True, " # ", "never", True),
    ],
)
def test_where_separators_show_segments_they_are_learned(
    given: bool | None, separator: Any, store_policy: str, learns: bool
) -> None:
    """An engine that never stores learns no segments by itself."""
    options = parse(separator=separator, learn=given)
    assert options.learns_new(StorePolicy(store_policy)) is learns
