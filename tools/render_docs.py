# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vllm-ascend-kvext project
"""Write the generated pages of ``docs/``: patches.md and settings.md from the declarations, and
official_lines.md from the data of its tests.

`make docs` runs this program with the installed package.
"""

from __future__ import annotations

import ast
import enum
import inspect
import itertools
import sys
import textwrap
from collections.abc import Iterable, Sequence
from pathlib import Path

sys.path.append(str(Path(__file__).parent))  # The flag -I leaves this folder out.

import official_lines_page

from vllm_ascend_kvext.compat import VLLM, VLLM_ASCEND, version_in
from vllm_ascend_kvext.connector.common.option_values import CONFIG
from vllm_ascend_kvext.connector.common.options import OPTIONS, ConnectorOptions
from vllm_ascend_kvext.declared import declared
from vllm_ascend_kvext.features import FEATURES, REPAIRS
from vllm_ascend_kvext.patches import PATCHES
from vllm_ascend_kvext.patching.declaration import Feature
from vllm_ascend_kvext.patching.store import FingerprintStore
from vllm_ascend_kvext.segments.options import OPTION, SEGMENT_OPTIONS, SegmentOptions
from vllm_ascend_kvext.settings import Settings
from vllm_ascend_kvext.supported import SUPPORTED

DOCS = Path(__file__).resolve().parent.parent / "docs"


def patches_page() -> str:
    """The page with the supported releases, and every patch with its reason."""
    lines = [
        "# Patches",
        "",
        "This page is generated: `make docs` writes it from the declarations below `patches/`.",
        "A feature is installed as a whole or not at all. A patch is left out of its feature on",
        "the versions of vLLM that its row does not name. *wrap* calls upstream's function,",
        "*replace* need not call it, *hook* uses a way in that upstream offers.",
        "",
        "## Supported releases",
        "",
        *_releases(FingerprintStore.load()),
        "",
        "## What a default install changes",
        "",
        "Repairs that have a patch for a supported release, with vLLM alone and with vLLM-Ascend.",
        "`connector` and `lmcache` change nothing until an engine is started with one of their",
        "connectors. `python -m vllm_ascend_kvext status` says the same of your environment.",
        "",
        *_defaults(),
    ]
    for feature in FEATURES:
        rows = [
            (
                patch.id,
                f"`{patch.target}`",
                patch.kind.value,
                " ".join(f"`{versions}`" for versions in patch.vllm),
                patch.why,
                patch.retire_when,
            )
            for patch in PATCHES
            if patch.feature == feature.name
        ]
        lines += ["", f"## {feature.name}", "", _introduction(feature), ""]
        lines += _table(("id", "target", "kind", "vLLM", "why", "until"), rows)
    return "\n".join([*lines, ""])


def settings_page() -> str:
    """Every environment variable, every option of the connector, and every key of segments."""
    lines = [
        "# Settings",
        "",
        "This page is generated: `make docs` writes it from `vllm_ascend_kvext/settings.py`,",
        "`vllm_ascend_kvext/connector/common/options.py` and",
        "`vllm_ascend_kvext/segments/options.py`.",
        "",
        "## Environment variables",
        "",
        "Set them before vLLM starts. A variable that begins with `VLLM_ASCEND_KVEXT_` and is not",
        "on this page is refused.",
    ]
    texts = _texts_below_fields(Settings)
    repairs = ", ".join(f"`{repair.name}`" for repair in REPAIRS)
    for each in declared(Settings):
        default = int(each.default) if each.kind is bool else each.default
        lines += _section(each.note, default, texts[each.key].replace("{repairs}", repairs))
    lines += [
        "",
        "## Options of `KvextConnector`",
        "",
        f"Keys of `{CONFIG}` in `--kv-transfer-config`, as JSON. A key that is not on",
        "this page is refused. A key whose value is `null` has its default.",
    ]
    texts = _texts_below_fields(ConnectorOptions)
    for each in OPTIONS:
        lines += _section(each.key, each.default, texts[each.key])
    lines += _section(OPTION, None, _text_below(SegmentOptions))
    lines += [
        "",
        f"## Keys of `{OPTION}`",
        "",
        f"Keys of the object `{OPTION}`, which is itself an option of `KvextConnector`. A key that",
        "is not below is refused. A key whose value is `null` has its default.",
    ]
    texts = _texts_below_fields(SegmentOptions)
    for each in SEGMENT_OPTIONS:
        lines += _section(each.key, each.default, texts[each.key])
    return "\n".join([*lines, ""])


