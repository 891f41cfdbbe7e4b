# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vllm-ascend-kvext project
"""The pages for readers: generated pages are up to date, links lead somewhere, and the README is
short.
"""

from __future__ import annotations

import ast
import importlib
import re
from pathlib import Path

import pytest

from vllm_ascend_kvext.connector.common.counters import METRICS
from vllm_ascend_kvext.connector.common.options import OPTIONS
from vllm_ascend_kvext.features import FEATURES, REPAIRS
from vllm_ascend_kvext.patches import PATCHES
from vllm_ascend_kvext.segments.counters import SEGMENT_METRICS
from vllm_ascend_kvext.segments.options import OPTION, SEGMENT_OPTIONS
from vllm_ascend_kvext.settings import HOW_TO_ASK, VARIABLE_NAMES

CHECKOUT = Path(__file__).parents[2]
PAGES = sorted([*CHECKOUT.glob("*.md"), *CHECKOUT.glob("docs/**/*.md")])


def test_the_generated_pages_are_up_to_date_and_name_everything(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.syspath_prepend(CHECKOUT / "tools")
    render_docs = importlib.import_module("render_docs")
    pages = {name: make() for name, make in render_docs.PAGES.items()}
    for name, page in pages.items():
        assert page == (CHECKOUT / "docs" / name).read_text(encoding="utf-8"), (
            f"docs/{name} is not up to date: run `make docs`"
        )
    assert all(f"| {patch.id} |" in pages["patches.md"] for patch in PATCHES)
    settings, _, of_segments = pages["settings.md"].partition(f"\n## Keys of `{OPTION}`\n")
    names = [*VARIABLE_NAMES, *(option.key for option in OPTIONS), OPTION]
    assert re.findall(r"^### `(.+)`$", settings, re.MULTILINE) == names
    keys = [option.key for option in SEGMENT_OPTIONS]
    assert re.findall(r"^### `(.+)`$", of_segments, re.MULTILINE) == keys


def test_the_picture_of_the_rooms_has_the_layers_that_lint_holds_in_their_order() -> None:
    contract = (
        (CHECKOUT / "pyproject.toml").read_text().partition('name = "The rooms of the package')
    )
    (layers,) = re.findall(r"layers = \[(.*?)\]", contract[2].partition("[[")[0], re.DOTALL)
    held = [set(re.findall(r"\w+", layer)) for layer in re.findall(r'"(.*)"', layers)]
    picture = (CHECKOUT / "docs" / "architecture.md").read_text().split("```")[1]
    drawn: list[str] = []
    for names in re.findall(
        r"^ (?:[┌│└] )?(\w+/?(?:, \w+)*)  ", picture.replace("\n", "  \n"), re.MULTILINE
    ):
        drawn += names.replace("/", "").split(", ")
    for rooms in held:
        assert set(drawn[: len(rooms)]) == rooms
        del drawn[: len(rooms)]
    assert not drawn


def test_every_module_that_the_page_of_the_architecture_names_is_there() -> None:
    page = (CHECKOUT / "docs" / "architecture.md").read_text()
    folders = (CHECKOUT, CHECKOUT / "vllm_ascend_kvext")
    for path in re.findall(r"`((?:\w+/)*\w+(?:\.py|/))`", page.replace("`vllm/", "")):
        assert any((folder / path).exists() for folder in folders), path


def test_every_function_that_the_walks_and_the_seam_name_is_defined() -> None:
    _, _, page = (CHECKOUT / "docs" / "architecture.md").read_text().partition("## The seam")
    walks, _, _ = page.partition("## Glossary")
    sources = [*CHECKOUT.glob("vllm_ascend_kvext/**/*.py"), *CHECKOUT.glob("patches/**/*.py")]
    trees = [ast.parse(source.read_text()) for source in sources]
    nodes = [node for tree in trees for node in ast.walk(tree)]
    classes = [node for node in nodes if isinstance(node, ast.ClassDef)]
    members = {
        f"{each.name}.{name}"
        for each in classes
        for member in each.body
        for name in names_of(member)
    }
    known = {each.name for each in nodes if isinstance(each, (ast.ClassDef, ast.FunctionDef))}
    known |= {name.partition(".")[2] for name in members}
    named = re.findall(r"`(\w+(?:\.(?!py`)\w+)?)`", walks)
    assert len(named) > 100
    assert {each for each in named if each not in (members if "." in each else known)} == set()


def names_of(member: ast.stmt) -> list[str]:
    """The names that a statement in the body of a class defines."""
    match member:
        case ast.FunctionDef(name=name) | ast.AnnAssign(target=ast.Name(id=name)):
            return [name]
        case ast.Assign(targets=[ast.Name(id=name)]):
            return [name]
    return []


def test_the_readme_has_at_most_150_lines() -> None:
    assert len((CHECKOUT / "README.md").read_text(encoding="utf-8").splitlines()) <= 150


def test_the_page_of_repairs_names_every_repair() -> None:
    page = (CHECKOUT / "docs" / "repairs.md").read_text(encoding="utf-8")
    assert all(f"| `{repair.name}` |" in page for repair in REPAIRS)


def test_the_reports_for_upstream_are_in_their_index_and_name_every_repair() -> None:
    folder = CHECKOUT / "docs" / "upstream"
    index = (folder / "README.md").read_text(encoding="utf-8")
    rows = re.findall(r"^\| \[[^]]+\]\((\w+)\.md\) \|", index, re.MULTILINE)
    assert sorted(["README", *rows]) == sorted(page.stem for page in folder.glob("*.md"))
    assert [repair.name for repair in REPAIRS if f"`{repair.name}`" not in index] == []


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_every_link_leads_to_a_file_and_every_variable_exists(page: Path) -> None:
    text = page.read_text(encoding="utf-8")
    for link in re.findall(r"\]\(([^)#]+)[^)]*\)", text):
        assert link.startswith("https://") or (page.parent / link).exists(), link
    assert {*re.findall(r"VLLM_ASCEND_KVEXT_[A-Z_]+[A-Z]", text)} <= {*VARIABLE_NAMES}


def test_there_is_a_way_to_ask_for_every_feature_that_is_off() -> None:
    assert set(HOW_TO_ASK) == {feature.name for feature in FEATURES if not feature.default_on}


def test_the_page_of_metrics_names_every_metric_and_label_of_the_connector() -> None:
    page = (CHECKOUT / "docs" / "metrics.md").read_text(encoding="utf-8")
    assert any(metric.name.startswith("blend_") for metric in SEGMENT_METRICS)
    for metric in (*METRICS, *SEGMENT_METRICS):
        suffix = "" if metric.is_gauge else "_total"
        label = f"{{{metric.label}=…}}" if metric.label else ""
        assert f"`vllm:kvext_{metric.name}{suffix}{label}`" in page
        assert all(f"`{value}`" in page for value in metric.label_values), metric.name
