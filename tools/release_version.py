# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vllm-ascend-kvext project
"""Check that a tag, the package and the changelog name the same version.

Example:
    python tools/release_version.py v0.1.0
"""

from __future__ import annotations

import re
import sys
from pathlib import Path

CHECKOUT = Path(__file__).parents[1]


def version_of(pyproject: str) -> str:
    """The version that the project's metadata has.

    Raises:
        ValueError: If there is none, or more than one.
    """
    found = re.findall(r'^version = "([^"]+)"$', pyproject, re.MULTILINE)
    if len(found) != 1:
        raise ValueError(f"pyproject.toml: expected one line `version = ...`, found {len(found)}")
    return str(found[0])


def check(tag: str, pyproject: str, changelog: str) -> None:
    """Check a tag against the texts of both files.

    Raises:
        ValueError: If they name different versions, or the changelog has no date for it.
    """
    version = version_of(pyproject)
    if tag != f"v{version}":
        raise ValueError(
            f"the tag is {tag}, pyproject.toml has {version}: expected the tag v{version}; tag the "
            "commit that has the version"
        )
    heading = re.search(rf"^## \[{re.escape(version)}\] - \d{{4}}-\d\d-\d\d$", changelog, re.M)
    if heading is None:
        raise ValueError(
            f"CHANGELOG.md: expected a heading `## [{version}] - YYYY-MM-DD`, found none; give the "
            "release its heading before the tag"
        )


def main() -> int:
    if len(sys.argv) != 2:
        print("usage: python tools/release_version.py TAG", file=sys.stderr)
        return 2
    texts = [(CHECKOUT / name).read_text("utf-8") for name in ("pyproject.toml", "CHANGELOG.md")]
    try:
        check(sys.argv[1], *texts)
    except ValueError as error:
        print(error, file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
