# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vllm-ascend-kvext project
"""Reads the arguments of a request in ``SamplingParams.extra_args`` (``vllm_xargs`` over HTTP).

Endpoints accept different JSON values there: ``/v1/completions`` refuses lists, and
``/v1/chat/completions`` refuses lists of lists. Both accept text, so every value may be JSON text.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from typing import Any

MAX_TEXT_CHARACTERS = 1 << 18
"""The longest JSON text that is decoded. The scheduler's thread decodes it in some milliseconds."""

_MAX_SHOWN = 100
"""The most characters of a client's value that a message shows."""

MAX_REMEMBERED = 1024
"""The number of requests with several answers that are remembered. The newest ones are kept."""

_ANSWER = re.compile("[0-9]+_(.+)", re.DOTALL)
_answered: dict[tuple[str, str], None] = {}
"""Pairs of an argument and the id of a request with several answers, the newest last."""


def read_argument(extra_args: Mapping[str, Any] | None, name: str) -> Any:
    """The value of an argument; None if a request does not have it.

    JSON text is decoded. Other text, and text longer than `MAX_TEXT_CHARACTERS`, is returned
    unchanged. A caller that expects a list or a number refuses it.
    """
    value = (extra_args or {}).get(name)
    if isinstance(value, str) and len(value) <= MAX_TEXT_CHARACTERS:
        try:
            return json.loads(value)
        except (ValueError, RecursionError):
            return value
    return value


def truth_of(value: Any) -> bool | None:
    """The truth value that a client means by a value; None if it means neither true nor false.

    Endpoints turn truth values into numbers, and text may begin with a capital letter.
    """
    if isinstance(value, str):
        return {"true": True, "false": False}.get(value.strip().lower())
    if isinstance(value, (bool, int, float)) and value in (0, 1):
        return bool(value)
    return None


def is_integer(value: object) -> bool:
    """Whether a value is an integer, and not a bool."""
    return isinstance(value, int) and not isinstance(value, bool)


def shown(value: object) -> str:
    """The text of a client's value for a message. The value may be anything."""
    try:
        text = repr(value)
    except (ValueError, RecursionError):  # The number is very long, or the list is very deep.
        return f"a {type(value).__name__} that cannot be shown"
    return text if len(text) <= _MAX_SHOWN else f"{text[:_MAX_SHOWN]}..."


def is_first_answer(argument: str, request_id: str) -> bool:
    """Whether a message about an argument is the first message for all answers to a request.

    vLLM makes ``n`` requests for ``n`` answers. Each id is a number, an underscore, and the id of
    the original request, which ends in a random part. If clients choose such ids themselves, and
    vLLM keeps them unchanged, some messages are left out.
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
