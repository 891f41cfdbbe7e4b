# SPDX-License-Identifier: Apache-2.0
from __future__ import annotations

import pytest

from vllm_ascend_kvext.errors import KvextError, SettingsError
from vllm_ascend_kvext.features import REPAIRS
from vllm_ascend_kvext.settings import (
    BUNDLE_ALIAS,
    BUNDLE_VARIABLE,
    DISABLE_VARIABLE,
    MODE_VARIABLE,
    RETENTION_INTERVAL_VARIABLE,
    RETENTION_VARIABLE,
    VARIABLES,
    Mode,
    Retention,
    Settings,
    own_variables,
)


def test_nothing_set_means_safe_and_nothing_requested() -> None:
    settings = Settings.from_environ({"PATH": "/bin", "VLLM_PLUGINS": "ascend"})
    assert settings == Settings(Mode.SAFE, None)
    assert settings.requested_features == frozenset()


@pytest.mark.parametrize("text", ["off", "safe", "strict", "STRICT", " safe "])
def test_mode_is_read(text: str) -> None:
    assert Settings.from_environ({MODE_VARIABLE: text}).mode is Mode(text.strip().lower())


def test_empty_mode_is_the_default() -> None:
    assert Settings.from_environ({MODE_VARIABLE: ""}).mode is Mode.SAFE


def test_wrong_mode_names_the_modes_and_the_nearest() -> None:
    with pytest.raises(SettingsError, match=r"'strickt'.*off, safe, strict.*mean strict\?"):
        Settings.from_environ({MODE_VARIABLE: "strickt"})


@pytest.mark.parametrize("text", ["0", "4096", "-5", "abc"])
def test_interval_is_kept_as_text_and_requests_retention(text: str) -> None:
    settings = Settings.from_environ({RETENTION_INTERVAL_VARIABLE: text})
    assert settings.retention_interval == text
    assert settings.requested_features == {"retention"}
    assert settings.requests == {"retention": RETENTION_INTERVAL_VARIABLE}


@pytest.mark.parametrize("text", ["", "  "])
def test_empty_interval_requests_nothing(text: str) -> None:
    settings = Settings.from_environ({RETENTION_INTERVAL_VARIABLE: text})
    assert not settings.requested_features
    assert settings == Settings()


@pytest.mark.parametrize("text", ["interval", "adaptive", "ADAPTIVE", " adaptive "])
def test_retention_is_read(text: str) -> None:
    settings = Settings.from_environ({RETENTION_VARIABLE: text})
    assert settings.retention is Retention(text.strip().lower())


@pytest.mark.parametrize("text", ["", " "])
def test_empty_retention_is_the_default(text: str) -> None:
    settings = Settings.from_environ({RETENTION_VARIABLE: text})
    assert settings.retention is Retention.INTERVAL
    assert not settings.requests


def test_interval_retention_without_an_interval_requests_nothing() -> None:
    settings = Settings.from_environ({RETENTION_VARIABLE: "interval"})
    assert not settings.requests
    settings = Settings.from_environ(
        {RETENTION_VARIABLE: "interval", RETENTION_INTERVAL_VARIABLE: "0"}
    )
    assert settings.requests == {"retention": RETENTION_INTERVAL_VARIABLE}


@pytest.mark.parametrize("interval", [None, "", "  ", "0", "4096"])
def test_adaptive_retention_requests_retention_with_or_without_a_grid(interval: str | None) -> None:
    environ = {RETENTION_VARIABLE: "adaptive"}
    if interval is not None:
        environ[RETENTION_INTERVAL_VARIABLE] = interval
    settings = Settings.from_environ(environ)
    assert settings.requests == {"retention": RETENTION_VARIABLE}
    assert settings.requested_features == {"retention"}
    assert settings.retention_interval == ((interval or "").strip() or None)


@pytest.mark.parametrize(
    ("text", "suggestion"),
    [("adaptiv", "adaptive"), ("intervall", "interval"), ("0", None), ("dense", None)],
)
def test_wrong_retention_names_the_values_and_the_nearest(
    text: str, suggestion: str | None
) -> None:
    with pytest.raises(SettingsError, match="expected interval, adaptive") as raised:
        Settings.from_environ({RETENTION_VARIABLE: text})
    message = str(raised.value)
    assert f"{RETENTION_VARIABLE}={text!r}" in message
    assert ("Did you mean" in message) is (suggestion is not None)
    assert suggestion is None or f"Did you mean {suggestion}?" in message


