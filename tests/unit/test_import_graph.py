# SPDX-License-Identifier: Apache-2.0
"""Who imports whom: no cycle, and arrows point one way. Read from the sources, nothing is imported.

Imports inside functions count: they hide a cycle, they do not remove it. Those under
``if TYPE_CHECKING`` do not, they are not carried out.
"""

from __future__ import annotations

import ast
from collections.abc import Iterator
from graphlib import CycleError, TopologicalSorter
from pathlib import Path

import pytest

import vllm_ascend_kvext

PACKAGE = "vllm_ascend_kvext"
FOLDERS = [Path(folder) for folder in vllm_ascend_kvext.__path__]
"""Of an installed package one; of a checkout also the one in which ``patches/`` lies."""

ALLOWED = {
    "blending": {
        *("holes", "store", "layout", "groups", "transfer", "errors"),
        "request_arguments",
    },
    "compat": set(),
    "errors": set(),
    "features": {"patching"},
    "groups": {"errors"},
    "holes": {"store", "errors"},
    "layout": {"groups", "errors", "transfer"},
    "native": {"errors"},
    "patching": {"compat", "errors", "settings", "features"},
    "lmcache": {"groups", "errors"},
    "prefix_cache": {"groups"},
    "request_arguments": set(),
    "retention": {"groups", "prefix_cache", "native", "request_arguments"},
    "settings": {"errors", "features"},
    "store": {"layout", "transfer", "groups", "errors"},
    "transfer": {"errors", "settings", "native"},
}
"""What each part of the package may import; parts that are not listed may import all of these."""

NO_VLLM = (
    "blending",
    "groups",
    "holes",
    "layout",
    "lmcache",
    "prefix_cache",
    "request_arguments",
    "retention",
    "store",
    "transfer",
    "settings",
    "features",
)
PATCHES = {
    "upstream": set(),
    "fast_prefix_cache": {"upstream"},
    "metrics": {"upstream"},
    "retention": {"upstream", "fast_prefix_cache", "metrics"},
    "repairs": {"upstream", "retention"},
}
"""The same for the folders of ``patches/``."""


def sources() -> dict[str, Path]:
    """Every module of the package, by its name."""
    found = {}
    for folder in FOLDERS:
        for part in (folder,) if folder.name == PACKAGE else (folder / "patches",):
            for path in part.rglob("*.py"):
                relative = path.relative_to(folder).with_suffix("")
                names = [name for name in relative.parts if name != "__init__"]
                found[".".join([PACKAGE, *names])] = path
    return found


SOURCES = sources()


def imported_names(path: Path) -> Iterator[str]:
    """All that a module imports once it runs, wherever the statement stands."""
    pending: list[ast.AST] = [ast.parse(path.read_text(encoding="utf-8"))]
    while pending:
        node = pending.pop()
        if isinstance(node, ast.If) and "TYPE_CHECKING" in ast.unparse(node.test):
            pending += node.orelse
            continue
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert not node.level, f"{path}: a relative import"
            for alias in node.names:
                name = f"{node.module}.{alias.name}"
                yield name if name in SOURCES else node.module or ""
        pending += ast.iter_child_nodes(node)


GRAPH = {name: set(imported_names(path)) for name, path in SOURCES.items()}


def part_of(name: str, below: str = PACKAGE) -> str | None:
    if not name.startswith(f"{below}."):
        return None
    return name.removeprefix(f"{below}.").partition(".")[0]


def test_the_graph_is_the_package() -> None:
    assert len(SOURCES) > 60
    assert {part_of(name) for name in SOURCES} >= {*ALLOWED, "patches"}
    assert (
        f"{PACKAGE}.patches.upstream" in GRAPH[f"{PACKAGE}.patches.retention.kv_cache_coordinator"]
    )


def test_no_module_imports_itself_through_others() -> None:
    # The root imports nothing but the activation, and that only when vLLM calls it.
    assert GRAPH[PACKAGE] & set(SOURCES) == {f"{PACKAGE}.activation"}
    known = set(SOURCES) - {PACKAGE}
    graph = {name: GRAPH[name] & known for name in known}
    try:
        tuple(TopologicalSorter(graph).static_order())
    except CycleError as error:
        pytest.fail("a cycle: " + " <- ".join(error.args[1]))


@pytest.mark.parametrize("part", ALLOWED)
def test_a_part_imports_only_what_lies_below_it(part: str) -> None:
    for name, found in GRAPH.items():
        if part_of(name) == part:
            others = {part_of(other) for other in found} - {None, part}
            assert others <= ALLOWED[part], name


@pytest.mark.parametrize("feature", PATCHES)
def test_a_feature_of_the_patches_imports_only_what_lies_below_it(feature: str) -> None:
    below = f"{PACKAGE}.patches"
    for name, found in GRAPH.items():
        if part_of(name, below) == feature:
            others = {part_of(other, below) for other in found} - {None, feature}
            assert others <= PATCHES[feature], name


def test_only_entry_points_know_the_patches() -> None:
    knowing = {
        name
        for name, found in GRAPH.items()
        if any(part_of(other) == "patches" for other in found) and part_of(name) != "patches"
    }
    assert {part_of(name) for name in knowing} <= {"activation", "commands"}


@pytest.mark.parametrize("part", NO_VLLM)
def test_what_lies_below_knows_no_vllm(part: str) -> None:
    for name, found in GRAPH.items():
        if part_of(name) == part:
            assert not [o for o in found if o.partition(".")[0] in ("vllm", "vllm_ascend")], name
