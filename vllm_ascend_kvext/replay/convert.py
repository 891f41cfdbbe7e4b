# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vllm-ascend-kvext project
"""Makes a trace of a log of vLLM, or of JSON lines as clients of OpenAI's interface send them.

A trace has no text and no token. Blocks of equal tokens behind equal blocks get the same number, in
the order in which they first appear. Nothing can be found out from such a number alone.

The module imports nothing of vLLM, and transformers only if a text has to be split into tokens.
"""

from __future__ import annotations

import hashlib
import json
from array import array
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

from vllm_ascend_kvext.errors import DOCS_URL, TraceError
from vllm_ascend_kvext.replay.trace import LoggedRequest, format_request, json_object, opened
from vllm_ascend_kvext.replay.vllm_log import read_vllm_log

_KEY_BYTES = 16
_DEFAULT_OUTPUT_TOKENS = 16
"""What OpenAI's interface generates where a request does not say how much, and no answer is known.
"""

Tokenize = Callable[[Mapping[str, Any]], list[int]]


@dataclass(frozen=True, slots=True)
class KnownRequest:
    """A request of a log, with its tokens.

    Attributes:
        arrival_ms: When it arrived, counted from any time.
        output_tokens: The length of its answer.
        answer: The tokens of its answer; empty if they are not known.
        kind: What its KV depends on besides its tokens: the adapter and the salt.
    """

    arrival_ms: float
    prompt: Sequence[int]
    output_tokens: int
    answer: Sequence[int] = ()
    kind: str = ""


@dataclass(slots=True)
class Converted:
    """What a conversion has done.

    Attributes:
        skipped: The number of requests that were left out, by reason.
    """

    num_requests: int = 0
    num_answers: int = 0
    skipped: Counter[str] = field(default_factory=Counter)

    def describe(self, target: Path) -> list[str]:
        lines = [
            f"{target}: {self.num_requests:,} requests, {self.num_answers:,} with the answer that "
            "was given"
        ]
        return lines + [f"left out: {number:,}, {why}" for why, number in self.skipped.items()]


