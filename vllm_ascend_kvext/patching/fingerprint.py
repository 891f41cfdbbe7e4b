# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vllm-ascend-kvext project
"""Computes the fingerprint of a function: a hash of the meaning of its source.

Formatting, comments, docstrings and the version of Python make no difference. Name, arguments,
defaults, annotations, decorators and body make a difference. The module uses the standard library
only, and never imports the files that it reads.
"""

from __future__ import annotations

import ast
import functools
import hashlib
from collections.abc import Iterator
from pathlib import Path
from types import CodeType, FunctionType
from typing import NamedTuple

from vllm_ascend_kvext.errors import FingerprintError

_Definition = ast.FunctionDef | ast.AsyncFunctionDef


class _Found(NamedTuple):
    qualname: str
    definition: _Definition
    outermost: _Definition
    """The outermost function around the definition; the definition itself if there is none."""


# Fields that do not change the meaning (ctx, comments), and fields that only some Pythons from 3.10
# to 3.13 set.
_IGNORED_FIELDS = frozenset({"ctx", "kind", "type_comment", "type_ignores", "type_params"})

_FINGERPRINT_CHARS = 16


def fingerprint_source(source_root: Path, name: str) -> str:
    """The fingerprint of a function in a tree of source files.

    Args:
        source_root: The folder that holds the top-level package.
        name: ``module:qualname``, for example ``pkg.mod:Class.method``, or
            ``pkg.mod:outer.<locals>.inner``. The body of the class must have the definition.

    Raises:
        FingerprintError: If there is no such file, or no such definition in it.
    """
    return _fingerprint(_find(source_root, name)[1])


def source_of(source_root: Path, name: str) -> list[str]:
    """The lines of a function, without empty lines and without its docstring.

    Decorators and comments are included. For arguments and errors, see `fingerprint_source`.
    """
    path, (_, definition, _) = _find(source_root, name)
    lines = path.read_text(encoding="utf-8").splitlines()
    first = definition.body[0]
    has_docstring = ast.get_docstring(definition) is not None
    docstring = range(first.lineno, (first.end_lineno or 0) + 1) if has_docstring else ()
    numbers = range(_first_line(definition), (definition.end_lineno or 0) + 1)
    own = (lines[number - 1] for number in numbers if number not in docstring)
    return [line for line in own if line.strip()]


def _find(source_root: Path, name: str) -> tuple[Path, _Found]:
    module, _, qualname = name.partition(":")
    path = source_root.joinpath(*module.split("."))
    path = path / "__init__.py" if path.is_dir() else path.with_suffix(".py")
    # If a name is defined several times, the last definition is in effect.
    found = [each for each in _definitions(path) if each.qualname == qualname]
    if not found:
        raise FingerprintError(f"{path} does not define {qualname!r}.")
    return path, found[-1]


def fingerprint_live(function: object) -> str:
    """The fingerprint of a function, classmethod or staticmethod object, read from its file.

    Raises:
        FingerprintError: If the object is no function, classmethod or staticmethod, or if it is
            not defined in the body of a module, class or function.
    """
    if isinstance(function, (classmethod, staticmethod)):
        function = function.__func__
    # `isinstance` would accept a proxy that claims to be a function.
    if type(function) is not FunctionType:
        raise FingerprintError(
            f"expected a Python function, found {type(function).__module__}."
            f"{type(function).__qualname__}."
        )
    # functools.wraps changes the name of a wrapper, but not its code object.
    code = function.__code__
    _, known = _known.get(id(code), (code, None))
    if known is None:
        known = _fingerprint_code(code)
        _known[id(code)] = code, known
    return known


_known: dict[int, tuple[CodeType, str]] = {}
"""Fingerprints by the ``id`` of a code object.

The object is kept beside its fingerprint, so that no other object gets its id. Code objects are not
compared by equality, because equal ones can come from sources with different meanings.
"""


def _fingerprint_code(code: CodeType) -> str:
    path = Path(code.co_filename)
    for found in _definitions(path):
        definition = found.definition
        if definition.name == code.co_name and _first_line(definition) == code.co_firstlineno:
            return _fingerprint(found)
    raise FingerprintError(
        f"{path}:{code.co_firstlineno} does not define {code.co_name!r} in the body of a module, "
        f"class or function."
    )


def forget_sources() -> None:
    """Release the parsed files. The syntax trees of a few modules take tens of megabytes.

    Fingerprints that were computed from them stay.
    """
    _definitions.cache_clear()


@functools.lru_cache(maxsize=32)
def _definitions(path: Path) -> tuple[_Found, ...]:
    """The functions of a file, in source order."""
    try:
        tree = ast.parse(path.read_bytes(), filename=str(path))
    except OSError as error:
        raise FingerprintError(f"{path} cannot be read: {error.strerror}.") from error
    except SyntaxError as error:
        raise FingerprintError(f"{path} cannot be parsed: {error}.") from error
    return tuple(_walk(tree, prefix=""))


def _walk(node: ast.AST, prefix: str, outermost: _Definition | None = None) -> Iterator[_Found]:
    for child in ast.iter_child_nodes(node):
        if isinstance(child, _Definition):
            around = outermost or child
            yield _Found(prefix + child.name, child, around)
            yield from _walk(child, f"{prefix}{child.name}.<locals>.", around)
        elif isinstance(child, ast.ClassDef):
            yield from _walk(child, f"{prefix}{child.name}.", outermost)
        elif isinstance(child, (ast.stmt, ast.excepthandler)):
            # The bodies of `if`, `try` and `with` define names in the scope around them.
            yield from _walk(child, prefix, outermost)


def _first_line(definition: _Definition) -> int:
    """The value of ``co_firstlineno`` of the definition's code: the line of its first decorator."""
    return min([definition.lineno, *(node.lineno for node in definition.decorator_list)])


def _fingerprint(found: _Found) -> str:
    text = _canonical(found.definition)
    if found.outermost is not found.definition:
        # The outermost function decides which values the inner one captures.
        text = f"{text} in {_canonical(found.outermost)}"
    return hashlib.sha256(text.encode("ascii")).hexdigest()[:_FINGERPRINT_CHARS]


def _canonical(value: object) -> str:
    """A text that is equal for trees of equal meaning.

    `ast.dump` cannot be used, because its form differs between versions of Python.
    """
    if isinstance(value, list):
        return f"[{','.join(map(_canonical, value))}]"
    if isinstance(value, ast.Constant):
        return f"Constant({type(value.value).__name__} {value.value!a})"
    if not isinstance(value, ast.AST):
        return ascii(value)
    fields = []
    for name, field in ast.iter_fields(value):
        if name in _IGNORED_FIELDS:
            continue
        if name == "body" and isinstance(value, (_Definition, ast.ClassDef)):
            field = _without_docstring(field)
        if isinstance(value, ast.JoinedStr):
            field = [part for part in field if not _is_empty_text(part)]
        if field is None or field == []:
            continue
        fields.append(f"{name}={_canonical(field)}")
    return f"{type(value).__name__}({','.join(fields)})"


def _without_docstring(body: list[ast.stmt]) -> list[ast.stmt]:
    first = body[0]
    if (
        isinstance(first, ast.Expr)
        and isinstance(first.value, ast.Constant)
        and isinstance(first.value.value, str)
    ):
        return body[1:]
    return body


def _is_empty_text(node: ast.expr) -> bool:
    """Whether a part of an f-string is empty. Python 3.12 ends nested format specs with one."""
    return isinstance(node, ast.Constant) and node.value == ""
