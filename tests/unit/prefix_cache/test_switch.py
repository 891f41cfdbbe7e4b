# SPDX-License-Identifier: Apache-2.0
"""Who gets the fast prefix cache: whoever asks for it or for retention, unless it is refused."""

from __future__ import annotations

import pytest

from vllm_ascend_kvext.activation import wanted_features
from vllm_ascend_kvext.errors import SettingsError
from vllm_ascend_kvext.settings import (
    FAST_PREFIX_CACHE_VARIABLE,
    RETENTION_INTERVAL_VARIABLE,
    RETENTION_VARIABLE,
    Settings,
)

FEATURE = "fast-prefix-cache"
INTERVAL = {RETENTION_INTERVAL_VARIABLE: "0"}
ADAPTIVE = {RETENTION_VARIABLE: "adaptive"}


@pytest.mark.parametrize(
    ("environ", "is_requested", "is_wanted"),
    [
        ({}, False, False),
        ({FAST_PREFIX_CACHE_VARIABLE: "auto"}, False, False),
        ({FAST_PREFIX_CACHE_VARIABLE: "1"}, True, True),
        ({FAST_PREFIX_CACHE_VARIABLE: "0"}, False, False),
        (INTERVAL, False, True),
        (ADAPTIVE, False, True),
        (INTERVAL | {FAST_PREFIX_CACHE_VARIABLE: "1"}, True, True),
        (INTERVAL | {FAST_PREFIX_CACHE_VARIABLE: "0"}, False, False),
        (ADAPTIVE | {FAST_PREFIX_CACHE_VARIABLE: "0"}, False, False),
    ],
)
def test_retention_brings_it_and_the_switch_decides(environ, is_requested, is_wanted):
    settings = Settings.from_environ(environ)
    assert (FEATURE in settings.requests) == is_requested
    assert (FEATURE in wanted_features(settings)) == is_wanted


def test_another_value_is_refused():
    with pytest.raises(SettingsError, match=r"expected 0, 1, auto"):
        Settings.from_environ({FAST_PREFIX_CACHE_VARIABLE: "yes"})