PAGES = {
    "official_lines.md": official_lines_page.page,
    "patches.md": patches_page,
    "settings.md": settings_page,
}


def _introduction(feature: Feature) -> str:
    default = "On by default." if feature.default_on else "Off by default."
    if not feature.requires:
        return default
    return f"{default} Built on {', '.join(f'`{name}`' for name in feature.requires)}."


def _releases(store: FingerprintStore) -> list[str]:
    rows = []
    for release in SUPPORTED:
        read = [
            " ".join(version for version in store.versions(distribution) if version_in(version, of))
            for distribution, of in ((VLLM, release.vllm), (VLLM_ASCEND, release.vllm_ascend))
        ]
        rows.append((f"`{release.vllm}`", f"`{release.vllm_ascend}` or none", *read))
    return _table(("vLLM", "vLLM-Ascend", "read and tested: vLLM", "vLLM-Ascend"), rows)


def _defaults() -> list[str]:
    """A table of the repairs and the releases that they are for."""
    pairs = [(release, has_ascend) for release in SUPPORTED for has_ascend in (False, True)]
    header = [
        f"vLLM `{release.vllm}`" + (f", vLLM-Ascend `{release.vllm_ascend}`" if has_ascend else "")
        for release, has_ascend in pairs
    ]
    rows = []
    for repair in REPAIRS:
        patches = [patch for patch in PATCHES if patch.feature == repair.name]
        found = [
            any(
                release.vllm in patch.vllm and (has_ascend or not patch.is_for_vllm_ascend)
                for patch in patches
            )
            for release, has_ascend in pairs
        ]
        rows.append((f"`{repair.name}`", *("yes" if each else "" for each in found)))
    return _table(("repair", *header), rows)


def _table(header: Sequence[str], rows: Iterable[Sequence[str]]) -> list[str]:
    """The lines of a Markdown table. Vertical bars in cells are escaped."""
    lines = [header, ["---"] * len(header), *rows]
    return [f"| {' | '.join(cell.replace('|', chr(92) + '|') for cell in row)} |" for row in lines]


def _section(name: str, default: object, text: str) -> list[str]:
    return ["", f"### `{name}`", "", f"Default: {_as_written(default)}.", "", text]


def _as_written(default: object) -> str:
    """A default value as a user would write it."""
    value = default.value if isinstance(default, enum.Enum) else default
    if value is None or value == frozenset():
        return "unset"
    return str(value).lower() if isinstance(value, bool) else str(value)


def _text_below(cls: type) -> str:
    """What the docstring of a class says behind its first paragraph, in one line."""
    _, _, text = (inspect.getdoc(cls) or "").partition("\n\n")
    return " ".join(text.split())


def _texts_below_fields(cls: type) -> dict[str, str]:
    """The text below each field of a class, in one line. vLLM documents its fields in this form."""
    (definition,) = ast.parse(textwrap.dedent(inspect.getsource(cls))).body
    assert isinstance(definition, ast.ClassDef)
    texts = {}
    for statement, below in itertools.pairwise(definition.body):
        match statement, below:
            case (
                ast.AnnAssign(target=ast.Name(id=name)),
                ast.Expr(value=ast.Constant(value=str(text))),
            ):
                texts[name] = " ".join(text.split())
    return texts


if __name__ == "__main__":
    for name, page in PAGES.items():
        (DOCS / name).write_text(page(), encoding="utf-8")
