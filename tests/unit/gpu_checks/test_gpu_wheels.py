# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vllm-ascend-kvext project
"""Wheels that travel in parts: what is joined is what was cut, or it is refused."""

from __future__ import annotations

import random
import zipfile
from pathlib import Path

import pytest
from gpu import wheels

METADATA = """Metadata-Version: 2.1
Name: some
Version: 1
Requires-Dist: plain>=2
Requires-Dist: of-windows; sys_platform == "win32"
Requires-Dist: of-new-python; python_version >= "3.12"
Requires-Dist: of-extra[more]; extra == "server"
"""


@pytest.fixture
def made(tmp_path: Path) -> list[Path]:
    """Files whose sizes are below, at and above those of parts."""
    rng = random.Random(0)
    found = []
    for number, num_bytes in enumerate((10, 1000, 0, 2500, 500)):
        path = tmp_path / f"wheel{number}-1-py3-none-any.whl"
        path.write_bytes(rng.randbytes(num_bytes))
        found.append(path)
    return found


@pytest.mark.parametrize("max_part_bytes", [131, 333, 1000, 4010, 10_000])
def test_wheels_are_joined_as_they_were_cut(
    made: list[Path], tmp_path: Path, max_part_bytes: int
) -> None:
    manifest = wheels.split(made, tmp_path / "out", max_part_bytes)
    assert len(manifest.parts) == -(-4010 // max_part_bytes)
    assert all(part.num_bytes <= max_part_bytes for part in manifest.parts)
    kept = tmp_path / "kept"
    # The parts may come in any order, and twice.
    folders = sorted((tmp_path / "out").glob("part-*"), reverse=True)
    for number, folder in enumerate([*folders, folders[0]]):
        expected = min(number + 1, len(folders)), len(folders)
        assert wheels.keep(folder, kept) == expected
    joined = wheels.join(kept)
    assert [path.name for path in joined] == [path.name for path in made]
    assert [path.read_bytes() for path in joined] == [path.read_bytes() for path in made]


def test_a_missing_part_is_named(made: list[Path], tmp_path: Path) -> None:
    wheels.split(made, tmp_path / "out", 1000)
    for number in (1, 3, 5):
        wheels.keep(tmp_path / "out" / f"part-{number}", tmp_path / "kept")
    with pytest.raises(SystemExit, match=r"lacks part-2.bin, part-4.bin"):
        wheels.join(tmp_path / "kept")


def test_a_damaged_part_is_refused_when_it_is_kept_and_when_it_is_joined(
    made: list[Path], tmp_path: Path
) -> None:
    wheels.split(made, tmp_path / "out", 4010)
    part = tmp_path / "out" / "part-1" / "part-1.bin"
    content = part.read_bytes()
    part.write_bytes(content[:-1] + bytes([content[-1] ^ 1]))
    with pytest.raises(SystemExit, match="Bring it again"):
        wheels.keep(part.parent, tmp_path / "kept")
    part.write_bytes(content)
    wheels.keep(part.parent, tmp_path / "kept")
    (tmp_path / "kept" / "part-1.bin").write_bytes(content[:-1])
    with pytest.raises(SystemExit, match="Bring it again"):
        wheels.join(tmp_path / "kept")


def test_parts_of_two_sets_are_not_mixed(made: list[Path], tmp_path: Path) -> None:
    wheels.split(made, tmp_path / "out", 2000)
    wheels.keep(tmp_path / "out" / "part-1", tmp_path / "kept")
    wheels.split(made[1:], tmp_path / "out", 2000)
    with pytest.raises(SystemExit, match="another set"):
        wheels.keep(tmp_path / "out" / "part-2", tmp_path / "kept")


def test_only_requirements_of_the_other_machine_apply() -> None:
    assert wheels.applicable(METADATA, frozenset({""})) == ["plain>=2", "of-new-python"]
    with_extra = wheels.applicable(METADATA, frozenset({"", "server"}))
    assert with_extra == ["plain>=2", "of-new-python", "of-extra[more]"]


def test_what_is_lacking_is_fetched_once_and_misfits_are_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    requirements = {
        "top": ["Installed>=2", "lacking", "tilelang==1", "old_one<3"],
        "lacking": ["deeper[x]>=1", "top"],
        "deeper": ["lacking<9"],
    }
    asked = []

    def download(requirement: str, folder: Path) -> Path:
        asked.append(requirement)
        name = requirement.split("=")[0].split("<")[0].split(">")[0]
        path = folder / f"{name}-9.1-py3-none-any.whl"
        with zipfile.ZipFile(path, "w") as file:
            lines = [f"Requires-Dist: {each}" for each in requirements[name]]
            file.writestr(f"{name}-9.1.dist-info/METADATA", "\n".join(["Name: x", *lines]))
        return path

    monkeypatch.setattr(wheels, "download", download)
    installed = wheels.read_installed("installed\n# a comment\nOld.One==3.5  # behind\n")
    assert installed == {"installed": None, "old-one": "3.5"}
    found, notes = wheels.fetch("top==1", installed, tmp_path / "wheels")
    assert [path.name.split("-")[0] for path in found] == ["top", "lacking", "deeper"]
    assert asked == ["top==1", "lacking", "deeper>=1"]
    assert [note.partition(":")[0] for note in notes] == [
        "tilelang==1 of top",
        "old_one<3 of top",
        "top==1",
        "lacking<9",
    ]
