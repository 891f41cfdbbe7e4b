# SPDX-License-Identifier: Apache-2.0
"""What people write into ``kv_connector_extra_config``, and what becomes of it."""

from __future__ import annotations

from dataclasses import fields
from typing import Any

import pytest

from vllm_ascend_kvext.connector.options import (
    OPTIONS,
    STATE_POLICY_ALIAS,
    ConnectorOptions,
    Selector,
    parse_options,
)
from vllm_ascend_kvext.errors import KvextError, SettingsError
from vllm_ascend_kvext.layout.model import StatePolicy
from vllm_ascend_kvext.settings import HOLE_REUSE_VARIABLE
from vllm_ascend_kvext.store.store_policy import StorePolicy
from vllm_ascend_kvext.store.worth import EvictionRule

KEYS = [option.key for option in OPTIONS]
FLAGS = (
    *("swap_on_preemption", "hole_reuse", "blending", "blend_across_windows"),
    *("learn_segments", "load_if_slower"),
)
GIB = 1 << 30


def parse(world_size: int = 1, environ: dict[str, str] | None = None, **extra_config: Any):
    return parse_options(extra_config, world_size, environ or {})


def refusal(**extra_config: Any) -> str:
    with pytest.raises(SettingsError) as raised:
        parse(**extra_config)
    assert isinstance(raised.value, KvextError)
    return str(raised.value)


def test_nothing_given_is_the_defaults() -> None:
    assert parse() == ConnectorOptions(
        world_size=1,
        host_memory_gib=8,
        chunk_tokens=1024,
        store_policy=StorePolicy.SECOND_TOUCH,
        state_policy=StatePolicy.EXACT,
        swap_on_preemption=False,
        hole_reuse=True,
        eviction=EvictionRule.LATEST_USE,
        blending=False,
        blend_head_tokens=16,
        blend_selector=Selector.HEADS,
        blend_ratio=0.1,
        blend_run_tokens=8,
        blend_check_layer=None,
        blend_min_tokens=32,
        blend_across_windows=False,
        segment_separator=None,
        segment_sink=None,
        load_if_slower=False,
        copy_cpus=None,
        copy_threads=None,
    )


def test_every_option_is_in_the_table_once() -> None:
    assert len(KEYS) == len(set(KEYS))
    assert {*KEYS, "world_size"} == {field.name for field in fields(ConnectorOptions)}


def test_the_table_names_the_defaults_as_one_would_write_them() -> None:
    defaults = {option.key: option.default for option in OPTIONS}
    assert defaults == {
        "host_memory_gib": "8",
        "chunk_tokens": "1024",
        "store_policy": "second_touch",
        "state_policy": "exact",
        "swap_on_preemption": "false",
        "hole_reuse": "true",
        "eviction": "latest_use",
        "blending": "false",
        "blend_head_tokens": "16",
        "blend_selector": "heads",
        "blend_ratio": "0.1",
        "blend_run_tokens": "8",
        "blend_check_layer": "unset",
        "blend_min_tokens": "32",
        "blend_across_windows": "false",
        "segment_separator": "unset",
        "segment_sink": "unset",
        "learn_segments": "false",
        "load_if_slower": "false",
        "copy_cpus": "unset",
        "copy_threads": "unset",
    }


def test_everything_given() -> None:
    assert parse(
        world_size=4,
        host_memory_gib=0.5,
        chunk_tokens=256,
        store_policy="all",
        state_policy="skip",
        swap_on_preemption=True,
        hole_reuse=True,
        eviction="reuse",
        blending=True,
        blend_head_tokens=0,
        blend_selector="question",
        blend_ratio=1,
        blend_run_tokens=16,
        blend_check_layer=18,
        blend_min_tokens=8,
        blend_across_windows=True,
        segment_separator=" # # ",
        segment_sink=[1, 2],
        learn_segments=True,
        load_if_slower=True,
        copy_cpus=[3, 1],
        copy_threads=2,
    ) == ConnectorOptions(
        world_size=4,
        host_memory_gib=0.5,
        chunk_tokens=256,
        store_policy=StorePolicy.ALL,
        state_policy=StatePolicy.SKIP,
        swap_on_preemption=True,
        hole_reuse=True,
        eviction=EvictionRule.REUSE,
        blending=True,
        blend_head_tokens=0,
        blend_selector=Selector.QUESTION,
        blend_ratio=1.0,
        blend_run_tokens=16,
        blend_check_layer=18,
        blend_min_tokens=8,
        blend_across_windows=True,
        segment_separator=" # # ",
        segment_sink=(1, 2),
        learn_segments=True,
        load_if_slower=True,
        copy_cpus=(1, 3),
        copy_threads=2,
    )


