# SPDX-License-Identifier: Apache-2.0
"""What a dataclass declares of its fields: type, default, a note, and the text below each field.

    count: Annotated[int, a_note] = 3
    \"\"\"What it does.\"\"\"

So settings and options are declared once. Texts are read from the source, as vLLM reads those of
its configuration, and only where they are shown.
"""

from __future__ import annotations

import ast
import difflib
import enum
import inspect
import textwrap
from collections.abc import Iterable
from dataclasses import fields
from typing import Annotated, Any, NamedTuple, get_args, get_origin, get_type_hints


class Declared(NamedTuple):
    """One field; the note is what ``Annotated`` adds to its type."""

    key: str
    kind: Any
    note: Any
    default: Any

    @property
    def default_in_words(self) -> str:
        """The default as a user would write it."""
        value = self.default.value if isinstance(self.default, enum.Enum) else self.default
        if value is None or value == frozenset():
            return "unset"
        return str(value).lower() if isinstance(value, bool) else str(value)


class Described(NamedTuple):
    """A setting as it is shown: what a user writes, what holds while it is absent, and what its
    values do, as one paragraph of Markdown."""

    name: str
    default: str
    doc: str


def declared(cls: type) -> tuple[Declared, ...]:
    """The annotated fields of a dataclass, in order."""
    hints = get_type_hints(cls, include_extras=True)
    found = []
    for each in fields(cls):
        if get_origin(hints[each.name]) is Annotated:
            kind, note = get_args(hints[each.name])
            found.append(Declared(each.name, kind, note, each.default))
    return tuple(found)


def texts_of(cls: type) -> dict[str, str]:
    """The text below each field, in one line, by the name of the field."""
    (definition,) = ast.parse(textwrap.dedent(inspect.getsource(cls))).body
    assert isinstance(definition, ast.ClassDef)
    texts = {}
    for statement, below in zip(definition.body, definition.body[1:], strict=False):
        match statement, below:
            case (
                ast.AnnAssign(target=ast.Name(id=name)),
                ast.Expr(value=ast.Constant(value=str(text))),
            ):
                texts[name] = " ".join(text.split())
    return texts


def did_you_mean(found: object, known: Iterable[str]) -> str:
    """A question with the nearest known word, behind a space; empty if none is near."""
    nearest = difflib.get_close_matches(str(found), list(known), n=1)
    return f" Did you mean {nearest[0]}?" if nearest else ""
