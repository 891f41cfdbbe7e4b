# SPDX-License-Identifier: Apache-2.0
"""Compare the source of upstream's functions with the stored source fingerprints, or store them.

A source fingerprint is a hash of a function's syntax tree; a patch is installed only where the
functions that it counts on have the stored ones. It has nothing to do with the layout fingerprint
of stored KV (`vllm_ascend_kvext.layout.fingerprint`), nor with the plan digest in the log.
Reads files, without --sources what is installed; imports none of vLLM, vLLM-Ascend and LMCache.
Of a release that is not stored, every function that any patch counts on is listed, whether it is as
in a stored version, differs from all, or is absent: what to read before a patch is declared for it.
Exit status: 0 if everything is as stored (or was stored), 1 if something differs or the release is
not stored, 2 if the arguments are wrong.
"""

from __future__ import annotations

import argparse
import os
import sys
from collections import Counter
from dataclasses import dataclass
from pathlib import Path

from vllm_ascend_kvext import compat
from vllm_ascend_kvext.commands.table import render_rows
from vllm_ascend_kvext.compat import LMCACHE, VLLM, VLLM_ASCEND
from vllm_ascend_kvext.errors import FingerprintError
from vllm_ascend_kvext.patches import PATCHES
from vllm_ascend_kvext.patching.fingerprint import fingerprint_source
from vllm_ascend_kvext.patching.store import STORE_FILE, FingerprintStore


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--sources",
        type=Path,
        metavar="DIR",
        help="a site-packages folder or an unpacked wheel; needs --distribution and --version",
    )
    parser.add_argument("--distribution", choices=(VLLM, VLLM_ASCEND, LMCACHE))
    parser.add_argument("--version", help="the version that DIR holds, for example 0.23.0")
    parser.add_argument("--write", action="store_true", help="store the source fingerprints")
    parser.add_argument("--store", type=Path, default=STORE_FILE, help="default: the package's own")


def run(arguments: argparse.Namespace) -> int:
    sources = arguments.sources
    given = [sources, arguments.distribution, arguments.version]
    problem = ""
    if any(given) and not all(given):
        problem = "--sources, --distribution and --version go together."
    elif sources is not None and not sources.is_dir():
        problem = (
            f"--sources: expected a folder, found none at {sources}. Name a site-packages folder "
            "or an unpacked wheel."
        )
    if problem:
        print(problem, file=sys.stderr)
        return 2
    trees = [SourceTree(*given)] if all(given) else installed_trees()
    if not trees:
        print("None of vLLM, vLLM-Ascend and LMCache is installed.", file=sys.stderr)
        return 1
    store = FingerprintStore.load(arguments.store)
    differences: list[str] = []
    for tree in trees:
        found, missing = read(tree)
        if arguments.write:
            if not found and not missing:
                differences.append(f"{tree}: nothing to store: no patch names it")
            if tree.distribution != VLLM_ASCEND:
                differences += [f"{tree}: {reason}" for reason in missing]
            store = store.replacing(tree.distribution, tree.version, found)
        elif store.has_release(tree.distribution, tree.version):
            differences += compare(tree, found, store)
        else:
            differences += survey(tree, store)
    for difference in differences:
        print(difference)
    if arguments.write and not differences:
        store.save(arguments.store)
        print(f"Stored {', '.join(map(str, trees))} in {arguments.store}.")
    elif not differences:
        print(f"As stored: {', '.join(map(str, trees))}.")
    return 1 if differences else 0


@dataclass(frozen=True, slots=True)
class SourceTree:
    """Sources of one distribution: the folder that holds its top-level package."""

    root: Path
    distribution: str
    version: str

    def __str__(self) -> str:
        return f"{self.distribution} {self.version}"


def installed_trees() -> list[SourceTree]:
    """What imports of ``vllm``, ``vllm_ascend`` and ``lmcache`` would find."""
    upstream = compat.detect(os.environ)
    trees = []
    for package, distribution, version in (
        ("vllm", VLLM, upstream.vllm),
        ("vllm_ascend", VLLM_ASCEND, upstream.vllm_ascend),
        ("lmcache", LMCACHE, compat.installed_version("lmcache", distributions=(LMCACHE,))),
    ):
        folder = compat.package_folder(package)
        if folder is not None and version is not None:
            trees.append(SourceTree(folder.parent, distribution, version))
    return trees


def functions_of_interest(distribution: str, version: str | None) -> list[str]:
    """The functions of a distribution that patches change or count on, in any version if None."""
    if distribution == LMCACHE:
        return sorted({name for patch in PATCHES for name in patch.lmcache})
    names: set[str] = set()
    for patch in PATCHES:
        if distribution == VLLM_ASCEND:
            names.update(patch.ascend)
        is_its_own = patch.is_for_vllm_ascend == (distribution == VLLM_ASCEND)
        # Releases of vLLM-Ascend carry the number of the vLLM they are made for.
        if is_its_own and (
            version is None or any(compat.version_in(version, each) for each in patch.vllm)
        ):
            names.update(patch.fingerprinted)
    return sorted(names)


def read(tree: SourceTree) -> tuple[dict[str, str], list[str]]:
    """The fingerprints of a source tree, and why some cannot be had."""
    found: dict[str, str] = {}
    missing: list[str] = []
    for name in functions_of_interest(tree.distribution, tree.version):
        try:
            found[name] = fingerprint_source(tree.root, name)
        except FingerprintError as error:
            missing.append(f"{name}: {error}")
    return found, missing


def compare(tree: SourceTree, found: dict[str, str], store: FingerprintStore) -> list[str]:
    """What differs from the store, one line each."""
    differences = []
    for name in functions_of_interest(tree.distribution, tree.version):
        expected = store.expected(tree.distribution, tree.version, name)
        # A function of vLLM-Ascend may be absent from some of its versions, then and today.
        if name not in found and not expected and tree.distribution == VLLM_ASCEND:
            continue
        if found.get(name) not in expected:
            wanted = " or ".join(sorted(expected)) or "nothing"
            differences.append(
                f"{tree}: {name}: stored {wanted}, found {found.get(name, 'nothing')}"
            )
    return differences


def survey(tree: SourceTree, store: FingerprintStore) -> list[str]:
    """A table of all functions that count in any version, compared with each stored version."""
    stored = store.distributions.get(tree.distribution, {})
    rows: list[tuple[int, str, str, str]] = []
    for name in functions_of_interest(tree.distribution, None):
        versions = [each for each in store.versions(tree.distribution) if name in stored[each]]
        try:
            found = fingerprint_source(tree.root, name)
        except FingerprintError:
            order, what = 0, "absent"
        else:
            if same := [each for each in versions if stored[each][name] == found]:
                order, what = 3, f"as in {', '.join(same)}"
            elif versions:
                order, what = 1, f"differs from {', '.join(versions)}"
            else:
                order, what = 2, "not stored"
        counting = (
            each for each in PATCHES if name in each.fingerprinted + each.ascend + each.lmcache
        )
        rows.append((order, what, name, ", ".join(patch.id for patch in counting)))
    rows.sort()
    counts = Counter(what for _, what, _, _ in rows)
    heading = "; ".join(f"{what}: {count}" for what, count in counts.items())
    return [
        f"{tree} is not stored. Functions that patches count on: {heading or 'none'}.",
        *render_rows([row[1:] for row in rows]),
    ]
