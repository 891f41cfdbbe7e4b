# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vllm-ascend-kvext project
"""Reads traces of production, which have lengths and hashes of prompts, and no text.

The format is Mooncake's: one JSON object per line, see ``benchmarks/traces/NOTICE``. The module
imports nothing of vLLM.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

from retention.texts import Library, Text
from retention.traces import Trace, TracedRequest
from vllm_ascend_kvext.replay import trace
from vllm_ascend_kvext.replay.trace import LoggedRequest

FOLDER = Path(__file__).parents[1] / "traces"

STEP_MS = 100
"""The time of a scheduler step. Answers advance by several tokens in a step, see ``serving``."""

MAX_OUTPUT_TOKENS = 600
"""Longer answers are cut, so that the prompts take most of the time."""


@dataclass(frozen=True, slots=True)
class Recording:
    """A published trace.

    Attributes:
        file_name: The file in `FOLDER`.
        num_requests: The number of its first requests that are served.
    """

    file_name: str
    num_requests: int


RECORDINGS = {
    "conversation": Recording("mooncake_conversation_first_6000.jsonl.gz", 2500),
    "synthetic": Recording("mooncake_synthetic.jsonl.gz", 1200),
}


def read_trace(name: str, scale: float = 1.0, part: int = 0) -> Trace:
    """A published trace.

    Args:
        name: A key of `RECORDINGS`.
        scale: A factor on the number of requests.
        part: How many parts of as many requests are left out before.
    """
    recording = RECORDINGS[name]
    num_requests = round(recording.num_requests * scale)
    logged = trace.read_trace(FOLDER / recording.file_name)
    chosen = itertools.islice(logged, part * num_requests, (part + 1) * num_requests)
    return Trace(name, tuple(_requests(name, chosen)))


def _requests(name: str, logged: Iterable[LoggedRequest]) -> Iterator[TracedRequest]:
    library = Library(name)
    known: dict[tuple[int | None, int], Text] = {}
    start_ms: float | None = None
    for request in logged:
        if start_ms is None:
            start_ms = request.arrival_ms
        text: Text | None = None
        for hash_id in request.prompt_ids:
            key = (text.passage.index if text else None, hash_id)
            if key not in known:
                known[key] = library.write(request.block_tokens, text)
            text = known[key]
        assert text is not None
        prompt = text.cut(request.prompt_tokens)
        answered = library.write(min(request.output_tokens, MAX_OUTPUT_TOKENS), prompt)
        yield TracedRequest(prompt, answered, int(request.arrival_ms - start_ms) // STEP_MS)
