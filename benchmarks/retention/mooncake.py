# SPDX-License-Identifier: Apache-2.0
"""Reads traces in Mooncake's public JSONL format.

One request per line: ``timestamp`` in milliseconds, ``input_length`` and ``output_length`` in
tokens, ``hash_ids``: one id per 512 prompt tokens, the last one for what remains. Equal ids after
equal ids are equal text. Tokens are made up from the ids. Knows nothing of vLLM.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator
from itertools import islice
from pathlib import Path

from retention.texts import Library, Text
from retention.traces import Trace, TracedRequest

UNIT_TOKENS = 512
STEP_MS = 50
"""A scheduler step stands for this much of the trace's time."""


class TraceFormatError(ValueError):
    """A line is not what Mooncake's format says."""


def read_mooncake(path: Path, limit: int | None = None) -> Trace:
    """The trace in a file.

    Args:
        path: A JSONL file.
        limit: Take only so many requests, from the start.

    Raises:
        TraceFormatError: A line cannot be read; says which and why.
        OSError: The file cannot be read.
    """
    with path.open(encoding="utf-8") as lines:
        return parse_mooncake(lines, path.name, limit)


def parse_mooncake(lines: Iterable[str], name: str, limit: int | None = None) -> Trace:
    """See `read_mooncake`.

    Raises:
        TraceFormatError: A line cannot be read, or there is none.
    """
    library = Library(name)
    units: dict[tuple[int, int], Text] = {}
    requests = []
    first_ms: float | None = None
    for timestamp_ms, input_tokens, output_tokens, hash_ids in islice(_records(lines, name), limit):
        first_ms = timestamp_ms if first_ms is None else first_ms
        prompt = _prompt(library, units, input_tokens, hash_ids)
        answered = library.write(output_tokens, prompt)
        delay_steps = max(0, round((timestamp_ms - first_ms) / STEP_MS))
        requests.append(TracedRequest(prompt, answered, delay_steps))
    if not requests:
        raise TraceFormatError(f"{name}: expected one request per line, found none")
    return Trace(name, tuple(requests))


def _records(lines: Iterable[str], name: str) -> Iterator[tuple[float, int, int, list[int]]]:
    for number, line in enumerate(lines, 1):
        if not line.strip():
            continue
        where = f"{name}, line {number}"
        try:
            record = json.loads(line)
            timestamp_ms = float(record["timestamp"])
            input_tokens = int(record["input_length"])
            output_tokens = int(record["output_length"])
            hash_ids = [int(hash_id) for hash_id in record["hash_ids"]]
        except (ValueError, KeyError, TypeError) as error:
            raise TraceFormatError(
                f"{where}: expected an object with timestamp, input_length, output_length and "
                f"hash_ids, found {line.strip()[:80]!r} ({type(error).__name__}: {error})"
            ) from error
        num_units = -(-input_tokens // UNIT_TOKENS)
        if input_tokens < 1 or len(hash_ids) != num_units:
            raise TraceFormatError(
                f"{where}: expected one hash id per {UNIT_TOKENS} tokens, found {len(hash_ids)} "
                f"for {input_tokens} tokens"
            )
        # An answer has at least the token that ends it.
        yield timestamp_ms, input_tokens, max(1, output_tokens), hash_ids


def _prompt(
    library: Library, units: dict[tuple[int, int], Text], input_tokens: int, hash_ids: list[int]
) -> Text:
    """The text of these ids; a unit after the same units before is the same passage."""
    text: Text | None = None
    for position, hash_id in enumerate(hash_ids):
        key = (text.passage.index if text else -1, hash_id)
        if key not in units:
            units[key] = library.write(UNIT_TOKENS, text)
        text = units[key].cut(min(input_tokens, (position + 1) * UNIT_TOKENS))
    assert text is not None
    return text
