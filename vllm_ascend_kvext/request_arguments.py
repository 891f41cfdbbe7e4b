# SPDX-License-Identifier: Apache-2.0
"""Reads what a request says in ``SamplingParams.extra_args``, which is ``vllm_xargs`` over HTTP.

Which JSON values an endpoint takes there differs: ``/v1/completions`` refuses lists, and
``/v1/chat/completions`` lists of lists. Both take text, so every value may also be JSON text.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

MAX_TEXT_CHARACTERS = 1 << 18
"""Of JSON text. An argument is decoded on the scheduler's thread: this takes some milliseconds."""

_MAX_SHOWN = 100
"""Characters of what a client has sent."""


def read_argument(extra_args: Mapping[str, Any] | None, name: str) -> Any:
    """The value of an argument; None if a request does not have it.

    JSON text is decoded. Text that is something else, or longer than `MAX_TEXT_CHARACTERS`, is
    returned as it is: whoever expects a list or a number refuses it.
    """
    value = (extra_args or {}).get(name)
    if isinstance(value, str) and len(value) <= MAX_TEXT_CHARACTERS:
        try:
            return json.loads(value)
        except (ValueError, RecursionError):
            return value
    return value


def is_integer(value: object) -> bool:
    """Whether a value is a whole number and no truth value."""
    return isinstance(value, int) and not isinstance(value, bool)


def shown(value: object) -> str:
    """What a client has sent, for people: it may be anything."""
    try:
        text = repr(value)
    except (ValueError, RecursionError):  # A number of thousands of digits, or very deep.
        return f"a {type(value).__name__} that cannot be shown"
    return text if len(text) <= _MAX_SHOWN else f"{text[:_MAX_SHOWN]}..."
