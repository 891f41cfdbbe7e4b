# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vllm-ascend-kvext project
"""Reads and writes logs of requests, one JSON object a line, in Mooncake's format.

A log says which tokens are equal, and not what they are. An *id* stands for ``block_tokens``
consecutive tokens. Two prompts that begin with the same ids begin with the same tokens. The last id
of a prompt may stand for fewer tokens. docs/replay.md describes the format.

The module imports nothing of vLLM.
"""

from __future__ import annotations

import gzip
import json
from array import array
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any

from vllm_ascend_kvext.errors import DOCS_URL, TraceError

DEFAULT_BLOCK_TOKENS = 512
"""The tokens of an id in a line that does not have the field ``block_size``, as in Mooncake's
published traces."""

_MAX_SHOWN_CHARACTERS = 60

_MAX_ID = (1 << 63) - 1

_ABSENT = object()


@dataclass(frozen=True, slots=True)
class LoggedRequest:
    """One request of a log.

    Attributes:
        line: The number of its line. The first line has the number 1.
        arrival_ms: When the request arrived.
        prompt_tokens: The length of its prompt.
        output_tokens: The length of its answer, at least 1.
        prompt_ids: The ids of the prompt's blocks.
        output_ids: The ids of the blocks of prompt and answer together, from the first block that
            the prompt does not fill. Empty if the log does not know what the answer was.
        block_tokens: The tokens that an id stands for.
    """

    line: int
    arrival_ms: float
    prompt_tokens: int
    output_tokens: int
    prompt_ids: Sequence[int]
    output_ids: Sequence[int] = ()
    block_tokens: int = DEFAULT_BLOCK_TOKENS

    @property
    def num_tokens(self) -> int:
        return self.prompt_tokens + self.output_tokens


@dataclass(frozen=True, slots=True)
class TraceSummary:
    """The facts of a whole log.

    Attributes:
        duration_ms: The time from the first to the last arrival.
        max_tokens: The length of the longest prompt with its answer.
        knows_answers: Whether some request has the ids of its answer.
    """

    num_requests: int
    prompt_tokens: int
    output_tokens: int
    duration_ms: float
    max_tokens: int
    knows_answers: bool


def read_trace(path: Path, max_requests: int | None = None) -> Iterator[LoggedRequest]:
    """The requests of a log in the order of their arrivals. The file is read as they are used.

    Args:
        path: The file. It is unpacked if its name ends with ``.gz``.
        max_requests: The number of requests after which reading ends; None for no limit.

    Raises:
        TraceError: The file cannot be read, or a line is wrong. The message has its number.
    """
    num_requests = 0
    previous_ms = 0.0
    with opened(path) as lines:
        for number, line in enumerate(lines, 1):
            if num_requests == max_requests:
                return
            if not line.strip():
                continue
            where = f"{path}, line {number}"
            request = _parse(line, number, where)
            if request.arrival_ms < previous_ms:
                raise TraceError(
                    f"{where}: expected a timestamp of {previous_ms:g} ms or later, as the line "
                    f"before has, found {request.arrival_ms:g}. Sort the log by timestamp."
                )
            previous_ms = request.arrival_ms
            num_requests += 1
            yield request
    if not num_requests:
        raise TraceError(f"{path}: expected one request a line, found an empty file. {_REMEDY}")


def summarize(requests: Iterable[LoggedRequest]) -> TraceSummary:
    """Read a whole log once.

    Raises:
        TraceError: See `read_trace`.
    """
    num_requests = prompt_tokens = output_tokens = max_tokens = 0
    first_ms = last_ms = 0.0
    knows_answers = False
    for request in requests:
        if not num_requests:
            first_ms = request.arrival_ms
        last_ms = request.arrival_ms
        num_requests += 1
        prompt_tokens += request.prompt_tokens
        output_tokens += request.output_tokens
        max_tokens = max(max_tokens, request.num_tokens)
        knows_answers = knows_answers or bool(request.output_ids)
    return TraceSummary(
        num_requests, prompt_tokens, output_tokens, last_ms - first_ms, max_tokens, knows_answers
    )


def format_request(request: LoggedRequest) -> str:
    """The line of a request, without a line break. `read_trace` reads the same request from it."""
    fields: dict[str, Any] = {
        "timestamp": round(request.arrival_ms, 3),
        "input_length": request.prompt_tokens,
        "output_length": request.output_tokens,
        "hash_ids": list(request.prompt_ids),
    }
    if request.output_ids:
        fields["output_hash_ids"] = list(request.output_ids)
    if request.block_tokens != DEFAULT_BLOCK_TOKENS:
        fields["block_size"] = request.block_tokens
    return json.dumps(fields, separators=(",", ":"))


