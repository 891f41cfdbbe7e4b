# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vllm-ascend-kvext project
"""Logs in Mooncake's format: what is read, and what a wrong line is told."""

from __future__ import annotations

import gzip
import json
from pathlib import Path

import pytest

from vllm_ascend_kvext.errors import TraceError
from vllm_ascend_kvext.replay.trace import (
    LoggedRequest,
    format_request,
    read_trace,
    summarize,
)

GOOD = {"timestamp": 5, "input_length": 1030, "output_length": 7, "hash_ids": [3, 4, 9]}


def written(folder: Path, *lines: object) -> Path:
    path = folder / "log.jsonl"
    texts = [line if isinstance(line, str) else json.dumps(line) for line in lines]
    path.write_text("\n".join(texts) + "\n")
    return path


def test_a_line_of_mooncakes_traces_is_one_request(tmp_path: Path) -> None:
    (request,) = read_trace(written(tmp_path, GOOD | {"session_id": "other tools' fields"}))
    assert (request.line, request.arrival_ms, request.block_tokens) == (1, 5.0, 512)
    assert (request.prompt_tokens, request.output_tokens, request.num_tokens) == (1030, 7, 1037)
    assert list(request.prompt_ids) == [3, 4, 9] and list(request.output_ids) == []


def test_empty_lines_are_passed_over_and_counted(tmp_path: Path) -> None:
    requests = list(read_trace(written(tmp_path, GOOD, "", GOOD)))
    assert [request.line for request in requests] == [1, 3]


def test_a_packed_log_is_read(tmp_path: Path) -> None:
    path = tmp_path / "log.jsonl.gz"
    path.write_bytes(gzip.compress(json.dumps(GOOD).encode()))
    assert summarize(read_trace(path)).prompt_tokens == 1030


def test_the_file_is_read_as_requests_are_used(tmp_path: Path) -> None:
    requests = read_trace(written(tmp_path, GOOD, GOOD, "broken"))
    assert [next(requests).line, next(requests).line] == [1, 2]


def test_reading_ends_after_a_number_of_requests(tmp_path: Path) -> None:
    assert len(list(read_trace(written(tmp_path, GOOD, GOOD, "broken"), 2))) == 2


def test_the_facts_of_a_log(tmp_path: Path) -> None:
    longer = {"timestamp": 25, "input_length": 4, "output_length": 0, "hash_ids": [1, 2]}
    longer |= {"block_size": 2, "output_hash_ids": [7]}
    facts = summarize(read_trace(written(tmp_path, GOOD, GOOD, longer)))
    assert (facts.num_requests, facts.prompt_tokens, facts.output_tokens) == (3, 2064, 15)
    assert (facts.duration_ms, facts.max_tokens, facts.knows_answers) == (20.0, 1037, True)


@pytest.mark.parametrize(
    "request_",
    [
        LoggedRequest(1, 0.0, 1, 1, (5,)),
        LoggedRequest(1, 12.5, 33, 7, (1, 2, 3), (8,), 16),
        # The prompt fills its last block, so the ids of the answer begin with a block of its own.
        LoggedRequest(1, 12.5, 32, 17, (1, 2), (8, -9), 16),
    ],
)
def test_what_is_written_is_read(request_: LoggedRequest, tmp_path: Path) -> None:
    (found,) = read_trace(written(tmp_path, format_request(request_)))
    for name in LoggedRequest.__slots__:
        value = getattr(request_, name)
        read = getattr(found, name)
        assert (tuple(read) if isinstance(value, tuple) else read) == value, name


@pytest.mark.parametrize(
    ("line", "expected", "found"),
    [
        ("no JSON", "a JSON object", "no JSON"),
        ("[" * 20_000, "a JSON object", "[[[["),
        ([1], "a JSON object", "[1]"),
        ({}, "timestamp: expected a number of milliseconds", "nothing"),
        (GOOD | {"timestamp": "5"}, "timestamp: expected a number", '"5"'),
        (GOOD | {"timestamp": -1}, "timestamp: expected a number", "-1"),
        (GOOD | {"timestamp": float("nan")}, "timestamp: expected a number", "NaN"),
        (GOOD | {"timestamp": True}, "timestamp: expected a number", "true"),
        (GOOD | {"input_length": 0}, "input_length: expected a whole number", "0"),
        (GOOD | {"input_length": 1.5}, "input_length: expected a whole number", "1.5"),
        (GOOD | {"output_length": -1}, "output_length: expected a whole number", "-1"),
        (GOOD | {"output_length": None}, "output_length: expected a whole number", "null"),
        (GOOD | {"block_size": 0}, "block_size: expected a whole number", "0"),
        (GOOD | {"hash_ids": 5}, "hash_ids: expected a list", "5"),
        (GOOD | {"hash_ids": [1, 2.0, 3]}, "hash_ids: expected whole numbers", "2.0"),
        (GOOD | {"hash_ids": [1, True, 3]}, "hash_ids: expected whole numbers", "true"),
        (GOOD | {"hash_ids": [1, 1 << 63, 3]}, "hash_ids: expected whole numbers", "92233720"),
        (GOOD | {"hash_ids": [1, 2]}, "expected 3 hash_ids for input_length 1030", "found 2"),
        (GOOD | {"block_size": 256}, "expected 5 hash_ids", "found 3"),
        (GOOD | {"output_hash_ids": [1, 2]}, "expected 1 output_hash_ids", "found 2"),
        (GOOD | {"timestamp": 4}, "expected a timestamp of 5 ms or later", "found 4"),
    ],
)
def test_a_wrong_line_is_named_with_what_to_do(
    line: object, expected: str, found: str, tmp_path: Path
) -> None:
    path = written(tmp_path, GOOD, line)
    with pytest.raises(TraceError) as raised:
        list(read_trace(path))
    text = str(raised.value)
    assert text.startswith(f"{path}, line 2: ") and expected in text and found in text
    assert any(word in text for word in ("docs/replay.md", "Sort", "block_size", "Leave"))
    assert len(text) < 450 and "\n" not in text


def test_a_log_that_cannot_be_read_is_named(tmp_path: Path) -> None:
    not_packed = tmp_path / "log.gz"
    not_packed.write_text("{}")
    not_text = tmp_path / "log.bin"
    not_text.write_bytes(b"\xff\xfe\x00")
    cut = tmp_path / "cut.gz"
    cut.write_bytes(gzip.compress(b"{}" * 1000)[:-20])
    empty = written(tmp_path)
    for path in (tmp_path / "absent", tmp_path, not_packed, not_text, cut, empty):
        with pytest.raises(TraceError, match="expected") as raised:
            list(read_trace(path))
        assert str(raised.value).startswith(f"{path}")
