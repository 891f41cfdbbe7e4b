# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vllm-ascend-kvext project
"""Traces that are made of other logs: what they keep, and that they keep no text."""

from __future__ import annotations

import json
import random
from array import array
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from vllm_ascend_kvext.errors import TraceError
from vllm_ascend_kvext.replay.convert import BlockNumbers, KnownRequest, convert_log
from vllm_ascend_kvext.replay.pieces import RequestPieces
from vllm_ascend_kvext.replay.trace import LoggedRequest, read_trace
from vllm_ascend_kvext.replay.vllm_log import read_vllm_log

NOT_A_WORD = "Zanzibar"


def made(folder: Path, *lines: object, block_tokens: int = 4) -> list[LoggedRequest]:
    """The requests of the trace of some JSON lines."""
    source = folder / "log.jsonl"
    source.write_text("\n".join(json.dumps(line) for line in lines) + "\n")
    convert_log(source, folder / "trace.jsonl", None, block_tokens)
    return list(read_trace(folder / "trace.jsonl"))


def asked(timestamp: object, prompt: list[int], answer: list[int] | None = None) -> dict[str, Any]:
    line: dict[str, Any] = {"timestamp": timestamp, "body": {"prompt": prompt, "max_tokens": 7}}
    if answer is not None:
        line["response"] = {"choices": [{"token_ids": answer}]}
    return line


@pytest.mark.parametrize("seed", range(20))
def test_ids_are_equal_exactly_where_all_tokens_before_are(seed: int) -> None:
    rng = random.Random(seed)
    block_tokens = rng.randint(1, 5)
    blocks = BlockNumbers(block_tokens)
    texts = []
    requests = []
    for line in range(12):
        prompt = [rng.randint(0, 1) for _ in range(rng.randint(1, 20))]
        answer = [rng.randint(0, 1) for _ in range(rng.randint(0, 8))]
        known = KnownRequest(0.0, prompt, 3, answer)
        requests.append(blocks.of_request(line, known, 0.0))
        texts.append(prompt + answer)
    pieces = [RequestPieces(request) for request in requests]
    for one in range(12):
        assert requests[one].output_tokens == (len(texts[one]) - requests[one].prompt_tokens or 3)
        for other in range(one):
            for end in range(block_tokens, min(map(len, (texts[one], texts[other]))), block_tokens):
                hashes = [pieces[each].block_hashes(block_tokens) for each in (one, other)]
                block = end // block_tokens - 1
                is_equal = texts[one][:end] == texts[other][:end]
                assert (hashes[0][block] == hashes[1][block]) is is_equal


def test_json_lines_are_sorted_and_keep_answers(tmp_path: Path) -> None:
    lines = [asked(900, [1, 2, 3, 4, 5]), asked(400, [1, 2, 3, 4, 9], [7, 7, 7, 7])]
    first, second = made(tmp_path, *lines)
    assert (first.arrival_ms, second.arrival_ms) == (0.0, 500.0)
    assert (first.prompt_tokens, first.output_tokens, second.output_tokens) == (5, 4, 7)
    # The first block is shared. The second block of the answer has the answer's last token.
    assert first.prompt_ids[0] == second.prompt_ids[0]
    assert len(first.output_ids) == 2 and not second.output_ids


@pytest.mark.parametrize(
    ("line", "arrival_ms"),
    [
        (asked("1970-01-01T00:00:02.5Z", [1]), 2500.0),
        (asked("1970-01-01T01:00:02.5+01:00", [1]), 2500.0),
        (asked("1970-01-01T00:00:02.5", [1]), 2500.0),
        ({"prompt": [1], "response": {"body": {"created": 2.5, "choices": []}}}, 2500.0),
        ({"request": {"prompt": [1]}, "timestamp": 2500}, 2500.0),
    ],
)
def test_times_and_places_of_requests(
    line: dict[str, Any], arrival_ms: float, tmp_path: Path
) -> None:
    _, found = made(tmp_path, asked(0, [1]), line)
    assert found.arrival_ms == arrival_ms


@pytest.mark.parametrize(
    ("fields", "output_tokens"),
    [
        ({"max_tokens": 9}, 9),
        ({"max_completion_tokens": 8, "max_tokens": 9}, 8),
        ({"response": {"usage": {"completion_tokens": 5}}, "max_tokens": 9}, 5),
        ({}, 16),
    ],
)
def test_the_length_of_an_answer_that_is_not_known(
    fields: dict[str, Any], output_tokens: int, tmp_path: Path
) -> None:
    (found,) = made(tmp_path, {"timestamp": 0, "prompt": [1], **fields})
    assert found.output_tokens == output_tokens and not found.output_ids


