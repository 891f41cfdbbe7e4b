# SPDX-License-Identifier: Apache-2.0
"""Print ``docs/patches.md``: the supported releases, and every patch with its reason."""

from __future__ import annotations

import argparse
from collections.abc import Iterable

from vllm_ascend_kvext.commands.table import render_markdown_table
from vllm_ascend_kvext.compat import SUPPORTED, VLLM, VLLM_ASCEND, version_in
from vllm_ascend_kvext.features import FEATURES
from vllm_ascend_kvext.patches import PATCHES
from vllm_ascend_kvext.patching.declaration import Feature, Patch
from vllm_ascend_kvext.patching.store import FingerprintStore


def add_arguments(parser: argparse.ArgumentParser) -> None:
    del parser  # none


def run(arguments: argparse.Namespace) -> int:
    del arguments
    print(render(FEATURES, PATCHES, FingerprintStore.load()))
    return 0


def render(features: Iterable[Feature], ledger: Iterable[Patch], store: FingerprintStore) -> str:
    """The page, without a newline at its end."""
    patches = tuple(ledger)
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
        *_releases(store),
    ]
    for feature in features:
        own = [patch for patch in patches if patch.feature == feature.name]
        lines += ["", f"## {feature.name}", "", _introduction(feature), "", *_table(own)]
    return "\n".join(lines)


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
    header = ("vLLM", "vLLM-Ascend", "read and tested: vLLM", "vLLM-Ascend")
    return render_markdown_table(header, rows)


def _table(patches: Iterable[Patch]) -> list[str]:
    rows = [
        (
            patch.id,
            f"`{patch.target}`",
            patch.kind.value,
            " ".join(f"`{versions}`" for versions in patch.vllm),
            patch.why,
            patch.retire_when,
        )
        for patch in patches
    ]
    return render_markdown_table(("id", "target", "kind", "vLLM", "why", "until"), rows)
