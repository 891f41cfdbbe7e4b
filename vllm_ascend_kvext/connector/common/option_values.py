# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vllm-ascend-kvext project
"""The values that keys of ``kv_connector_extra_config`` may have, and the parser of declarations.

A key is an annotated field of a dataclass, see ``declared``. Its note is one of the `Values`.
"""

from __future__ import annotations

import enum
from collections.abc import Callable, Collection, Mapping
from typing import Any, NamedTuple

from vllm_ascend_kvext.declared import Declared, did_you_mean
from vllm_ascend_kvext.errors import SettingsError
from vllm_ascend_kvext.request_arguments import is_integer

CONFIG = "kv_connector_extra_config"

_FLAGS = {"true": True, "false": False}


class Values(NamedTuple):
    """The values that a key may have.

    Attributes:
        expected: The values in words, for messages.
        accepts: Tells whether a value of the configuration is one of them.
        make: Makes the option's value from an accepted value.
        words: The values themselves, if they are a few words; else empty.
    """

    expected: str
    accepts: Callable[[Any], bool]
    make: Callable[[Any], Any]
    words: tuple[str, ...] = ()


def is_number(value: Any) -> bool:
    """Whether a value of a configuration is a number, and no truth value."""
    return isinstance(value, float) or is_integer(value)


def are_natural(value: Any) -> bool:
    """Whether a value of a configuration is a list of integers of at least 0."""
    is_list = isinstance(value, (list, tuple))
    return is_list and all(is_integer(each) and each >= 0 for each in value)


def choice(choices: type[enum.Enum]) -> Values:
    """The values of an enumeration of words."""
    words = tuple(choice.value for choice in choices)
    return Values(f"one of {', '.join(words)}", lambda value: value in words, choices, words)


RATIO = Values(
    "a number from 0 to 1, without quotes",
    lambda value: is_number(value) and 0 <= value <= 1,
    float,
)
POSITIVE_INTEGER = Values(
    "an integer of at least 1, without quotes", lambda value: is_integer(value) and value > 0, int
)
NATURAL_NUMBER = Values(
    "an integer of at least 0, without quotes", lambda value: is_integer(value) and value >= 0, int
)
FLAG = Values(
    "true or false",
    # A value may be a string, because users of command lines also quote truth values in JSON.
    lambda value: isinstance(value, (bool, str)) and str(value).strip().lower() in _FLAGS,
    lambda value: _FLAGS[str(value).strip().lower()],
)


def parse_values(
    config: Mapping[str, Any],
    options: Collection[Declared],
    where: str = "",
    other_keys: Collection[str] = (),
) -> dict[str, Any]:
    """Parse the values of declared options.

    Args:
        where: The key whose value this configuration is; empty for the outermost configuration.
        other_keys: Further keys that are known. The caller parses them.

    Returns:
        The values by key. Keys that are absent or null are left out.

    Raises:
        SettingsError: If a key is not known, or a value is wrong.
    """
    known = [*(option.key for option in options), *other_keys]
    place = f"{CONFIG}: {where}: " if where else f"{CONFIG}: "
    for key in config:
        if key in known:
            continue
        raise SettingsError(
            f"{place}unknown key {key!r}: expected some of {', '.join(known)}."
            f"{did_you_mean(key, known)} Correct or remove it."
        )
    values: dict[str, Any] = {}
    for option in options:
        value = config.get(option.key)
        if value is None:
            continue
        if not option.note.accepts(value):
            hint = did_you_mean(value, option.note.words).strip()
            key = f"{where}: {option.key}" if where else option.key
            raise wrong_value(key, value, option.note.expected, hint)
        values[option.key] = option.note.make(value)
    return values


def wrong_value(key: str, value: object, expected: str, remedy: str = "") -> SettingsError:
    """The error of a value that a key may not have."""
    remedy = remedy or "Correct it, or leave the key out for the default."
    return SettingsError(f"{CONFIG}: {key}: expected {expected}, found {value!r}. {remedy}")
