# SPDX-License-Identifier: Apache-2.0
"""The reader of Mooncake's trace format."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from retention.mooncake import TraceFormatError, parse_mooncake, read_mooncake


def record(timestamp: int, input_length: int, hash_ids: list[int], output_length: int = 5) -> str:
    return json.dumps(
        {
            "timestamp": timestamp,
            "input_length": input_length,
            "output_length": output_length,
            "hash_ids": hash_ids,
        }
    )


LINES = [
    record(27000, 1000, [0, 1]),
    record(28000, 1536, [0, 1, 2]),
    record(28000, 1100, [0, 7, 2], output_length=0),
]


def test_equal_ids_after_equal_ids_are_equal_text():
    one, longer, other = (r.prompt.tokens() for r in parse_mooncake(LINES, "lines").requests)
    assert [len(one), len(longer), len(other)] == [1000, 1536, 1100]
    assert longer[:1000] == one
    assert other[:512] == one[:512]
    assert other[512:1000] != one[512:]
    assert other[1024:1100] != longer[1024:1100]


def test_time_starts_with_the_first_request():
    requests = parse_mooncake(LINES, "lines").requests
    assert [request.delay_steps for request in requests] == [0, 20, 20]
    assert all(request.after is None for request in requests)


def test_every_answer_has_a_token():
    requests = parse_mooncake(LINES, "lines").requests
    assert [request.num_output_tokens for request in requests] == [5, 5, 1]


def test_reads_a_file_up_to_a_limit(tmp_path: Path):
    path = tmp_path / "trace.jsonl"
    path.write_text("\n".join([LINES[0], "", *LINES[1:], "not reached"]))
    assert len(read_mooncake(path, limit=2).requests) == 2


@pytest.mark.parametrize(
    "line, complaint",
    [
        ("{", "expected an object"),
        ("[1, 2]", "expected an object"),
        (json.dumps({"timestamp": 1, "input_length": 5}), "'output_length'"),
        (record(0, 1025, [1, 2]), "found 2 for 1025 tokens"),
        (record(0, 0, []), "found 0 for 0 tokens"),
        (record(0, 512, [1]).replace("[1]", '["x"]'), "expected an object"),
    ],
)
def test_says_where_a_line_is_wrong(line: str, complaint: str):
    with pytest.raises(TraceFormatError, match=r"trace.jsonl, line 2: ") as caught:
        parse_mooncake([LINES[0], line], "trace.jsonl")
    assert complaint in str(caught.value)


def test_an_empty_file_is_no_trace():
    with pytest.raises(TraceFormatError, match="found none"):
        parse_mooncake([], "trace.jsonl")
