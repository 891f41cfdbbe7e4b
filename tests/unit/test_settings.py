# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vllm-ascend-kvext project
"""What users set in the environment, and the resulting settings."""

from __future__ import annotations

import re
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest

from vllm_ascend_kvext.activation import read_settings, wanted_features
from vllm_ascend_kvext.errors import KvextError, SettingsError
from vllm_ascend_kvext.features import FEATURES, REPAIRS
from vllm_ascend_kvext.settings import (
    ASCEND_KERNEL_VARIABLE,
    BUNDLE_VARIABLE,
    DISABLE_VARIABLE,
    FAST_PREFIX_CACHE_VARIABLE,
    HOW_TO_ASK,
    MODE_VARIABLE,
    RETENTION_INTERVAL_VARIABLE,
    RETENTION_VARIABLE,
    VARIABLE_NAMES,
    Mode,
    Retention,
    Settings,
    Switch,
)

PAGE = Path(__file__).parents[2] / "docs" / "settings.md"
# By variable: the field, its default as shown, texts with their results, and wrong texts.
TABLE: dict[str, tuple[str, str, dict[str, Any], tuple[str, ...]]] = {
    MODE_VARIABLE: (
        "mode",
        "safe",
        {"STRICT": Mode.STRICT, " safe ": Mode.SAFE, "": Mode.SAFE},
        ("strickt", "1"),
    ),
    DISABLE_VARIABLE: (
        "disabled",
        "unset",
        {
            " drafts-in-flight,, two-phase-allocation ,": frozenset(
                {"drafts-in-flight", "two-phase-allocation"}
            ),
            " ": frozenset(),
        },
        ("drafts-in-flight,two-phase-alocation", "drafts-in-flight,retention", "all"),
    ),
    RETENTION_VARIABLE: (
        "retention",
        "interval",
        {" ADAPTIVE ": Retention.ADAPTIVE, "interval": Retention.INTERVAL, " ": Retention.INTERVAL},
        ("adaptiv", "intervall", "0", "dense"),
    ),
    RETENTION_INTERVAL_VARIABLE: (
        "retention_interval",
        "unset",
        {"0": "0", "4096": "4096", "-5": "-5", "abc": "abc", "": None, "  ": None},
        (),
    ),
    FAST_PREFIX_CACHE_VARIABLE: (
        "fast_prefix_cache",
        "auto",
        {"1": Switch.ON, "0": Switch.OFF, "AUTO": Switch.AUTO},
        ("2", "on"),
    ),
    BUNDLE_VARIABLE: ("is_bundled", "1", {"0": False, "1": True, " ": True}, ("2", "true")),
    ASCEND_KERNEL_VARIABLE: ("uses_ascend_kernel", "0", {"1": True, "0": False}, ("2", "yes")),
}

ASK_FOR_FEATURES = (RETENTION_VARIABLE, RETENTION_INTERVAL_VARIABLE, FAST_PREFIX_CACHE_VARIABLE)


def test_users_read_the_default_of_every_variable() -> None:
    page = PAGE.read_text(encoding="utf-8").partition("## Options of")[0]
    documented = re.findall(r"^### `(.+)`\n\nDefault: (.*)\.\n\n(.+\.)$", page, re.MULTILINE)
    assert [(name, default) for name, default, _ in documented] == [
        (name, default) for name, (_, default, _, _) in TABLE.items()
    ]
    assert [name for name, _, _ in documented] == list(VARIABLE_NAMES)
    texts = {name: text for name, _, text in documented}
    assert all(f"`{repair.name}`" in texts[DISABLE_VARIABLE] for repair in REPAIRS)


def test_nothing_set_is_the_defaults_and_nothing_requested() -> None:
    settings = read_settings({"PATH": "/bin", "VLLM_PLUGINS": "ascend", "VLLM_NO": "1"})
    assert settings == Settings()
    assert not settings.requests


@pytest.mark.parametrize(
    ("name", "text", "expected"),
    [
        (name, text, made)
        for name, (_, _, texts, _) in TABLE.items()
        for text, made in texts.items()
    ],
)
def test_a_variable_changes_its_field_and_no_other(name: str, text: str, expected: Any) -> None:
    settings = read_settings({name: text})
    assert asdict(settings) == {**asdict(Settings()), TABLE[name][0]: expected}
    assert name in ASK_FOR_FEATURES or not settings.requests


