# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vllm-ascend-kvext project
"""Compare the source of upstream's functions with the stored source fingerprints, or store them.

A source fingerprint is a hash of a function's syntax tree. A patch is installed only if the
functions that it relies on have the stored fingerprints. The layout fingerprint in the names of
LMCache's objects, and the plan digest in the log, are something else.
The command reads files. Without --sources it reads the installed packages. It imports neither vLLM
nor vLLM-Ascend.
If a release is not stored, the command lists the functions on which patches rely in the newest
stored release. Each is absent, differs from all stored versions, or is the same as in one of them.
With --against, it shows the changed lines, without docstrings. Then it lists the functions that
this package only calls, and the names that the release has lost. Read all of this before you
support the release.
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
from vllm_ascend_kvext.commands import render_rows
from vllm_ascend_kvext.commands.upstream_changes import changed_imports, diff, lost_names
from vllm_ascend_kvext.compat import VLLM, VLLM_ASCEND
from vllm_ascend_kvext.errors import FingerprintError
from vllm_ascend_kvext.patches import PATCHES
from vllm_ascend_kvext.patching.declaration import Patch
from vllm_ascend_kvext.patching.fingerprint import fingerprint_source
from vllm_ascend_kvext.patching.store import STORE_FILE, FingerprintStore


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--sources",
        type=Path,
        metavar="DIR",
        help="a site-packages folder or an unpacked wheel; needs --distribution and --version",
    )
    parser.add_argument("--distribution", choices=(VLLM, VLLM_ASCEND))
    parser.add_argument("--version", help="the version that DIR holds, for example 0.23.0")
    parser.add_argument(
        "--against",
        type=Path,
        metavar="DIR",
        help="sources of a stored version: show how the functions differ from it",
    )
    parser.add_argument("--write", action="store_true", help="store the source fingerprints")
    parser.add_argument("--store", type=Path, default=STORE_FILE, help="default: the package's own")


def run(arguments: argparse.Namespace) -> int:
    sources = arguments.sources
    given = [sources, arguments.distribution, arguments.version]
    problem = ""
    if any(given) and not all(given):
        problem = "--sources, --distribution and --version go together."
    for option, folder in (("--sources", sources), ("--against", arguments.against)):
        if folder is not None and not folder.is_dir():
            problem = (
                f"{option}: expected a folder, found none at {folder}. Name a site-packages folder "
                "or an unpacked wheel."
            )
    if problem:
        print(problem, file=sys.stderr)
        return 2
    trees = [SourceTree(*given)] if all(given) else installed_trees()
    if not trees:
        print("Neither vLLM nor vLLM-Ascend is installed.", file=sys.stderr)
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
            differences += survey(tree, store, arguments.against)
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
    """The sources of one distribution.

    Attributes:
        root: The folder that holds its top-level package.
    """

    root: Path
    distribution: str
    version: str

    def __str__(self) -> str:
        return f"{self.distribution} {self.version}"


def installed_trees() -> list[SourceTree]:
    """The source trees that imports of ``vllm`` and ``vllm_ascend`` would find."""
    upstream = compat.detect(os.environ)
    trees = []
    for package, distribution, version in (
        ("vllm", VLLM, upstream.vllm),
        ("vllm_ascend", VLLM_ASCEND, upstream.vllm_ascend),
    ):
        folder = compat.package_folder(package)
        if folder is not None and version is not None:
            trees.append(SourceTree(folder.parent, distribution, version))
    return trees


def functions_of_interest(distribution: str, version: str | None) -> list[str]:
    """The functions that patches of a version change or rely on. None stands for all versions."""
    names: set[str] = set()
    for patch in patches_of(version):
        if distribution == VLLM_ASCEND:
            names.update(patch.ascend)
        if patch.is_for_vllm_ascend == (distribution == VLLM_ASCEND):
            names.update(patch.fingerprinted)
    return sorted(names)


def patches_of(version: str | None) -> list[Patch]:
    """The patches for a version of vLLM, or of vLLM-Ascend. None stands for all versions."""
    # A release of vLLM-Ascend has the number of the vLLM release that it is made for.
    return [
        patch
        for patch in PATCHES
        if version is None or any(compat.version_in(version, each) for each in patch.vllm)
    ]


def read(tree: SourceTree) -> tuple[dict[str, str], list[str]]:
    """The fingerprints in a source tree, and the reason for each function without one."""
    found: dict[str, str] = {}
    missing: list[str] = []
    for name in functions_of_interest(tree.distribution, tree.version):
        try:
            found[name] = fingerprint_source(tree.root, name)
        except FingerprintError as error:
            missing.append(f"{name}: {error}")
    return found, missing


def compare(tree: SourceTree, found: dict[str, str], store: FingerprintStore) -> list[str]:
    """The differences from the store, one line each."""
    differences = []
    for name in functions_of_interest(tree.distribution, tree.version):
        expected = store.expected(tree.distribution, tree.version, name)
        # A function of vLLM-Ascend may be absent both from the stored release and from this one.
        if name not in found and not expected and tree.distribution == VLLM_ASCEND:
            continue
        if found.get(name) not in expected:
            wanted = " or ".join(sorted(expected)) or "nothing"
            differences.append(
                f"{tree}: {name}: stored {wanted}, found {found.get(name, 'nothing')}"
            )
    return differences


def survey(tree: SourceTree, store: FingerprintStore, against: Path | None) -> list[str]:
    """Compare a release that is not stored with the stored releases.

    Returns:
        A table of the functions that patches rely on in the newest stored release. Below it are
        the patches whose functions have not changed. With ``against``, the lines that differ and
        the lost names follow.
    """
    stored = store.distributions.get(tree.distribution, {})
    known_versions = store.versions(tree.distribution)
    newest = known_versions[0] if known_versions else None
    patches = patches_of(newest)
    rows: list[tuple[int, str, str, str]] = []
    diffs: list[str] = []
    unchanged: dict[str, bool] = {}  # By patch id: whether all its functions are unchanged.
    for name in functions_of_interest(tree.distribution, newest):
        versions = [each for each in known_versions if name in stored[each]]
        same: list[str] = []
        try:
            found = fingerprint_source(tree.root, name)
        except FingerprintError:
            order = 0
            what = "absent"
        else:
            if same := [each for each in versions if stored[each][name] == found]:
                order = 3
                what = f"as in {', '.join(same)}"
            elif versions:
                order = 1
                what = f"differs from {', '.join(versions)}"
                diffs += diff(against, tree.root, name) if against is not None else []
            else:
                order, what = 2, "not stored"
        counting = [each.id for each in patches if name in each.fingerprinted + each.ascend]
        for patch_id in counting:
            unchanged[patch_id] = unchanged.get(patch_id, True) and newest in same
        rows.append((order, what, name, ", ".join(counting)))
    rows.sort()
    counts = Counter(what for _, what, _, _ in rows)
    heading = "; ".join(f"{what}: {count}" for what, count in counts.items())
    as_before = ", ".join(sorted(id for id in unchanged if unchanged[id]))
    if against is not None:
        package = tree.distribution.replace("-", "_")
        known = {row[2] for row in rows}
        diffs += changed_imports(against, tree.root, package, known)
        diffs += lost_names(against, tree.root, package)
    return [
        f"{tree} is not stored. Functions that patches count on: {heading or 'none'}.",
        *render_rows([row[1:] for row in rows]),
        f"Patches with nothing to read: {as_before or 'none'}.",
        *diffs,
    ]
