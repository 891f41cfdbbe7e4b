# SPDX-License-Identifier: Apache-2.0
"""Models that were checked are remembered on disk."""

from __future__ import annotations

import os
from dataclasses import replace
from pathlib import Path

import pytest

from vllm_ascend_kvext.blending.gate_records import (
    GateRecord,
    all_records,
    files_of_model,
    read_record,
    record_key,
    write_record,
)

RECORD = GateRecord("some/model", True, "they differ by 0", "2026-01-02T03:04:05+00:00")
KEY = record_key({"model": "some/model"})


def path_of(root: Path, key: str = KEY) -> Path:
    return root / "kvext" / "model_checks" / f"{key}.json"


def test_what_is_written_is_read(tmp_path: Path) -> None:
    assert read_record(str(tmp_path), KEY) is None
    write_record(str(tmp_path), KEY, RECORD)
    assert read_record(str(tmp_path), KEY) == RECORD
    assert os.listdir(path_of(tmp_path).parent) == [f"{KEY}.json"]


def test_a_later_record_takes_the_place_of_an_earlier_one(tmp_path: Path) -> None:
    failed = replace(RECORD, passed=False)
    write_record(str(tmp_path), KEY, RECORD)
    write_record(str(tmp_path), KEY, failed)
    assert all_records(str(tmp_path)) == [failed]


@pytest.mark.parametrize(
    "text",
    [
        "",
        "{",
        "[]",
        "{}",
        '{"model": "m", "passed": "yes", "message": "", "checked_at": ""}',
        '{"model": 1, "passed": true, "message": "", "checked_at": ""}',
        '{"model": "m", "passed": true, "message": "", "checked_at": "", "more": 1}',
        b"\xff\xfe".decode("latin-1"),
    ],
)
def test_what_cannot_be_read_is_as_good_as_nothing(tmp_path: Path, text: str) -> None:
    path_of(tmp_path).parent.mkdir(parents=True)
    path_of(tmp_path).write_bytes(text.encode("latin-1"))
    assert read_record(str(tmp_path), KEY) is None
    assert all_records(str(tmp_path)) == []


def test_the_latest_comes_first(tmp_path: Path) -> None:
    later = replace(RECORD, checked_at="2026-02-02T03:04:05+00:00")
    write_record(str(tmp_path), record_key({"model": "1"}), RECORD)
    write_record(str(tmp_path), record_key({"model": "2"}), later)
    assert all_records(str(tmp_path)) == [later, RECORD]


def test_keys_depend_on_all_facts_and_not_on_their_order() -> None:
    assert record_key({"a": 1, "b": (2, 3)}) == record_key({"b": [2, 3], "a": 1})
    assert record_key({"a": 1}) != record_key({"a": 2})


def test_weights_that_change_are_seen(tmp_path: Path) -> None:
    (tmp_path / "model.safetensors").write_bytes(b"1234")
    (tmp_path / "README.md").write_text("no weights")
    before = files_of_model(str(tmp_path))
    assert [file[0] for file in before] == ["model.safetensors"]
    os.utime(tmp_path / "model.safetensors", ns=(1, 1))
    assert files_of_model(str(tmp_path)) != before


def test_code_that_changes_is_seen(tmp_path: Path) -> None:
    (tmp_path / "modeling_mine.py").write_text("")
    assert [file[0] for file in files_of_model(str(tmp_path))] == ["modeling_mine.py"]


def test_a_user_without_a_home_has_records(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """vLLM expands the folder, and leaves it as it is where there is no home."""

    def fail(path: Path) -> Path:
        raise RuntimeError("Could not determine home directory.")

    monkeypatch.setattr(Path, "expanduser", fail)
    monkeypatch.chdir(tmp_path)
    write_record("~/.cache/vllm", KEY, RECORD)
    assert all_records("~/.cache/vllm") == [read_record("~/.cache/vllm", KEY)] == [RECORD]


def test_a_name_has_no_files() -> None:
    assert files_of_model("some/model") == []
