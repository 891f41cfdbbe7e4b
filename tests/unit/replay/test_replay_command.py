# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vllm-ascend-kvext project
"""``replay`` before it needs vLLM: arguments, logs and models that are refused."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from vllm_ascend_kvext.__main__ import main
from vllm_ascend_kvext.commands.replay import _host_sizes

LINE = {"timestamp": 0, "input_length": 5, "output_length": 2, "hash_ids": [1]}


@pytest.fixture
def log(tmp_path: Path) -> str:
    path = tmp_path / "log.jsonl"
    path.write_text(json.dumps(LINE) + "\n")
    return str(path)


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        ([], "expected --model-config or --groups, found neither"),
        (["--model-config", "m", "--groups", "g"], "found both"),
        (["--groups", "g"], "expected --blocks, found none"),
        (["--groups", "g", "--blocks", "0"], "--blocks: expected a number above 0, found 0"),
        (["--groups", "g", "--blocks", "9", "--requests", "0"], "--requests: expected"),
        (["--groups", "g", "--blocks", "9", "--slow-down", "nan"], "--slow-down: expected"),
        (["--groups", "g", "--blocks", "9", "--host-memory-gib", "-1"], "--host-memory-gib: exp"),
        (["--groups", "g", "--blocks", "9", "--interval", "-1"], "--interval: expected 0 or more"),
        (["--groups", "g", "--blocks", "9", "--connector-options", "[]"], "--connector-options: e"),
        (
            ["--groups", "g", "--blocks", "9", "--connector-options", '{"shared_tier": "x"}'],
            "expected a JSON object without host_memory_gib and shared_tier",
        ),
        (["more", "--groups", "g", "--blocks", "9"], "expected one TRACE, found 2"),
    ],
)
def test_wrong_arguments_are_named(
    arguments: list[str], expected: str, log: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["replay", log, *arguments]) == 1
    assert expected in capsys.readouterr().err


def test_a_wrong_log_is_named_before_anything_takes_time(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "log.jsonl"
    path.write_text(f"{json.dumps(LINE)}\nbroken\n")
    assert main(["replay", str(path), "--groups", "absent", "--blocks", "9"]) == 1
    assert f"{path}, line 2: expected a JSON object" in capsys.readouterr().err
    # What is behind the wanted requests is not read.
    assert main(["replay", str(path), "--groups", "no", "--blocks", "9", "--requests", "1"]) == 1
    assert "--groups: expected a JSON file" in capsys.readouterr().err


GROUP = {"kind": "full", "tokens_per_block": 16, "layers": 2, "bytes_per_token": 8}


@pytest.mark.parametrize(
    ("content", "expected"),
    [
        ([], "expected an object with a list of groups"),
        ({"groups": []}, "expected an object with a list of groups"),
        ({"groups": [7]}, "group 0: expected a kind of full, window, state, found None"),
        ({"groups": [GROUP, GROUP | {"kind": "mla"}]}, "group 1: expected a kind"),
        ({"groups": [GROUP | {"layers": 0}]}, "layers: expected a whole number of 1 or more"),
        ({"groups": [GROUP | {"layers": True}]}, "layers: expected a whole number"),
        ({"groups": [GROUP | {"number": "5"}]}, "number: expected a whole number"),
        ({"groups": [GROUP | {"bytes_per_token": 9}]}, "expected an even number"),
        ({"groups": [GROUP | {"kind": "window"}]}, "window_tokens: expected a whole number"),
        ({"groups": [GROUP | {"kind": "state"}]}, "bytes_per_state: expected a whole number"),
        ({"groups": [GROUP | {"windows": 3}]}, "found windows besides"),
    ],
)
def test_wrong_groups_are_named(
    content: object, expected: str, log: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    groups = tmp_path / "groups.json"
    groups.write_text(json.dumps(content))
    assert main(["replay", log, "--groups", str(groups), "--blocks", "9"]) == 1
    error = capsys.readouterr().err
    assert expected in error and "groups.json" in error


@pytest.mark.parametrize("content", [None, "no JSON", "[]", '{"peft_type": "LORA"}'])
def test_a_folder_without_a_model_is_named(
    content: str | None, log: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    if content is not None:
        (tmp_path / "config.json").write_text(content)
    assert main(["replay", log, "--model-config", str(tmp_path), "--blocks", "9"]) == 1
    assert "--model-config: expected a" in capsys.readouterr().err


def test_convert_writes_a_trace(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    source, target = tmp_path / "in", tmp_path / "out"
    source.write_text(json.dumps({"timestamp": 3, "prompt": [1, 2, 3]}))
    assert main(["replay", "convert", str(source), str(target), "--block-tokens", "2"]) == 0
    assert "1 requests" in capsys.readouterr().out
    assert json.loads(target.read_text())["hash_ids"] == [0, 1]
    assert main(["replay", "convert", str(source)]) == 1
    assert "expected LOG and TRACE, found 1 paths" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("given", "expected"),
    [(None, [2.0, 8.0, 32.0]), ([4.0], [1.0, 4.0, 16.0]), ([9.0, 1.0, 9.0], [1.0, 9.0])],
)
def test_sizes_of_host_memory(given: list[float] | None, expected: list[float]) -> None:
    assert _host_sizes(given, 2 << 30) == expected


def test_other_commands_do_not_import_the_play() -> None:
    script = (
        f"import sys\nsys.path[:] = {sys.path!r}\nfrom vllm_ascend_kvext.__main__ import main\n"
        "main(['ledger'])\nprint([name for name in sys.modules if 'replay' in name])"
    )
    found = subprocess.run(
        [sys.executable, "-I", "-c", script], capture_output=True, text=True, check=True
    )
    assert found.stdout.splitlines()[-1] == "[]"
