# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vllm-ascend-kvext project
"""Reads what a dataclass declares about its fields: type, default and a note.

    count: Annotated[int, a_note] = 3
    \"\"\"What it does.\"\"\"

Settings and options are declared only once in this form. ``tools/render_docs.py`` reads the text
below each field.
"""

from __future__ import annotations

import difflib
from collections.abc import Iterable
from dataclasses import fields
from typing import Annotated, Any, NamedTuple, get_args, get_origin, get_type_hints


class Declared(NamedTuple):
    """One field. The note is what ``Annotated`` adds to its type."""

    key: str
    kind: Any
    note: Any
    default: Any


def declared(cls: type) -> tuple[Declared, ...]:
    """The annotated fields of a dataclass, in order."""
    hints = get_type_hints(cls, include_extras=True)
    found = []
    for each in fields(cls):
        if get_origin(hints[each.name]) is Annotated:
            kind, note = get_args(hints[each.name])
            found.append(Declared(each.name, kind, note, each.default))
    return tuple(found)


def did_you_mean(found: object, known: Iterable[str]) -> str:
    """A question with the most similar known word, after a space; empty if no word is similar."""
    nearest = difflib.get_close_matches(str(found), list(known), n=1)
    return f" Did you mean {nearest[0]}?" if nearest else ""
