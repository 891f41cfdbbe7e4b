# SPDX-License-Identifier: Apache-2.0
"""The fingerprint of a function: a hash of what its source means.

Formatting, comments, docstrings and the Python that reads the source make no difference; name,
arguments, defaults, annotations, decorators and body do. Standard library only, and never imports
what it reads.
"""

from __future__ import annotations

import ast
import functools
import hashlib
from collections.abc import Iterator
from pathlib import Path
from types import CodeType, FunctionType

from vllm_ascend_kvext.errors import FingerprintError

_Definition = ast.FunctionDef | ast.AsyncFunctionDef

# Fields that carry no meaning here (ctx, comments) or that only some Pythons from 3.10 to 3.13 set.
_IGNORED_FIELDS = frozenset({"ctx", "kind", "type_comment", "type_ignores", "type_params"})

_FINGERPRINT_CHARS = 16


def fingerprint_source(source_root: Path, name: str) -> str:
    """The fingerprint of a function in a tree of source files.

    Args:
        source_root: The folder that holds the top-level package.
        name: ``module:qualname``, for example ``pkg.mod:Class.method``. The class has to be the
            one whose body has the definition.

    Raises:
        FingerprintError: If there is no such file, or no such definition in it.
    """
    return _fingerprint(_definition_of(source_root, name)[1])


def source_of(source_root: Path, name: str) -> list[str]:
    """The lines of the same function, decorators and comments included; it raises the same."""
    path, definition = _definition_of(source_root, name)
    lines = path.read_text(encoding="utf-8").splitlines()
    return lines[_first_line(definition) - 1 : definition.end_lineno]


def _definition_of(source_root: Path, name: str) -> tuple[Path, _Definition]:
    module, _, qualname = name.partition(":")
    path = source_root.joinpath(*module.split("."))
    path = path / "__init__.py" if path.is_dir() else path.with_suffix(".py")
    # Of several definitions of one name the last is the one that stays.
    found = [definition for defined, definition in _definitions(path) if defined == qualname]
    if not found:
        raise FingerprintError(f"{path} does not define {qualname!r}.")
    return path, found[-1]


def fingerprint_live(function: object) -> str:
    """The fingerprint of a function, classmethod or staticmethod object, read from its file.

    Raises:
        FingerprintError: If it is no such thing or not defined in a module or class body.
    """
    if isinstance(function, (classmethod, staticmethod)):
        function = function.__func__
    # `isinstance` would believe a proxy that claims to be a function.
    if type(function) is not FunctionType:
        raise FingerprintError(
            f"expected a Python function, found {type(function).__module__}."
            f"{type(function).__qualname__}."
        )
    # Names lie under functools.wraps, the code object does not.
    code = function.__code__
    _, known = _known.get(id(code), (code, None))
    if known is None:
        known = _fingerprint_code(code)
        _known[id(code)] = code, known
    return known


_known: dict[int, tuple[CodeType, str]] = {}
"""Fingerprints by the identity of a code object, which stays its own as long as it is held here.

Equal code objects can come from sources that mean different things.
"""


def _fingerprint_code(code: CodeType) -> str:
    for _, definition in _definitions(Path(code.co_filename)):
        if definition.name == code.co_name and _first_line(definition) == code.co_firstlineno:
            return _fingerprint(definition)
    raise FingerprintError(
        f"{code.co_filename}:{code.co_firstlineno} does not define {code.co_name!r} in the body of "
        f"a module or class."
    )


def forget_sources() -> None:
    """Release the parsed files; the syntax trees of a few modules take tens of megabytes.

    The fingerprints that were taken from them stay.
    """
    _definitions.cache_clear()


@functools.lru_cache(maxsize=32)
def _definitions(path: Path) -> tuple[tuple[str, _Definition], ...]:
    """``(qualname, definition)`` of the functions of a file, in source order."""
    try:
        tree = ast.parse(path.read_bytes(), filename=str(path))
    except OSError as error:
        raise FingerprintError(f"{path} cannot be read: {error.strerror}.") from error
    except SyntaxError as error:
        raise FingerprintError(f"{path} cannot be parsed: {error}.") from error
    return tuple(_walk(tree, prefix=""))


def _walk(node: ast.AST, prefix: str) -> Iterator[tuple[str, _Definition]]:
    for child in ast.iter_child_nodes(node):
        if isinstance(child, (ast.FunctionDef, ast.AsyncFunctionDef)):
            yield prefix + child.name, child
        elif isinstance(child, ast.ClassDef):
            yield from _walk(child, f"{prefix}{child.name}.")
        elif isinstance(child, (ast.stmt, ast.excepthandler)):
            yield from _walk(child, prefix)  # `if`, `try`, `with`: their bodies bind names here


def _first_line(definition: _Definition) -> int:
    """What ``co_firstlineno`` of the definition's code is: the line of the first decorator."""
    return min([definition.lineno, *(node.lineno for node in definition.decorator_list)])


def _fingerprint(definition: _Definition) -> str:
    digest = hashlib.sha256(_canonical(definition).encode("ascii"))
    return digest.hexdigest()[:_FINGERPRINT_CHARS]


def _canonical(value: object) -> str:
    """A text that is equal for trees of equal meaning. Not `ast.dump`: its form changes."""
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
    """Python 3.12 ends nested format specifications with one."""
    return isinstance(node, ast.Constant) and node.value == ""
