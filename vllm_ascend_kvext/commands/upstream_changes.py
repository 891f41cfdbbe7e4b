# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vllm-ascend-kvext project
"""Shows the differences between two source trees of upstream that concern this package.

A fingerprint only tells that a function differs. This module shows the lines, and also finds
changes of functions and names that have no fingerprint.
"""

from __future__ import annotations

import ast
import re
from difflib import unified_diff
from pathlib import Path

from vllm_ascend_kvext import compat, patches
from vllm_ascend_kvext.commands import render_rows
from vllm_ascend_kvext.errors import FingerprintError
from vllm_ascend_kvext.patching.fingerprint import fingerprint_source, source_of


def diff(old: Path, new: Path, name: str) -> list[str]:
    """The differences of a function between two source trees, as a unified diff."""
    try:
        lines = source_of(old, name)
    except FingerprintError as error:
        return [f"{name}: {error}"]
    return ["", *unified_diff(lines, source_of(new, name), name, name, lineterm="")]


def changed_imports(old: Path, new: Path, package: str, known: set[str]) -> list[str]:
    """The differences of functions that this package imports and that no patch relies on.

    Args:
        package: The name of upstream's package.
        known: The functions that patches rely on.
    """
    imported = {
        f"{node.module}:{alias.name}"
        for path in _own_files()
        for node in ast.walk(ast.parse(path.read_bytes()))
        if isinstance(node, ast.ImportFrom) and f"{node.module}.".startswith(f"{package}.")
        for alias in node.names
    }
    lines: list[str] = []
    for name in sorted(imported - known):
        try:
            before = fingerprint_source(old, name)
        except FingerprintError:
            continue  # The name is no function.
        try:
            if fingerprint_source(new, name) != before:
                lines += diff(old, new, name)
        except FingerprintError as error:
            lines += ["", f"{name}: {error}"]
    return lines


def lost_names(old: Path, new: Path, package: str) -> list[str]:
    """The names that this package uses and that only the ``old`` sources have.

    Such a name may be an attribute that patches read, or an argument that they pass. No fingerprint
    shows its loss. A name that upstream still uses for something else is not found.
    """
    lost = _words_of(old / package) - _words_of(new / package)
    places: dict[str, set[str]] = {}
    for path in _own_files():
        for name in _names_in(path) & lost:
            places.setdefault(name, set()).add(f"{path.parent.name}/{path.name}")
    return [
        "",
        f"Names of this package that {old} has and {new} does not: {len(places)}.",
        *render_rows([(name, ", ".join(sorted(files))) for name, files in sorted(places.items())]),
    ]


def _own_files() -> set[Path]:
    """The source files of this package. In a checkout, the folder of its patches lies beside it."""
    roots = (Path(compat.__file__).parent, Path(patches.__file__).parent)
    return {path for root in roots for path in root.rglob("*.py")}


def _names_in(path: Path) -> set[str]:
    """The attributes, arguments and imported names in a file, and all strings."""
    names: set[str | None] = set()
    for node in ast.walk(ast.parse(path.read_bytes())):
        if isinstance(node, ast.Attribute):
            names.add(node.attr)
        elif isinstance(node, ast.alias):
            names.add(node.name.rpartition(".")[2])
        elif isinstance(node, (ast.arg, ast.keyword)):
            names.add(node.arg)
        elif isinstance(node, ast.Constant) and isinstance(node.value, str):
            names.add(node.value)
    return {name for name in names if name}


def _words_of(folder: Path) -> set[str]:
    """All words that could be a name in the sources below a folder, without comments."""
    words: set[bytes] = set()
    for path in folder.rglob("*.py"):
        words.update(re.findall(rb"[A-Za-z_]\w*", re.sub(rb"#.*", b"", path.read_bytes())))
    return {word.decode() for word in words}
