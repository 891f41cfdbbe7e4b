# SPDX-License-Identifier: Apache-2.0
"""Print the tables of the README as Markdown: supported releases, patches, variables."""

from __future__ import annotations

import argparse
from collections.abc import Iterable

from vllm_ascend_kvext.commands.table import render_markdown_table
from vllm_ascend_kvext.compat import SUPPORTED, VLLM, VLLM_ASCEND, version_in
from vllm_ascend_kvext.patches import PATCHES
from vllm_ascend_kvext.patching.declaration import Patch
from vllm_ascend_kvext.patching.store import FingerprintStore
from vllm_ascend_kvext.settings import VARIABLES

START = "<!-- ledger:start -->"
END = "<!-- ledger:end -->"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    del parser  # none


def run(arguments: argparse.Namespace) -> int:
    del arguments
    print(render(PATCHES, FingerprintStore.load()))
    return 0


def render(ledger: Iterable[Patch], store: FingerprintStore) -> str:
    """What belongs between `START` and `END` in the README."""
    return "\n".join(
        [
            "### Supported releases",
            "",
            *_releases(store),
            "",
            "### Patches",
            "",
            *_patches(ledger),
            "",
            "### Environment variables",
            "",
            *_variables(),
        ]
    )


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


def _patches(ledger: Iterable[Patch]) -> list[str]:
    rows = [
        (
            patch.id,
            patch.feature,
            f"`{patch.target}`",
            patch.kind.value,
            " ".join(f"`{versions}`" for versions in patch.vllm),
            patch.why,
            patch.retire_when,
        )
        for patch in ledger
    ]
    header = ("id", "feature", "target", "kind", "vLLM", "why", "until")
    return render_markdown_table(header, rows)


def _variables() -> list[str]:
    rows = [(f"`{variable.name}`", variable.default, variable.doc) for variable in VARIABLES]
    return render_markdown_table(("variable", "default", "meaning"), rows)