class BlockNumbers:
    """Numbers the blocks of token sequences.

    Args:
        block_tokens: The tokens of a block.
    """

    def __init__(self, block_tokens: int) -> None:
        self._block_tokens = block_tokens
        self._numbers: dict[bytes, int] = {}

    def of_request(self, line: int, request: KnownRequest, first_ms: float) -> LoggedRequest:
        """The request with numbers in place of its tokens."""
        block_tokens = self._block_tokens
        num_prompt = len(request.prompt)
        tokens = array("q", request.prompt)
        prompt_ids = self._numbers_of(tokens, request.kind)
        output_ids: Sequence[int] = ()
        if request.answer:
            tokens.extend(request.answer)
            output_ids = self._numbers_of(tokens, request.kind)[num_prompt // block_tokens :]
        return LoggedRequest(
            line,
            request.arrival_ms - first_ms,
            num_prompt,
            max(1, len(request.answer) or request.output_tokens),
            prompt_ids,
            output_ids,
            block_tokens,
        )

    def _numbers_of(self, tokens: array[int], kind: str) -> list[int]:
        data = memoryview(tokens).cast("B")
        size = self._block_tokens * tokens.itemsize
        key = kind.encode()
        numbers = []
        for start in range(0, len(data), size):
            hasher = hashlib.blake2b(key, digest_size=_KEY_BYTES)
            hasher.update(data[start : start + size])
            key = hasher.digest()
            numbers.append(self._numbers.setdefault(key, len(self._numbers)))
        return numbers


def convert_log(source: Path, target: Path, tokenizer: str | None, block_tokens: int) -> Converted:
    """Write the trace of a log.

    Args:
        source: The log: vLLM's own, or JSON lines.
        target: The trace to write. An existing file is replaced.
        tokenizer: The folder or the name of the model's tokenizer; None if all tokens are known.
        block_tokens: The tokens of an id.

    Raises:
        TraceError: The log cannot be read, or has no request.
    """
    if block_tokens < 1:
        raise TraceError(f"--block-tokens: expected 1 or more, found {block_tokens}. Leave it out.")
    converted = Converted()
    with opened(source) as lines:
        first = next((line for line in lines if line.strip()), "")
    with opened(source) as lines:
        if first.lstrip().startswith("{"):
            requests = list(_read_json_lines(lines, source, _tokenize_with(tokenizer)))
        else:
            requests = [
                KnownRequest(*each) for each in read_vllm_log(lines, source, converted.skipped)
            ]
    requests.sort(key=lambda request: request.arrival_ms)
    blocks = BlockNumbers(block_tokens)
    with target.open("w", encoding="utf-8") as file:
        for number, request in enumerate(requests, 1):
            logged = blocks.of_request(number, request, requests[0].arrival_ms)
            file.write(f"{format_request(logged)}\n")
            if request.answer:
                converted.num_answers += 1
    converted.num_requests = len(requests)
    return converted


def _read_json_lines(
    lines: Iterable[str], path: Path, tokenize: Tokenize
) -> Iterator[KnownRequest]:
    for number, line in enumerate(lines, 1):
        if line.strip():
            yield _parse(line, f"{path}, line {number}", tokenize)


def _parse(line: str, where: str, tokenize: Tokenize) -> KnownRequest:
    fields = json_object(line)
    if fields is None:
        raise TraceError(
            f"{where}: expected a JSON object with a request, found another text. See "
            f"{DOCS_URL}replay.md for the fields."
        )
    body = _part(fields, "body", "request") or fields
    response = _part(fields, "response")
    response = (_part(response, "body") or response) if response else {}
    arrival_ms = _arrival_ms(fields, response, where)
    prompt = _prompt_tokens(body, where, tokenize)
    answer = _answer_tokens(response, where, tokenize)
    usage = _part(response, "usage") or {}
    limits = (body.get("max_completion_tokens"), body.get("max_tokens"), _DEFAULT_OUTPUT_TOKENS)
    output_tokens = next(
        each for each in (usage.get("completion_tokens"), *limits) if type(each) is int
    )
    kind = f"{body.get('model', '')} {body.get('cache_salt') or ''}"
    return KnownRequest(arrival_ms, prompt, output_tokens, answer, kind)


def _part(fields: Mapping[str, Any], *names: str) -> dict[str, Any] | None:
    """The first of some fields that is an object."""
    return next((fields[name] for name in names if isinstance(fields.get(name), dict)), None)


def _arrival_ms(fields: Mapping[str, Any], response: Mapping[str, Any], where: str) -> float:
    value = fields.get("timestamp")
    if isinstance(value, str):
        try:
            time = datetime.fromisoformat(value.replace("Z", "+00:00"))
        except ValueError:
            raise TraceError(
                f"{where}: timestamp: expected milliseconds, or a time as 2026-01-31T12:00:00.5Z, "
                f"found {value[:40]!r}. Correct the log."
            ) from None
        return 1e3 * (time if time.tzinfo else time.replace(tzinfo=timezone.utc)).timestamp()
    created_s = response.get("created")
    if value is None and isinstance(created_s, (int, float)):
        return 1e3 * float(created_s)
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        raise TraceError(
            f"{where}: timestamp: expected milliseconds or a time, found {json.dumps(value)[:40]}. "
            "Log when a request arrives, or the response with its field created."
        )
    return float(value)


def _prompt_tokens(body: Mapping[str, Any], where: str, tokenize: Tokenize) -> list[int]:
    prompt = body.get("prompt")
    is_tokens = isinstance(prompt, list) and all(type(each) is int for each in prompt)
    if not is_tokens and not isinstance(prompt, str) and not isinstance(body.get("messages"), list):
        raise TraceError(
            f"{where}: expected messages, or a prompt that is one text or one list of tokens, "
            "found neither. Write several prompts as several lines."
        )
    tokens = list(prompt) if is_tokens and prompt is not None else _tokenized(tokenize, body, where)
    if not tokens:
        raise TraceError(f"{where}: expected a prompt with tokens, found none. Leave it out.")
    return tokens


def _answer_tokens(response: Mapping[str, Any], where: str, tokenize: Tokenize) -> list[int]:
    """The tokens of the first choice; none if there is no text, as for calls of tools."""
    choices = response.get("choices")
    choice = choices[0] if isinstance(choices, list) and choices else {}
    if isinstance(choice.get("token_ids"), list):
        return list(choice["token_ids"])
    message = _part(choice, "message") or {}
    text = choice.get("text") or message.get("content")
    if not isinstance(text, str) or not text:
        return []
    return _tokenized(tokenize, {"answer": text}, where)


def _tokenized(tokenize: Tokenize, body: Mapping[str, Any], where: str) -> list[int]:
    try:
        return tokenize(body)
    except TraceError as error:
        raise TraceError(f"{where}: {error}") from error.__cause__


def _tokenize_with(tokenizer: str | None) -> Tokenize:
    """A function that turns a prompt, messages or an answer into tokens."""
    if tokenizer is None:
        return _refuse_text
    from transformers import AutoTokenizer

    try:
        found = AutoTokenizer.from_pretrained(tokenizer)
    except Exception as error:  # Each kind of tokenizer fails in its own way.
        raise TraceError(
            f"--tokenizer: expected the folder or the name of a tokenizer, found: {error}. Name "
            "that of the served model."
        ) from error

    def tokenize(body: Mapping[str, Any]) -> list[int]:
        if "answer" in body:
            return list(found.encode(body["answer"], add_special_tokens=False))
        if isinstance(body.get("prompt"), str):
            return list(found.encode(body["prompt"]))
        try:
            rendered = found.apply_chat_template(
                body["messages"],
                tools=body.get("tools"),
                add_generation_prompt=True,
                tokenize=False,
                **(body.get("chat_template_kwargs") or {}),
            )
        except Exception as error:  # Templates are programs.
            raise TraceError(
                f"expected messages that the tokenizer's chat template takes, found: {error}. "
                "Correct the log, or name the tokenizer of the served model."
            ) from error
        return list(found.encode(rendered, add_special_tokens=False))

    return tokenize


def _refuse_text(_body: Mapping[str, Any]) -> list[int]:
    raise TraceError(
        "expected tokens, found a text. Give --tokenizer with the folder of the served model."
    )