@pytest.mark.parametrize("key", KEYS)
def test_null_is_the_default(key: str) -> None:
    assert parse(**{key: None}) == parse()


def test_an_unknown_key_lists_the_known_and_the_nearest() -> None:
    message = refusal(chunk_token=256)
    assert all(key in message for key in ("kv_connector_extra_config", "'chunk_token'", *KEYS))
    assert "Did you mean chunk_tokens?" in message


def test_an_unknown_key_like_no_other_has_no_nearest() -> None:
    assert "Did you mean" not in refusal(zzz=1)


def test_an_unknown_key_is_refused_even_if_it_is_null() -> None:
    assert "unknown key 'chunk_token'" in refusal(chunk_token=None)


WRONG = {
    "host_memory_gib": (0, -1, True, "8", float("nan"), float("inf"), 1e300, 10**400, [8]),
    "chunk_tokens": (0, -128, True, "1024", 1024.0, 0.5, [1024]),
    "store_policy": ("second-touch", "ALL", True, 1, ["all"]),
    "state_policy": ("lossy", "", False, 0, {}),
    "swap_on_preemption": (1, 0, "1", "yes", "", [True]),
    "hole_reuse": (1, 0, "1", "yes", "", [True]),
    "eviction": ("lru", "REUSE", True, ""),
    "blending": (1, 0, "1", "yes", "", [True]),
    "blend_head_tokens": (-1, True, "16", 16.0),
    "blend_selector": ("head", "QUESTION", True, ""),
    "blend_ratio": (-0.1, 1.1, True, "0.1", float("nan"), [0.1]),
    "blend_run_tokens": (3, 17, True, "8", 8.0),
    "blend_check_layer": (-1, True, "1", 1.0),
    "blend_min_tokens": (0, -1, True, "16", 16.0),
    "blend_across_windows": (1, 0, "1", "yes", "", [True]),
    "segment_separator": ("", [], 5, [True], [-1], ["a"], {}),
    "segment_sink": (1, "", [True], [-1], [1.0], {}),
    "learn_segments": (1, 0, "1", "yes", "", [True]),
    "load_if_slower": (1, 0, "1", "yes", "", [True]),
    "copy_cpus": (
        *([], "", 3, True, {}, [True], [-1], [1.0], ["1"], [[1]], "a", "-1", "3-1", "1-", "1,,2"),
        *("5,3-1", "0-999999999", "123456", "1 2", "0x1", "٣"),
    ),
    "copy_threads": (0, -1, True, "2", 2.0),
}


@pytest.mark.parametrize(
    ("key", "value"), [(key, value) for key, values in WRONG.items() for value in values]
)
def test_a_wrong_value_is_refused_with_where_expected_and_found(key: str, value: Any) -> None:
    message = refusal(**{key: value})
    assert message.startswith(f"kv_connector_extra_config: {key}: expected ")
    assert f"found {value!r}. " in message


def test_every_key_has_wrong_values() -> None:
    assert list(WRONG) == KEYS


def test_separators_are_text_or_token_ids() -> None:
    assert parse(segment_separator=" ").segment_separator == " "
    assert parse(segment_separator=[3, 0]).segment_separator == (3, 0)


def test_segments_may_be_computed_behind_nothing() -> None:
    assert parse(segment_sink=[]).segment_sink == ()


def test_segments_may_be_computed_behind_a_text() -> None:
    assert parse(segment_sink="Once upon a time.").segment_sink == "Once upon a time."


def test_blending_is_refused_where_holes_are_not_computed() -> None:
    assert "blending: expected hole_reuse" in refusal(blending=True, hole_reuse=False)


def test_a_wrong_choice_lists_all_and_the_nearest() -> None:
    message = refusal(store_policy="second-touch")
    assert "second_touch, all, never" in message
    assert "Did you mean second_touch?" in message


@pytest.mark.parametrize("key", FLAGS)
@pytest.mark.parametrize(
    ("value", "meaning"),
    [(True, True), (False, False), ("true", True), ("false", False), (" True ", True)],
)
def test_flags_come_from_json_and_from_command_lines(key: str, value: Any, meaning: bool) -> None:
    assert getattr(parse(**{key: value}), key) is meaning


