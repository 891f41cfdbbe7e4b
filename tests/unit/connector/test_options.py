# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vllm-ascend-kvext project
"""The values of ``kv_connector_extra_config``, and the options that are made from them."""

from __future__ import annotations

import re
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest

from vllm_ascend_kvext.connector.common.options import (
    OPTIONS,
    ConnectorOptions,
    parse_options,
)
from vllm_ascend_kvext.errors import KvextError, SettingsError
from vllm_ascend_kvext.layout.model import StatePolicy
from vllm_ascend_kvext.store.store_policy import StorePolicy
from vllm_ascend_kvext.transfer.cpus import as_ranges

PAGE = Path(__file__).parents[3] / "docs" / "settings.md"
KEYS = [option.key for option in OPTIONS]
GIB = 1 << 30
FLAG = {True: True, False: False, "true": True, "false": False, " True ": True}
NO_FLAG = (1, 0, "1", "yes", "", [True])

# The key, its default as shown, accepted values with their results, and wrong values.
TABLE: dict[str, tuple[str, list[tuple[Any, Any]], tuple[Any, ...]]] = {
    "host_memory_gib": (
        "8",
        [(0.5, 0.5), (16, 16.0)],
        (0, -1, True, "8", float("nan"), float("inf"), 1e300, 10**400, [8]),
    ),
    "chunk_tokens": ("1024", [(256, 256)], (0, -128, True, "1024", 1024.0, 0.5, [1024])),
    "store_policy": (
        "second_touch",
        [("all", StorePolicy.ALL), ("never", StorePolicy.NEVER)],
        ("second-touch", "ALL", True, 1, ["all"]),
    ),
    "state_policy": ("exact", [("skip", StatePolicy.SKIP)], ("lossy", "", False, 0, {})),
    "hole_reuse": ("true", list(FLAG.items()), NO_FLAG),
    "load_if_slower": ("false", list(FLAG.items()), NO_FLAG),
    "copy_cpus": (
        "unset",
        [
            ([2], (2,)),
            ([8, 2, 8], (2, 8)),
            ((0, 1), (0, 1)),
            ("0-3,8", (0, 1, 2, 3, 8)),
            (" 5 , 3-4 ", (3, 4, 5)),
            ("7-7", (7,)),
            ("1-2,2-3", (1, 2, 3)),
        ],
        (
            *([], "", 3, True, {}, [True], [-1], [1.0], ["1"], [[1]], "a", "-1", "3-1", "1-"),
            *("1,,2", "5,3-1", "0-999999999", "123456", "1 2", "0x1", "٣"),
        ),
    ),
    "allow_cuda": ("false", list(FLAG.items()), NO_FLAG),
    "shared_tier": (
        "unset",
        [(url, url) for url in ("file:///a/b", "mooncake://10.0.0.1:50051", "mooncake://m.x:1")],
        (
            *("", "/a/b", "file://a/b", "http:///a", 1, True, ["file:///a"]),
            *("mooncake://", "mooncake://host", "mooncake://host:port", "mooncake://:1"),
            *("mooncake://host:1/path", "mooncake://host:1 ", "a mooncake://host:1"),
        ),
    ),
    "shared_tier_bytes": ("unset", [(1 << 40, 1 << 40)], (0, -1, True, "1", 1.0)),
}


def parse(world_size: int = 1, **extra_config: Any):
    return parse_options(extra_config, world_size)


def refusal(**extra_config: Any) -> str:
    with pytest.raises(SettingsError) as raised:
        parse(**extra_config)
    assert isinstance(raised.value, KvextError)
    return str(raised.value)


def test_users_read_the_default_of_every_key() -> None:
    page = PAGE.read_text(encoding="utf-8").partition("## Options of")[2].partition("\n## ")[0]
    documented = re.findall(r"^### `(.+)`\n\nDefault: (.*)\.\n\n.+\.$", page, re.MULTILINE)
    assert documented.pop() == ("segments", "unset"), (
        "`segments` belongs to an extension; see test_segment_options"
    )
    assert documented == [(key, default) for key, (default, _, _) in TABLE.items()]
    assert list(TABLE) == KEYS


def test_nothing_given_is_the_defaults() -> None:
    assert parse() == ConnectorOptions()
    assert parse(**dict.fromkeys(KEYS)) == ConnectorOptions(), "null must count as absent"


@pytest.mark.parametrize(
    ("key", "value", "expected"),
    [(key, value, made) for key, (_, values, _) in TABLE.items() for value, made in values],
)
def test_a_value_changes_its_option_and_no_other(key: str, value: Any, expected: Any) -> None:
    found = asdict(parse(**{key: value}))
    given = {key: expected, "has_chosen_chunk": key == "chunk_tokens"}
    assert found == {**asdict(ConnectorOptions()), **given}
    assert type(found[key]) is type(expected)