@pytest.mark.parametrize(
    ("name", "text"), [(name, text) for name, (*_, wrong) in TABLE.items() for text in wrong]
)
def test_a_wrong_text_is_refused_with_the_variable_and_what_was_found(name: str, text: str) -> None:
    with pytest.raises(SettingsError) as raised:
        read_settings({name: text})
    assert f"{name}={text!r}" in str(raised.value) and "expected " in str(raised.value)
    assert text != "dense" or "Did you mean" not in str(raised.value), (
        "the text resembles no value, but the message suggests one"
    )
    assert isinstance(raised.value, KvextError) and isinstance(raised.value, ValueError)


@pytest.mark.parametrize(
    ("environ", "texts"),
    [
        ({MODE_VARIABLE: "strickt"}, ("off, safe, strict", "Did you mean strict?")),
        ({RETENTION_VARIABLE: "adaptiv"}, ("interval, adaptive", "Did you mean adaptive?")),
        (
            {DISABLE_VARIABLE: "two-phase-alocation"},
            ("Did you mean two-phase-allocation?", *(repair.name for repair in REPAIRS)),
        ),
        (
            {"VLLM_ASCEND_KVEXT_MODUS": "safe"},
            ("_MODUS: expected", "Did you mean VLLM_ASCEND_KVEXT_MODE?", *VARIABLE_NAMES),
        ),
        (
            {DISABLE_VARIABLE: "trim-full-groups", RETENTION_VARIABLE: "adaptive"},
            ("trim-full-groups", "'retention' is built", f"unset {RETENTION_VARIABLE}"),
        ),
        (
            {DISABLE_VARIABLE: "trim-full-groups", RETENTION_INTERVAL_VARIABLE: "0"},
            ("trim-full-groups", "'retention' is built", f"unset {RETENTION_INTERVAL_VARIABLE}"),
        ),
    ],
)
def test_a_refusal_says_what_to_do(environ: dict[str, str], texts: tuple[str, ...]) -> None:
    with pytest.raises(SettingsError) as raised:
        read_settings(environ)
    assert all(text in str(raised.value) for text in texts)


def test_a_repair_that_nothing_is_built_on_can_be_left_out() -> None:
    environ = {RETENTION_INTERVAL_VARIABLE: "0", DISABLE_VARIABLE: "two-phase-allocation"}
    assert read_settings(environ).disabled
    assert read_settings({DISABLE_VARIABLE: "trim-full-groups"}).disabled


@pytest.mark.parametrize(
    ("retention", "interval", "requested_by"),
    [
        (None, "4096", RETENTION_INTERVAL_VARIABLE),
        (None, " ", None),
        ("interval", None, None),
        ("interval", "0", RETENTION_INTERVAL_VARIABLE),
        *(("adaptive", each, RETENTION_VARIABLE) for each in (None, "", "  ", "0", "4096")),
    ],
)
def test_an_interval_or_adaptive_retention_requests_retention(
    retention: str | None, interval: str | None, requested_by: str | None
) -> None:
    environ = {RETENTION_VARIABLE: retention, RETENTION_INTERVAL_VARIABLE: interval}
    settings = read_settings({name: text for name, text in environ.items() if text is not None})
    assert settings.requests == ({"retention": requested_by} if requested_by else {})
    assert settings.retention_interval == ((interval or "").strip() or None)


@pytest.mark.parametrize("switch", ["auto", "1", "0"])
@pytest.mark.parametrize(
    "retention", [{}, {RETENTION_INTERVAL_VARIABLE: "0"}, {RETENTION_VARIABLE: "adaptive"}]
)
def test_retention_brings_the_fast_prefix_cache_where_the_switch_leaves_it_open(
    retention: dict[str, str], switch: str
) -> None:
    settings = read_settings(retention | {FAST_PREFIX_CACHE_VARIABLE: switch})
    is_wanted = switch == "1" or (switch == "auto" and bool(retention))
    assert ("fast-prefix-cache" in settings.requests) is (switch == "1")
    assert ("fast-prefix-cache" in wanted_features(settings)) is is_wanted


def test_settings_name_features_that_exist() -> None:
    """The settings know the names of features. They do not know what the names stand for."""
    asked = read_settings({RETENTION_VARIABLE: "adaptive", FAST_PREFIX_CACHE_VARIABLE: "1"})
    implied = read_settings({RETENTION_VARIABLE: "adaptive"}).implied_features
    named = {*asked.requests, *implied, *HOW_TO_ASK}
    assert named == {feature.name for feature in FEATURES if not feature.default_on}