@pytest.mark.parametrize("field", ["model", "cache_salt"])
def test_prompts_of_other_models_and_salts_share_nothing(field: str, tmp_path: Path) -> None:
    base = {"timestamp": 0, "prompt": [1, 2, 3, 4]}
    one, other, same = made(tmp_path, base | {field: "a"}, base | {field: "b"}, base | {field: "a"})
    assert list(one.prompt_ids) == list(same.prompt_ids) != list(other.prompt_ids)


class Words:
    """A tokenizer whose tokens are the lengths of words."""

    @classmethod
    def from_pretrained(cls, name: str) -> Words:
        if name != "words":
            raise OSError(f"no {name}")
        return cls()

    def encode(self, text: str, add_special_tokens: bool = True) -> list[int]:
        return [1] * add_special_tokens + [len(word) for word in text.split()]

    def apply_chat_template(self, messages: list[Any], **named: Any) -> str:
        assert named["add_generation_prompt"] and not named["tokenize"]
        return " ".join(each["content"] for each in messages) + (" tool" if named["tools"] else "")


@pytest.fixture
def words(monkeypatch: pytest.MonkeyPatch) -> None:
    import sys
    import types

    module = types.ModuleType("transformers")
    module.AutoTokenizer = Words  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "transformers", module)


def test_texts_are_tokens_of_the_tokenizer_and_are_not_written(words: None, tmp_path: Path) -> None:
    chat = {"messages": [{"role": "user", "content": f"{NOT_A_WORD} a bc"}], "tools": [{}]}
    answer = {"choices": [{"message": {"content": f"x {NOT_A_WORD}"}}]}
    source = tmp_path / "log.jsonl"
    lines = [{"timestamp": 0, "body": chat, "response": answer}, {"timestamp": 1, "prompt": "a b"}]
    source.write_text("\n".join(map(json.dumps, lines)))
    converted = convert_log(source, tmp_path / "trace", "words", 4)
    first, second = read_trace(tmp_path / "trace")
    assert (first.prompt_tokens, first.output_tokens, second.prompt_tokens) == (4, 2, 3)
    assert (converted.num_requests, converted.num_answers) == (2, 1)
    written = (tmp_path / "trace").read_text()
    assert not {character for character in written if character.isalpha()} - set(
        "timestampinput_lengthoutput_lengthhash_idsoutput_hash_idsblock_size"
    )


@pytest.mark.parametrize(
    ("line", "expected"),
    [
        ("{broken", "expected a JSON object"),
        ({"timestamp": 0}, "expected messages, or a prompt"),
        ({"timestamp": 0, "prompt": ["a", "b"]}, "expected messages, or a prompt"),
        ({"timestamp": 0, "prompt": []}, "expected a prompt with tokens"),
        ({"timestamp": 0, "prompt": "text"}, "Give --tokenizer"),
        ({"timestamp": 0, "messages": []}, "Give --tokenizer"),
        ({"prompt": [1]}, "timestamp: expected milliseconds or a time, found null"),
        ({"timestamp": "noon", "prompt": [1]}, "timestamp: expected milliseconds, or a time as"),
    ],
)
def test_a_wrong_line_is_named_with_what_to_do(line: object, expected: str, tmp_path: Path) -> None:
    source = tmp_path / "log.jsonl"
    texts = [json.dumps(asked(0, [1])), line if isinstance(line, str) else json.dumps(line)]
    source.write_text("\n".join(texts))
    with pytest.raises(TraceError) as raised:
        convert_log(source, tmp_path / "trace", None, 4)
    assert str(raised.value).startswith(f"{source}, line 2: ") and expected in str(raised.value)


def test_a_wrong_tokenizer_or_template_is_named(words: None, tmp_path: Path) -> None:
    source = tmp_path / "log.jsonl"
    source.write_text(json.dumps({"timestamp": 0, "messages": [{"role": "user"}]}))
    with pytest.raises(TraceError, match="--tokenizer: expected the folder"):
        convert_log(source, tmp_path / "trace", "absent", 4)
    with pytest.raises(TraceError, match="line 1: expected messages that the tokenizer's chat"):
        convert_log(source, tmp_path / "trace", "words", 4)
    with pytest.raises(TraceError, match="--block-tokens: expected 1 or more, found 0"):
        convert_log(source, tmp_path / "trace", None, 0)


