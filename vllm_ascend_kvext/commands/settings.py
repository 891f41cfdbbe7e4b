# SPDX-License-Identifier: Apache-2.0
"""Print ``docs/settings.md``: every environment variable."""

from __future__ import annotations

import argparse
from collections.abc import Iterable

from vllm_ascend_kvext.settings import VARIABLES, Variable


def add_arguments(parser: argparse.ArgumentParser) -> None:
    del parser  # none


def run(arguments: argparse.Namespace) -> int:
    del arguments
    print(render(VARIABLES))
    return 0


def render(variables: Iterable[Variable]) -> str:
    """The page, without a newline at its end."""
    lines = [
        "# Settings",
        "",
        "This page is generated: `make docs` writes it from `vllm_ascend_kvext/settings.py`.",
        "All settings are environment variables. Set them before vLLM starts. A variable that",
        "begins with `VLLM_ASCEND_KVEXT_` and is not on this page is refused.",
    ]
    for variable in variables:
        lines += ["", f"## `{variable.name}`", ""]
        lines += [f"Default: {variable.default}.", "", variable.doc]
    return "\n".join(lines)
