# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vllm-ascend-kvext project
"""What a release and a stranger need: versions that agree, license lines, workflows that exist."""

from __future__ import annotations

import importlib
import re
from pathlib import Path
from types import ModuleType

import pytest

from vllm_ascend_kvext.errors import DOCS_URL

CHECKOUT = Path(__file__).parents[2]
CHANGELOG = "# Changelog\n\n## [0.1.0] - 2026-12-01\n"
PYPROJECT = '[project]\nname = "x"\nversion = "0.1.0"\n'


@pytest.fixture
def release_version(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    monkeypatch.syspath_prepend(CHECKOUT / "tools")
    return importlib.import_module("release_version")


@pytest.fixture
def license_lines(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    monkeypatch.syspath_prepend(CHECKOUT / "tools")
    return importlib.import_module("license_lines")


@pytest.fixture
def wheels(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    monkeypatch.syspath_prepend(CHECKOUT / "tools")
    wheels = importlib.import_module("wheels")
    found = {"3.11": "/usr/bin/python3.11", "3.12": None}
    monkeypatch.setattr(wheels, "interpreter", found.get)
    return wheels


def test_wheels_of_a_release_are_made_for_every_python_or_not_at_all(wheels: ModuleType) -> None:
    assert wheels.interpreters(["3.11", "3.12"], needs_all=False) == {"3.11": "/usr/bin/python3.11"}
    with pytest.raises(SystemExit, match=r"python3\.12"):
        wheels.interpreters(["3.11", "3.12"], needs_all=True)
    with pytest.raises(SystemExit, match=r"python3\.12"):
        wheels.interpreters(["3.12"], needs_all=False)
    workflow = (CHECKOUT / ".github" / "workflows" / "release.yml").read_text("utf-8")
    assert "make wheels WHEELS=--all" in workflow


def test_only_archives_give_way_to_new_ones(wheels: ModuleType, tmp_path: Path) -> None:
    for name in ("x.whl", "x.tar.gz", "notes.txt"):
        (tmp_path / name).touch()
    assert [path.name for path in wheels.archives(tmp_path)] == ["x.tar.gz", "x.whl"]


def test_archives_that_differ_when_built_again_are_named(
    wheels: ModuleType, tmp_path: Path
) -> None:
    first, second = tmp_path / "first", tmp_path / "second"
    for folder in (first, second):
        folder.mkdir()
        (folder / "same.whl").write_bytes(b"same")
        (folder / "notes.txt").write_text(folder.name)
    wheels.check_equal(first, second)
    (first / "x.tar.gz").write_bytes(b"1")
    with pytest.raises(SystemExit, match=r"others in x\.tar\.gz:"):
        wheels.check_equal(first, second)
    (second / "x.tar.gz").write_bytes(b"2")
    with pytest.raises(SystemExit, match=r"others in x\.tar\.gz:"):
        wheels.check_equal(first, second)


def test_a_tag_that_names_the_version_is_released(release_version: ModuleType) -> None:
    release_version.check("v0.1.0", PYPROJECT, CHANGELOG)


@pytest.mark.parametrize(
    ("tag", "pyproject", "changelog", "message"),
    [
        ("0.1.0", PYPROJECT, CHANGELOG, "expected the tag v0.1.0"),
        ("v0.2.0", PYPROJECT, CHANGELOG, "expected the tag v0.1.0"),
        ("v0.1.0", "", CHANGELOG, "found 0"),
        ("v0.1.0", PYPROJECT * 2, CHANGELOG, "found 2"),
        ("v0.1.0", PYPROJECT, "## [Unreleased]\n", "expected a heading"),
        ("v0.1.0", PYPROJECT, "## [0.1.0]\n", "expected a heading"),
        ("v0.1.0", PYPROJECT, "## [0.1.01] - 2026-12-01\n", "expected a heading"),
    ],
)
def test_a_tag_that_names_another_version_is_refused(
    release_version: ModuleType, tag: str, pyproject: str, changelog: str, message: str
) -> None:
    with pytest.raises(ValueError, match=re.escape(message)):
        release_version.check(tag, pyproject, changelog)


def test_the_metadata_has_one_version(release_version: ModuleType) -> None:
    text = (CHECKOUT / "pyproject.toml").read_text("utf-8")
    assert re.fullmatch(r"\d+\.\d+\.\d+", release_version.version_of(text))


def test_every_source_file_has_its_license_lines(license_lines: ModuleType) -> None:
    files = list(license_lines.source_files())
    assert len(files) > 500
    lacking = [
        path
        for path in files
        if (text := path.read_text("utf-8"))
        != license_lines.with_lines(text, license_lines.MARKS[path.suffix])
    ]
    assert not lacking, "run `python tools/license_lines.py --write`"


def test_a_file_of_another_kind_is_refused(
    license_lines: ModuleType, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit):
        license_lines.main(["docs/repairs.md"])
    assert "docs/repairs.md: expected a suffix out of .py," in capsys.readouterr().err


def test_lines_are_written_once_and_behind_the_interpreter(license_lines: ModuleType) -> None:
    text = "#!/usr/bin/env python\nprint()\n"
    once = license_lines.with_lines(text, "#")
    assert once.splitlines()[0] == "#!/usr/bin/env python"
    assert license_lines.with_lines(once, "#") == once
    assert once.endswith("\nprint()\n")


def test_workflows_run_targets_and_programs_that_exist() -> None:
    makefile = (CHECKOUT / "Makefile").read_text("utf-8")
    targets = set(re.findall(r"^([a-z-]+):", makefile, re.MULTILINE))
    workflows = sorted((CHECKOUT / ".github" / "workflows").glob("*.yml"))
    assert len(workflows) == 2
    for path in workflows:
        text = path.read_text("utf-8")
        asked = set(re.findall(r"run: make ([a-z-]+)", text))
        assert asked and asked <= targets, path.name
        for program in re.findall(r"python (tools/\S+\.py)", text):
            assert (CHECKOUT / program).is_file()


def test_actions_are_pinned_to_commits() -> None:
    for path in (CHECKOUT / ".github" / "workflows").glob("*.yml"):
        for action in re.findall(r"uses: (\S+)", path.read_text("utf-8")):
            assert action.startswith("./") or re.search(r"@[0-9a-f]{40}$", action), action


def test_the_picture_shows_what_the_pages_print(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(CHECKOUT / "tools")
    draw_hits = importlib.import_module("draw_hits")
    assert draw_hits.picture() == draw_hits.PICTURE.read_text("utf-8"), (
        "run `python tools/draw_hits.py`"
    )
    assert "docs/pictures/hits.svg" in (CHECKOUT / "README.md").read_text("utf-8")


def test_the_first_screen_has_the_numbers_that_the_pages_print(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.syspath_prepend(CHECKOUT / "tools")
    draw_hits = importlib.import_module("draw_hits")
    readme, retention, offload = (
        (CHECKOUT / name).read_text("utf-8")
        for name in ("README.md", "docs/retention.md", "docs/offload.md")
    )
    printed = [
        [float(number) for number in re.findall(r"(\d+\.\d+) %", line)]
        for line in readme.splitlines()
        if line.startswith("| ")
    ]
    chats, agents = draw_hits.device_hits(retention)
    host = draw_hits.host_hits(offload)[0]
    assert host.label == "chat, Gemma-3"
    assert [numbers for numbers in printed if numbers] == [
        [chats.ours, chats.other, agents.ours, agents.other],
        [host.ours, host.other, host.bound],
    ]


def code_blocks(page: str) -> list[str]:
    """The fenced blocks of a page, without what follows a ``#``."""
    blocks = re.findall(r"^```\n(.*?)^```$", page, re.MULTILINE | re.DOTALL)
    return [re.sub(r"\s+#.*", "", block) for block in blocks]


def table_facts(page: str) -> list[list[str]]:
    """The numbers, the code and the links of each row of a page's tables."""
    rows = [line for line in page.splitlines() if line.startswith("| ") and "---" not in line]
    return [
        re.findall(r"`[^`]+`|\]\([^)]+\)|\d+(?:[.,]\d+)*(?:rc\d|\.post\d)?", row) for row in rows
    ]


def test_the_chinese_readme_has_the_commands_versions_and_numbers_of_the_english_one() -> None:
    english, chinese = (
        (CHECKOUT / name).read_text("utf-8") for name in ("README.md", "README.zh.md")
    )
    assert code_blocks(chinese) == code_blocks(english)
    facts = table_facts(chinese)
    assert len(facts) >= 14
    assert facts == table_facts(english)[: len(facts)]
    assert set(re.findall(r"`([^`\n]+)`", chinese)) <= set(re.findall(r"`([^`\n]+)`", english))


def test_pages_that_messages_name_are_urls_of_this_repository() -> None:
    """A user of a wheel has no folder ``docs``."""
    named = []
    for path in sorted((CHECKOUT / "vllm_ascend_kvext").rglob("*.py")):
        text = path.read_text()
        named += re.findall(r"\{DOCS_URL\}([\w.]+\.md)", text)
        # Docstrings and comments are for readers of the checkout.
        code = re.sub(r'""".*?"""|#[^\n]*', "", text, flags=re.DOTALL)
        assert not re.search(r"docs/\w+\.md", code), path
    assert len(named) >= 9
    assert all((CHECKOUT / "docs" / name).is_file() for name in named)
    homepage = re.search(r'^Homepage = "(.+)"$', (CHECKOUT / "pyproject.toml").read_text(), re.M)
    assert homepage is not None and f"{homepage[1]}/blob/main/docs/" == DOCS_URL
