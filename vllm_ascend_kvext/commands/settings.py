# SPDX-License-Identifier: Apache-2.0
"""Print ``docs/settings.md``: every environment variable, and every option of the connector."""

from __future__ import annotations

import argparse
from collections.abc import Iterable

from vllm_ascend_kvext.connector.options import CONFIG, OPTIONS, Option
from vllm_ascend_kvext.settings import VARIABLES, Variable


def add_arguments(parser: argparse.ArgumentParser) -> None:
    del parser  # none


def run(arguments: argparse.Namespace) -> int:
    del arguments
    print(render(VARIABLES, OPTIONS))
    return 0


def render(variables: Iterable[Variable], options: Iterable[Option]) -> str:
    """The page, without a newline at its end."""
    lines = [
        "# Settings",
        "",
        "This page is generated: `make docs` writes it from `vllm_ascend_kvext/settings.py` and",
        "`vllm_ascend_kvext/connector/options.py`.",
        "",
        "## Environment variables",
        "",
        "Set them before vLLM starts. A variable that begins with `VLLM_ASCEND_KVEXT_` and is not",
        "on this page is refused.",
    ]
    for variable in variables:
        lines += _section(variable.name, variable.default, variable.doc)
    lines += [
        "",
        "## Options of `KvextConnector`",
        "",
        f"Keys of `{CONFIG}` in `--kv-transfer-config`, as JSON. A key that is not on",
        "this page is refused. A key whose value is `null` has its default.",
    ]
    for option in options:
        lines += _section(option.key, option.default, option.doc)
    return "\n".join(lines)


def _section(name: str, default: str, doc: str) -> list[str]:
    return ["", f"### `{name}`", "", f"Default: {default}.", "", doc]