PREFIX = "(APIServer pid=1) DEBUG 12-31 23:59:58 [request_logger.py:53] "
INFO = "(APIServer pid=1) INFO 12-31 23:59:58 [request_logger.py:63] "
LATER = "(APIServer pid=1) INFO 01-01 00:00:03 [request_logger.py:63] "


def details(name: str, tokens: object, prompt: str = "text") -> str:
    return (
        f"{PREFIX}Request {name} details: prompt: {prompt!r}, prompt_token_ids: {tokens}, "
        "prompt_embeds shape: None."
    )


def received(name: str, start: str = INFO, lora: str = "None") -> str:
    params = "SamplingParams(n=1, min_tokens=3, max_tokens=12, logprobs=None, extra_args=None)"
    return f"{start}Received request {name}: params: {params}, lora_request: {lora}."


def test_the_log_of_vllm_is_read(tmp_path: Path) -> None:
    tricky = "a ', prompt_token_ids: [9], prompt_embeds shape: None."
    adapter = "LoRARequest(lora_name='sql', lora_int_id=1)"
    lines = [
        "INFO 12-31 23:59:50 [api_server.py:1] started",
        details("cmpl-1-0", [1, 2, 3], tricky),
        received("cmpl-1-0"),
        f"{INFO}Generated response cmpl-1: output: 'x: [5]', output_token_ids: [4, 5], "
        "finish_reason: length",
        details("chatcmpl-2", [1, 2]),
        received("chatcmpl-2", LATER, adapter),
        f"{PREFIX}Generated response chatcmpl-2 details: output_token_ids: [6]",
        f"{INFO}Generated response chatcmpl-2: output: 'y', finish_reason: stop",
        details("cmpl-3-0", [7]),
        received("cmpl-3-0", LATER),
        f"{INFO}Generated response cmpl-3 (streaming delta): output: 'p', output_token_ids: [4], "
        "finish_reason: None",
        f"{INFO}Generated response cmpl-3 (streaming delta): output: 'q', output_token_ids: [5, 6],"
        " finish_reason: stop",
        details("cmpl-4-0", [8]),
        received("cmpl-4-0", LATER),
        f"{INFO}Generated response cmpl-4 (streaming complete): output: 'r', output_token_ids: "
        "None, finish_reason: streaming_complete",
        received("cmpl-5-0", LATER),
        details("cmpl-6-0", None),
        received("cmpl-6-0", LATER),
    ]
    skipped: Counter[str] = Counter()
    found = read_vllm_log(lines, tmp_path, skipped)
    assert found == [
        (0.0, array("q", [1, 2, 3]), 2, array("q", [4, 5]), ""),
        (5000.0, array("q", [1, 2]), 1, array("q", [6]), "sql"),
        (5000.0, array("q", [7]), 3, array("q", [4, 5, 6]), ""),
        (5000.0, array("q", [8]), 12, array("q"), ""),
    ]
    assert list(skipped.values()) == [2]


def test_a_log_of_vllm_becomes_a_trace(tmp_path: Path) -> None:
    source = tmp_path / "server.log"
    lines = [details("cmpl-1-0", [1, 2, 3]), received("cmpl-1-0"), received("cmpl-2-0")]
    source.write_text("\n".join(lines))
    converted = convert_log(source, tmp_path / "trace", None, 2)
    (request,) = read_trace(tmp_path / "trace")
    assert (request.prompt_tokens, request.output_tokens) == (3, 12)
    assert len(converted.describe(tmp_path)) == 2
    assert "left out: 1" in converted.describe(tmp_path)[1]


@pytest.mark.parametrize(
    ("lines", "expected"),
    [
        (["INFO nothing"], "--enable-log-requests"),
        ([received("cmpl-1-0")], "VLLM_LOGGING_LEVEL=DEBUG"),
        ([], "--enable-log-requests"),
    ],
)
def test_a_log_without_requests_is_named(lines: list[str], expected: str, tmp_path: Path) -> None:
    source = tmp_path / "server.log"
    source.write_text("\n".join(lines))
    with pytest.raises(TraceError, match=expected):
        convert_log(source, tmp_path / "trace", None, 4)
