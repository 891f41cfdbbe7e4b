# SPDX-License-Identifier: Apache-2.0
"""Compare the source of upstream's functions with the stored source fingerprints, or store them.

A source fingerprint is a hash of a function's syntax tree; a patch is installed only where the
functions that it counts on have the stored ones. It has nothing to do with the layout fingerprint
of stored KV (`vllm_ascend_kvext.layout.fingerprint`), nor with the plan digest in the log.
Reads files; imports none of vLLM, vLLM-Ascend and LMCache. Without --sources it reads what is
installed.
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
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

from vllm_ascend_kvext import compat
from vllm_ascend_kvext.compat import LMCACHE, VLLM, VLLM_ASCEND
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
    parser.add_argument("--distribution", choices=(VLLM, VLLM_ASCEND, LMCACHE))
    parser.add_argument("--version", help="the version that DIR holds, for example 0.23.0")
    parser.add_argument("--write", action="store_true", help="store the source fingerprints")
    parser.add_argument("--store", type=Path, default=STORE_FILE, help="default: the package's own")


def run(arguments: argparse.Namespace) -> int:
    given = [arguments.sources, arguments.distribution, arguments.version]
    if any(given) and not all(given):
        print("--sources, --distribution and --version go together.", file=sys.stderr)
        return 2
    if arguments.sources is not None and not arguments.sources.is_dir():
        print(
            f"--sources: expected a folder, found none at {arguments.sources}. Name a "
            "site-packages folder or an unpacked wheel.",
            file=sys.stderr,
        )
        return 2
    trees = [SourceTree(*given)] if all(given) else installed_trees()
    if not trees:
        print("None of vLLM, vLLM-Ascend and LMCache is installed.", file=sys.stderr)
        return 1
    store = FingerprintStore.load(arguments.store)
    differences: list[str] = []
    for tree in trees:
        found, missing = read(tree, PATCHES)
        if arguments.write:
            if not found and not missing:
                differences.append(f"{tree}: nothing to store: no patch names it")
            if tree.distribution != VLLM_ASCEND:
                differences += [f"{tree}: {reason}" for reason in missing]
            store = store.replacing(tree.distribution, tree.version, found)
        elif store.has_release(tree.distribution, tree.version):
            differences += compare(tree, found, store)
        else:
            differences += survey(tree, PATCHES, store)
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


def functions_of_interest(
    distribution: str, version: str | None, ledger: Iterable[Patch]
) -> tuple[str, ...]:
    """The functions of a distribution that the ledger patches or counts on, sorted.

    Args:
        version: Of the distribution; None for what is counted on in any version.
    """
    if distribution == LMCACHE:
        return tuple(sorted({name for patch in ledger for name in patch.lmcache}))
    names: set[str] = set()
    for patch in ledger:
        if distribution == VLLM_ASCEND:
            names.update(patch.ascend)
        is_its_own = patch.is_for_vllm_ascend == (distribution == VLLM_ASCEND)
        # Releases of vLLM-Ascend carry the number of the vLLM they are made for.
        if is_its_own and (
            version is None or any(compat.version_in(version, each) for each in patch.vllm)
        ):
            names.update(patch.fingerprinted)
    return tuple(sorted(names))


def read(tree: SourceTree, ledger: Iterable[Patch]) -> tuple[dict[str, str], list[str]]:
    """The fingerprints of a source tree, and why some cannot be had."""
    found: dict[str, str] = {}
    missing: list[str] = []
    for name in functions_of_interest(tree.distribution, tree.version, ledger):
        try:
            found[name] = fingerprint_source(tree.root, name)
        except FingerprintError as error:
            missing.append(f"{name}: {error}")
    return found, missing


def compare(tree: SourceTree, found: dict[str, str], store: FingerprintStore) -> list[str]:
    """What differs from the store, one line each."""
    differences = []
    for name in functions_of_interest(tree.distribution, tree.version, PATCHES):
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


def survey(tree: SourceTree, ledger: Iterable[Patch], store: FingerprintStore) -> list[str]:
    """A table of all functions that count in any version, compared with each stored version."""
    ledger = tuple(ledger)
    stored = store.versions(tree.distribution)
    rows: list[tuple[int, str, str, str]] = []
    for name in functions_of_interest(tree.distribution, None, ledger):
        fingerprints = {
            version: store.distributions[tree.distribution][version][name]
            for version in stored
            if name in store.distributions[tree.distribution][version]
        }
        try:
            found = fingerprint_source(tree.root, name)
        except FingerprintError:
            found = None
        same = [version for version, expected in fingerprints.items() if expected == found]
        if found is None:
            order, what = 0, "absent"
        elif same:
            order, what = 3, f"as in {', '.join(same)}"
        elif fingerprints:
            order, what = 1, f"differs from {', '.join(fingerprints)}"
        else:
            order, what = 2, "not stored"
        ids = [
            patch.id
            for patch in ledger
            if name in patch.fingerprinted + patch.ascend + patch.lmcache
        ]
        rows.append((order, what, name, ", ".join(ids)))
    rows.sort()
    what_width = max((len(what) for _, what, _, _ in rows), default=0)
    name_width = max((len(name) for _, _, name, _ in rows), default=0)
    counts = Counter(what for _, what, _, _ in rows)
    heading = "; ".join(f"{what}: {count}" for what, count in counts.items())
    return [
        f"{tree} is not stored. Functions that patches count on: {heading or 'none'}.",
        *(f"{what:{what_width}}  {name:{name_width}}  {ids}" for _, what, name, ids in rows),
    ]