@pytest.mark.parametrize(
    ("key", "value"), [(key, value) for key, (_, _, wrong) in TABLE.items() for value in wrong]
)
def test_a_wrong_value_is_refused_with_where_expected_and_found(key: str, value: Any) -> None:
    message = refusal(**{key: value})
    assert message.startswith(f"kv_connector_extra_config: {key}: expected ")
    assert f"found {value!r}. " in message


def test_cpus_are_shown_as_they_are_written() -> None:
    for text in ("0", "0-1", "0-3,8", "2,4-6,99998-99999"):
        assert as_ranges(parse(copy_cpus=text).copy_cpus) == text


@pytest.mark.parametrize("extra_config", [["host_memory_gib"], [], "{}", "", 8, 0, False, ("a",)])
def test_a_configuration_that_is_no_object_is_refused(extra_config: Any) -> None:
    with pytest.raises(SettingsError) as raised:
        parse_options(extra_config, 1)
    assert str(raised.value).startswith("kv_connector_extra_config: expected an object, such as {")
    assert f"found {extra_config!r}. Correct it, or leave it out" in str(raised.value)


def test_no_configuration_is_the_defaults() -> None:
    assert parse_options(None, 1) == ConnectorOptions()


@pytest.mark.parametrize(
    ("extra_config", "texts"),
    [
        ({"chunk_token": 256}, ("'chunk_token'", *KEYS, "Did you mean chunk_tokens?")),
        ({"chunk_token": None}, ("unknown key 'chunk_token'",)),
        ({"store_policy": "second-touch"}, ("second_touch, all, never", "mean second_touch?")),
        (
            {"shared_tier": "mooncake://a:1", "shared_tier_bytes": 1},
            ("shared_tier_bytes: expected a folder as shared_tier", "found 1. Leave it out."),
        ),
        (
            {"world_size": 8, "host_memory_gib": 5 / GIB},
            ("host_memory_gib: expected memory for 8 workers",),
        ),
    ],
)
def test_a_refusal_says_what_to_do(extra_config: dict[str, Any], texts: tuple[str, ...]) -> None:
    message = refusal(**extra_config)
    assert all(text in message for text in texts)


@pytest.mark.parametrize(
    ("gib", "world_size", "num_bytes"),
    [(8, 1, 8 * GIB), (8, 2, 4 * GIB), (0.5, 4, GIB // 8), (1, 3, GIB // 3 // 64 * 64)],
)
def test_workers_share_the_host_memory(gib: float, world_size: int, num_bytes: int) -> None:
    options = parse(world_size, host_memory_gib=gib)
    assert options.host_memory_bytes_per_worker == num_bytes
    assert world_size * num_bytes <= gib * GIB


@pytest.mark.parametrize(
    ("chunk_tokens", "unit_tokens", "nearest"),
    [
        *((1024, 128, ""), (128, 128, ""), (1024, 1, ""), (96, 32, "")),
        (1000, 128, "The nearest: 896 or 1024."),
        (100, 128, "The nearest: 128."),
    ],
)
def test_a_chunk_is_of_whole_units(chunk_tokens: int, unit_tokens: int, nearest: str) -> None:
    options = parse(chunk_tokens=chunk_tokens)
    if not nearest:
        assert options.chunk_tokens_of(unit_tokens, 1 << 20) == chunk_tokens
        return
    with pytest.raises(SettingsError) as raised:
        options.chunk_tokens_of(unit_tokens, 1 << 20)
    message = str(raised.value)
    assert message.endswith(nearest)
    assert f"multiple of {unit_tokens}" in message
    assert f"found {chunk_tokens}" in message


@pytest.mark.parametrize(("unit_tokens", "chunk_tokens"), [(128, 1024), (384, 1152), (4096, 4096)])
def test_the_default_chunk_is_rounded_up_to_whole_units(
    unit_tokens: int, chunk_tokens: int
) -> None:
    assert parse().chunk_tokens_of(unit_tokens, 100) == chunk_tokens


@pytest.mark.parametrize(
    ("chunk_tokens", "unit_tokens", "max_model_len", "most_tokens"),
    [
        *((10**24, 128, 4096, 4096), (4224, 128, 4096, 4096), (4224, 128, 4100, 0)),
        *((2048, 128, 512, 1024), (1024, 128, 512, 0), (1536, 768, 1000, 0)),
    ],
)
def test_a_chunk_is_no_longer_than_what_a_request_may_have(
    chunk_tokens: int, unit_tokens: int, max_model_len: int, most_tokens: int
) -> None:
    """Any model accepts the default values."""
    options = parse(chunk_tokens=chunk_tokens)
    if not most_tokens:
        assert options.chunk_tokens_of(unit_tokens, max_model_len) == chunk_tokens
        return
    with pytest.raises(SettingsError) as raised:
        options.chunk_tokens_of(unit_tokens, max_model_len)
    assert f"chunk_tokens: expected at most {most_tokens}, " in str(raised.value)
    assert f"found {chunk_tokens}. " in str(raised.value)