@pytest.mark.parametrize(
    ("value", "cpus"),
    [
        ([2], (2,)),
        ([8, 2, 8], (2, 8)),
        ((0, 1), (0, 1)),
        ("0-3,8", (0, 1, 2, 3, 8)),
        (" 5 , 3-4 ", (3, 4, 5)),
        ("7-7", (7,)),
        ("1-2,2-3", (1, 2, 3)),
    ],
)
def test_cpus_are_a_list_or_a_text(value: Any, cpus: tuple[int, ...]) -> None:
    assert parse(copy_cpus=value).copy_cpus == cpus


@pytest.mark.parametrize(
    ("gib", "world_size", "num_bytes"),
    [(8, 1, 8 * GIB), (8, 2, 4 * GIB), (0.5, 4, GIB // 8), (1, 3, GIB // 3)],
)
def test_workers_share_the_host_memory(gib: float, world_size: int, num_bytes: int) -> None:
    options = parse(world_size, host_memory_gib=gib)
    assert options.host_memory_bytes_per_worker == num_bytes
    assert world_size * num_bytes <= gib * GIB


def test_memory_that_is_no_byte_for_each_worker_is_refused() -> None:
    message = refusal(world_size=8, host_memory_gib=5 / GIB)
    assert "host_memory_gib: expected memory for 8 workers" in message


@pytest.mark.parametrize(
    ("chunk_tokens", "unit_tokens"), [(1024, 128), (128, 128), (1024, 1), (96, 32)]
)
def test_a_chunk_of_whole_units_is_accepted(chunk_tokens: int, unit_tokens: int) -> None:
    ConnectorOptions(chunk_tokens=chunk_tokens).refuse_unsuited_chunk(unit_tokens)


@pytest.mark.parametrize(
    ("chunk_tokens", "unit_tokens", "nearest"),
    [(1000, 128, "The nearest: 896 or 1024."), (100, 128, "The nearest: 128.")],
)
def test_another_chunk_is_refused_with_the_nearest_that_are_not(
    chunk_tokens: int, unit_tokens: int, nearest: str
) -> None:
    with pytest.raises(SettingsError) as raised:
        ConnectorOptions(chunk_tokens=chunk_tokens).refuse_unsuited_chunk(unit_tokens)
    message = str(raised.value)
    assert message.endswith(nearest)
    assert f"multiple of {unit_tokens}" in message
    assert f"found {chunk_tokens}" in message


@pytest.mark.parametrize(
    ("text", "policy"),
    [
        ("true", StatePolicy.SKIP),
        ("1", StatePolicy.SKIP),
        (" TRUE ", StatePolicy.SKIP),
        ("false", StatePolicy.EXACT),
        ("0", StatePolicy.EXACT),
        ("", StatePolicy.EXACT),
        ("  ", StatePolicy.EXACT),
    ],
)
def test_the_alias_holds_while_the_key_is_absent(text: str, policy: StatePolicy) -> None:
    environ = {STATE_POLICY_ALIAS: text}
    assert parse(environ=environ).state_policy is policy
    assert parse(environ=environ, state_policy=None).state_policy is policy


@pytest.mark.parametrize("text", ["true", "false", "perhaps"])
@pytest.mark.parametrize("policy", StatePolicy)
def test_the_key_comes_before_the_alias(text: str, policy: StatePolicy) -> None:
    options = parse(environ={STATE_POLICY_ALIAS: text}, state_policy=policy.value)
    assert options.state_policy is policy


def test_a_wrong_alias_is_refused() -> None:
    with pytest.raises(SettingsError, match=f"{STATE_POLICY_ALIAS}='yes'.*true, 1, false, 0"):
        parse(environ={STATE_POLICY_ALIAS: "yes"})


@pytest.mark.parametrize(
    ("text", "expected"), [(None, True), ("1", True), ("0", False), (" ", True)]
)
def test_the_variable_decides_on_holes_while_the_key_is_absent(
    text: str | None, expected: bool
) -> None:
    environ = {} if text is None else {HOLE_REUSE_VARIABLE: text}
    assert parse(environ=environ).hole_reuse is expected
    assert parse(environ=environ, hole_reuse=not expected).hole_reuse is not expected


def test_a_wrong_value_of_the_variable_is_refused() -> None:
    with pytest.raises(SettingsError, match=f"{HOLE_REUSE_VARIABLE}='maybe' is not one of"):
        parse(environ={HOLE_REUSE_VARIABLE: "maybe"})
