# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vllm-ascend-kvext project
"""Reads requests from the log of ``vllm serve --enable-log-requests`` at the level DEBUG.

At this level the log has the tokens of prompts. With ``--enable-log-outputs`` it also has the
tokens of answers that are not streamed. See ``entrypoints/serve/utils/request_logger.py`` of vLLM.
"""

from __future__ import annotations

import re
from array import array
from collections import Counter
from collections.abc import Iterable
from datetime import datetime, timedelta
from pathlib import Path

from vllm_ascend_kvext.errors import DOCS_URL, TraceError

_TIME = re.compile(r"\b(\d\d-\d\d \d\d:\d\d:\d\d)\b")
_PROMPT = re.compile(
    r"\] Request (\S+) details: prompt: .*, prompt_token_ids: (\[[\d, ]*\]|None), "
    r"prompt_embeds shape: "
)
_RECEIVED = re.compile(r"\] Received request (\S+): params: (.*), lora_request: (.*)\.\s*$")
_ANSWER = re.compile(r"\] Generated response ([^\s:]+)(.*?): .*?output_token_ids: ")
_TOKENS = re.compile(r"output_token_ids: (\[[\d, ]*\])")
_MAX_TOKENS = re.compile(r"\bmax_tokens=(\d+)")
_ADAPTER = re.compile(r"lora_name='([^']*)'")
_HALF_A_YEAR = timedelta(days=180)
_LEAP_YEAR = 2000
"""The log has no year. In this one every day exists."""

_YEAR = timedelta(days=366)

Found = tuple[float, "array[int]", int, "array[int]", str]
"""The arrival in ms, the prompt's tokens, the length of the answer, its tokens, and the adapter."""


def read_vllm_log(lines: Iterable[str], path: Path, skipped: Counter[str]) -> list[Found]:
    """The requests of a log, in the order of their arrivals.

    Args:
        path: The file, for messages.
        skipped: Requests that are left out are counted here, by reason.

    Raises:
        TraceError: The log has no request with its tokens.
    """
    clock = _Clock()
    prompts: dict[str, array[int]] = {}
    arrivals_ms: dict[str, float] = {}
    adapters: dict[str, str] = {}
    limits: dict[str, int] = {}
    answers: dict[str, array[int]] = {}
    for line in lines:
        if found := _PROMPT.search(line):
            prompts[found[1]] = _tokens(found[2])
        elif found := _RECEIVED.search(line):
            request_id = found[1]
            arrivals_ms[request_id] = clock.read(line)
            limit = _MAX_TOKENS.search(found[2])
            limits[request_id] = int(limit[1]) if limit else 1
            adapter = _ADAPTER.search(found[3])
            adapters[request_id] = adapter[1] if adapter else ""
        elif (found := _ANSWER.search(line)) and (tokens := _TOKENS.findall(line)):
            is_part = "streaming delta" in found[2]
            before = answers.get(found[1], array("q")) if is_part else array("q")
            answers[found[1]] = before + _tokens(tokens[-1])
    if not arrivals_ms:
        raise TraceError(
            f"{path}: expected JSON lines, or the log of vllm serve --enable-log-requests, found "
            f"neither. See {DOCS_URL}replay.md."
        )
    requests: list[Found] = []
    for request_id, arrival_ms in arrivals_ms.items():
        prompt = prompts.get(request_id)
        if not prompt:
            skipped["the log does not have the tokens of the prompt"] += 1
            continue
        # A completion answers under the id of all its prompts together.
        answer = answers.get(request_id) or answers.get(request_id.removesuffix("-0")) or array("q")
        output_tokens = len(answer) or limits[request_id]
        requests.append((arrival_ms, prompt, output_tokens, answer, adapters[request_id]))
    if not requests:
        raise TraceError(
            f"{path}: expected the tokens of prompts, found {len(arrivals_ms)} requests without "
            "them. Set VLLM_LOGGING_LEVEL=DEBUG for vllm serve --enable-log-requests."
        )
    return requests


class _Clock:
    """Reads the times of lines, which have no year."""

    def __init__(self) -> None:
        self._latest = datetime(_LEAP_YEAR, 1, 1)
        self._first: datetime | None = None

    def read(self, line: str) -> float:
        """Milliseconds since the first line that was read."""
        found = _TIME.search(line)
        if found is not None:
            time = datetime.strptime(f"{_LEAP_YEAR}-{found[1]}", "%Y-%m-%d %H:%M:%S")
            while self._first is not None and self._latest - time > _HALF_A_YEAR:
                time += _YEAR
            self._latest = time
        self._first = self._first or self._latest
        return 1e3 * (self._latest - self._first).total_seconds()


def _tokens(text: str) -> array[int]:
    if text == "None":
        return array("q")
    return array("q", [int(each) for each in text[1:-1].split(",") if each.strip()])
