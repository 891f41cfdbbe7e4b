# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vllm-ascend-kvext project
"""Check that every source file begins with its license and copyright lines, or write them.

Example:
    python tools/license_lines.py --write
    python tools/license_lines.py csrc/cpu/pages.cpp
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path

CHECKOUT = Path(__file__).parents[1]
FOLDERS = ("benchmarks", "csrc", "examples", "patches", "tests", "tools", "vllm_ascend_kvext")
MARKS = {".py": "#", ".pyi": "#", ".sh": "#", ".h": "//", ".hpp": "//", ".cpp": "//", ".cc": "//"}
"""What begins a comment, by the suffix of the file."""
LINES = (
    "SPDX-License-Identifier: Apache-2.0",
    "SPDX-FileCopyrightText: Copyright contributors to the vllm-ascend-kvext project",
)


def source_files() -> Iterator[Path]:
    """The source files of the checkout."""
    for folder in FOLDERS:
        for path in sorted((CHECKOUT / folder).rglob("*")):
            if path.suffix in MARKS and "__pycache__" not in path.parts and path.is_file():
                yield path


def with_lines(text: str, mark: str) -> str:
    """A file's text with both lines. A first line that names the interpreter stays the first."""
    lines = text.splitlines(keepends=True)
    first = lines[:1] if text.startswith("#!") else []
    rest = lines[len(first) :]
    wanted = [f"{mark} {line}\n" for line in LINES]
    while rest and rest[0] in wanted:
        rest = rest[1:]
    return "".join(first + wanted + rest)


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("files", nargs="*", type=Path, help="all of the checkout by default")
    parser.add_argument("--write", action="store_true", help="write the lines that lack")
    parsed = parser.parse_args(arguments)
    lacking = []
    for path in parsed.files or source_files():
        if path.suffix not in MARKS:
            parser.error(f"{path}: expected a suffix out of {', '.join(MARKS)}")
        text = path.read_text("utf-8")
        expected = with_lines(text, MARKS[path.suffix])
        if text != expected:
            lacking.append(path)
            if parsed.write:
                path.write_text(expected, "utf-8")
    for path in lacking:
        print(f"{path}: {'written' if parsed.write else 'expected as first lines: ' + LINES[0]}")
    if lacking and not parsed.write:
        print(f"{len(lacking)} files lack lines: run `python tools/license_lines.py --write`")
    return bool(lacking) and not parsed.write


if __name__ == "__main__":
    sys.exit(main())
