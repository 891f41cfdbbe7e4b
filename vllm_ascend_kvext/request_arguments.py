# SPDX-License-Identifier: Apache-2.0
"""Reads what a request says in ``SamplingParams.extra_args``, which is ``vllm_xargs`` over HTTP.

Which JSON values an endpoint takes there differs: ``/v1/completions`` refuses lists, and
``/v1/chat/completions`` lists of lists. Both take text, so every value may also be JSON text.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from typing import Any

MAX_TEXT_CHARACTERS = 1 << 18
"""Of JSON text. An argument is decoded on the scheduler's thread: this takes some milliseconds."""

_MAX_SHOWN = 100
"""Characters of what a client has sent."""

MAX_REMEMBERED = 1024
"""Requests with several answers of which something was said, the newest ones."""

_ANSWER = re.compile("[0-9]+_(.+)", re.DOTALL)
_answered: dict[tuple[str, str], None] = {}
"""Arguments and ids of requests with several answers, the newest last."""


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


def truth_of(value: Any) -> bool | None:
    """What a value says that is to be true or false; None if it says neither.

    Endpoints make numbers of truth values, and text may be written with a capital letter.
    """
    if isinstance(value, str):
        return {"true": True, "false": False}.get(value.strip().lower())
    if isinstance(value, (bool, int, float)) and value in (0, 1):
        return bool(value)
    return None


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


def is_first_answer(argument: str, request_id: str) -> bool:
    """Whether nothing has been said so far of an argument of the request that this answers.

    vLLM makes a request of each of ``n`` answers: their ids are numbers before one id, which ends
    in a random part. Where a client has chosen such ids itself, and vLLM is told to leave them as
    they are, less is said.
    """
    found = _ANSWER.fullmatch(request_id)
    if found is None:
        return True
    key = argument, found[1]
    if key in _answered:
        return False
    _answered[key] = None
    if len(_answered) > MAX_REMEMBERED:
        del _answered[next(iter(_answered))]
    return True