_REMEDY = f"See {DOCS_URL}replay.md for the format; `replay convert` makes it of other logs."


@contextmanager
def opened(path: Path) -> Iterator[IO[str]]:
    """Open a text file, or a text file that gzip has packed."""
    try:
        opens = gzip.open if path.suffix == ".gz" else open
        with opens(path, "rt", encoding="utf-8") as file:
            yield file
    except (OSError, EOFError, UnicodeDecodeError) as error:
        raise TraceError(
            f"{path}: expected a text file, or one packed by gzip with the suffix .gz, found: "
            f"{error}. Name a log that this user may read."
        ) from error


def json_object(line: str) -> dict[str, Any] | None:
    """The JSON object that a line has; None for another text."""
    try:
        fields = json.loads(line)
    except (ValueError, RecursionError):
        return None
    return fields if isinstance(fields, dict) else None


def _parse(line: str, number: int, where: str) -> LoggedRequest:
    fields = json_object(line)
    if fields is None:
        raise TraceError(f"{where}: expected a JSON object, found {_shown(line)}. {_REMEDY}")
    arrival_ms = _number(fields, "timestamp", where)
    prompt_tokens = _integer(fields, "input_length", where, 1)
    # A request that generates nothing runs as one that generates one token.
    output_tokens = max(1, _integer(fields, "output_length", where, 0))
    block_tokens = _integer(fields, "block_size", where, 1, DEFAULT_BLOCK_TOKENS)
    prompt_ids = _ids(fields, "hash_ids", where)
    num_blocks = -(-prompt_tokens // block_tokens)
    if len(prompt_ids) != num_blocks:
        raise TraceError(
            f"{where}: expected {num_blocks} hash_ids for input_length {prompt_tokens} in blocks "
            f"of {block_tokens} tokens, found {len(prompt_ids)}. If an id stands for another "
            "number of tokens, give it as block_size in every line."
        )
    output_ids = _ids(fields, "output_hash_ids", where) if "output_hash_ids" in fields else ()
    num_output_blocks = (
        -(-(prompt_tokens + output_tokens) // block_tokens) - prompt_tokens // block_tokens
    )
    if output_ids and len(output_ids) != num_output_blocks:
        raise TraceError(
            f"{where}: expected {num_output_blocks} output_hash_ids, for the blocks from token "
            f"{prompt_tokens // block_tokens * block_tokens} to the end of the answer, found "
            f"{len(output_ids)}. Leave output_hash_ids out if the answer is not known."
        )
    return LoggedRequest(
        number, arrival_ms, prompt_tokens, output_tokens, prompt_ids, output_ids, block_tokens
    )


def _number(fields: Mapping[str, Any], name: str, where: str) -> float:
    value = fields.get(name, _ABSENT)
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not 0 <= value < 1e15:
        raise _wrong(where, name, "a number of milliseconds, 0 or more", value)
    return float(value)


def _integer(
    fields: Mapping[str, Any], name: str, where: str, minimum: int, default: int | None = None
) -> int:
    value = fields.get(name, _ABSENT if default is None else default)
    if isinstance(value, bool) or not isinstance(value, int) or value < minimum:
        raise _wrong(where, name, f"a whole number of tokens, {minimum} or more", value)
    return value


def _ids(fields: Mapping[str, Any], name: str, where: str) -> Sequence[int]:
    values = fields.get(name, _ABSENT)
    if not isinstance(values, list):
        raise _wrong(where, name, "a list of whole numbers", values)
    for value in values:
        if type(value) is not int or abs(value) > _MAX_ID:
            raise _wrong(where, name, "whole numbers of less than 64 bits", value)
    return array("q", values)


def _wrong(where: str, name: str, expected: str, found: object) -> TraceError:
    shown = "nothing" if found is _ABSENT else _shown(json.dumps(found))
    return TraceError(f"{where}: {name}: expected {expected}, found {shown}. {_REMEDY}")


def _shown(text: str) -> str:
    text = text.strip()
    is_long = len(text) > _MAX_SHOWN_CHARACTERS
    return f"{text[:_MAX_SHOWN_CHARACTERS]} ..." if is_long else text