def test_adaptive_retention_keeps_what_it_is_built_on() -> None:
    environ = {DISABLE_VARIABLE: "trim-full-groups", RETENTION_VARIABLE: "adaptive"}
    with pytest.raises(SettingsError, match="'retention' is built") as raised:
        Settings.from_environ(environ)
    assert f"unset {RETENTION_VARIABLE}" in str(raised.value)


def test_disabled_repairs_are_read() -> None:
    settings = Settings.from_environ(
        {DISABLE_VARIABLE: " drafts-in-flight,, two-phase-allocation ,"}
    )
    assert settings.disabled == {"drafts-in-flight", "two-phase-allocation"}
    assert not Settings.from_environ({DISABLE_VARIABLE: " "}).disabled


@pytest.mark.parametrize("name", ["two-phase-alocation", "retention", "all"])
def test_only_what_is_on_by_default_can_be_disabled(name: str) -> None:
    with pytest.raises(SettingsError, match=f"'{name}' is not one of them") as raised:
        Settings.from_environ({DISABLE_VARIABLE: f"drafts-in-flight,{name}"})
    message = str(raised.value)
    assert all(repair.name in message for repair in REPAIRS)
    assert ("Did you mean two-phase-allocation?" in message) is name.startswith("two")


def test_what_was_asked_for_keeps_what_it_is_built_on() -> None:
    environ = {DISABLE_VARIABLE: "trim-full-groups", RETENTION_INTERVAL_VARIABLE: "0"}
    with pytest.raises(SettingsError, match=r"trim-full-groups.*'retention' is built") as raised:
        Settings.from_environ(environ)
    assert RETENTION_INTERVAL_VARIABLE in str(raised.value)
    assert Settings.from_environ({DISABLE_VARIABLE: "trim-full-groups"}).disabled
    environ[DISABLE_VARIABLE] = "two-phase-allocation"
    assert Settings.from_environ(environ).disabled


def test_every_repair_is_in_the_table_of_variables() -> None:
    (variable,) = [variable for variable in VARIABLES if variable.name == DISABLE_VARIABLE]
    assert all(f"`{repair.name}`" in variable.doc for repair in REPAIRS)


def test_unknown_variable_names_itself_the_known_ones_and_the_nearest() -> None:
    with pytest.raises(SettingsError) as raised:
        Settings.from_environ({"VLLM_ASCEND_KVEXT_MODUS": "safe"})
    message = str(raised.value)
    assert "VLLM_ASCEND_KVEXT_MODUS" in message
    assert "Did you mean VLLM_ASCEND_KVEXT_MODE?" in message
    assert all(variable.name in message for variable in VARIABLES)


def test_variables_of_others_are_not_ours_to_judge() -> None:
    Settings.from_environ({"VLLM_ASCEND_ENABLE_NZ": "1", "VLLM_NO_SUCH_THING": "1"})


def test_off_looks_at_nothing_else() -> None:
    environ = {
        MODE_VARIABLE: "off",
        "VLLM_ASCEND_KVEXT_MODUS": "safe",
        RETENTION_INTERVAL_VARIABLE: "0",
    }
    assert Settings.from_environ(environ) == Settings(Mode.OFF, None)


def test_own_variables_are_those_that_only_this_package_knows() -> None:
    environ = {MODE_VARIABLE: "safe", RETENTION_INTERVAL_VARIABLE: "0", "HOME": "/"}
    assert own_variables(environ) == {MODE_VARIABLE: "safe"}
    assert own_variables({}) == {}


def test_a_settings_error_is_a_value_error_and_one_of_ours() -> None:
    assert issubclass(SettingsError, ValueError)
    assert issubclass(SettingsError, KvextError)


@pytest.mark.parametrize(
    ("environ", "is_bundled"),
    [
        ({}, True),
        ({BUNDLE_VARIABLE: "0"}, False),
        ({BUNDLE_VARIABLE: "1", BUNDLE_ALIAS: "0"}, True),
        ({BUNDLE_VARIABLE: " ", BUNDLE_ALIAS: "0"}, False),
        ({BUNDLE_ALIAS: "FALSE"}, False),
        ({BUNDLE_ALIAS: "true"}, True),
    ],
)
def test_bundling_has_an_alias(environ: dict[str, str], is_bundled: bool) -> None:
    assert Settings.from_environ(environ).is_bundled is is_bundled
    assert not Settings.from_environ(environ).requested_features


@pytest.mark.parametrize("name", [BUNDLE_VARIABLE, BUNDLE_ALIAS])
def test_wrong_bundling_names_the_variable_and_the_values(name: str) -> None:
    with pytest.raises(SettingsError, match=rf"{name}='2' is not one of its values: expected 0, 1"):
        Settings.from_environ({name: "2"})
