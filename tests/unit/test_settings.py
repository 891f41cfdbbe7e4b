# SPDX-License-Identifier: Apache-2.0
from __future__ import annotations

import pytest

from vllm_ascend_kvext.errors import KvextError, SettingsError
from vllm_ascend_kvext.settings import (
    MODE_VARIABLE,
    RETENTION_INTERVAL_VARIABLE,
    VARIABLES,
    Mode,
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
    assert not Settings.from_environ({RETENTION_INTERVAL_VARIABLE: text}).requested_features


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
