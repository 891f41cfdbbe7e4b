# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vllm-ascend-kvext project
"""Which ids of patches are taken, and which are free.

An id is ``KVX-`` and three digits. The first digit names a range, which features share. An id never
comes back: a patch that is deleted leaves a line in `RETIRED_IDS`.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Iterable

RANGES = {
    1: "retention; repairs",
    2: "fast-prefix-cache",
    3: "repairs",
    4: "connector",
    5: "lmcache",
}
"""Maps the first digit of a range to the features of the range."""

RETIRED_IDS = {
    "KVX-101": "a method of single block managers replaced it",
    "KVX-102": "a method of single block managers replaced it",
    "KVX-103": "a method of single block managers replaced it",
    "KVX-104": "a method of single block managers replaced it",
    "KVX-105": "a method of single block managers replaced it",
    "KVX-111": "a method of single block managers replaced it",
    "KVX-112": "a method of single block managers replaced it",
    "KVX-113": "a method of single block managers replaced it",
    "KVX-121": "a method of single block managers replaced it",
    "KVX-122": "a method of single block managers replaced it",
    "KVX-123": "a method of single block managers replaced it",
    "KVX-125": "a method of single block managers replaced it",
    "KVX-131": "a blank retention interval; the environment gives it now",
    "KVX-142": "a method of single block managers replaced it",
    "KVX-145": "a method of single block managers replaced it",
    "KVX-146": "a method of single block managers replaced it",
    "KVX-151": "only vLLM 0.20.2 needed it",
    "KVX-152": "only vLLM 0.20.2 needed it",
    "KVX-162": "a method of single block managers replaced it",
    "KVX-201": "a method of single block managers replaced it",
    "KVX-202": "gained less than 1.5 times",
    "KVX-203": "gained less than 1.5 times",
    "KVX-204": "gained less than 1.5 times",
    "KVX-210": "vLLM 0.30's own function costs as little",
    "KVX-211": "a method of single block managers replaced it",
    "KVX-212": "a method of single block managers replaced it",
    "KVX-213": "only vLLM 0.20.2 needed it",
    "KVX-214": "a method of single block managers replaced it",
    "KVX-215": "gained less than 1.5 times",
    "KVX-216": "gained less than 1.5 times",
    "KVX-217": "gained less than 1.5 times",
    "KVX-218": "gained less than 1.5 times",
    "KVX-219": "a method of single block managers replaced it",
    "KVX-221": "a method of single block managers replaced it",
    "KVX-222": "a method of single block managers replaced it",
    "KVX-223": "a method of single block managers replaced it",
    "KVX-231": "short keys, which a KV connector switched off",
    "KVX-232": "a method of single block managers replaced it",
    "KVX-233": "a method of single block managers replaced it",
    "KVX-241": "short keys, which a KV connector switched off",
    "KVX-304": "gaps of other connectors",
    "KVX-309": "a method of single block managers replaced it",
    "KVX-404": "gaps of other connectors",
    "KVX-406": "a check of the model when an engine starts",
    "KVX-407": "a check of the model when an engine starts",
    "KVX-409": "the text of a refusal",
    "KVX-502": "only vLLM 0.20.2 needed it",
    "KVX-503": "only vLLM 0.20.2 needed it",
    "KVX-504": "counts of LMCache's stores",
}
"""Ids of deleted patches. The text says what a patch was for, or why it was deleted."""

_PREFIX = "KVX-"
_IDS_PER_RANGE = 100


def misused_ids(ids: Iterable[str], retired: Collection[str]) -> list[str]:
    """The errors in the ids of a ledger, one sentence each; empty if there are none.

    Args:
        ids: The id of each patch, in any order.
        retired: Ids of patches that are gone.
    """
    problems = []
    seen: set[str] = set()
    for each in ids:
        is_an_id = re.fullmatch(rf"{_PREFIX}[0-9]{{3}}", each)
        if not is_an_id or _number_of(each) // _IDS_PER_RANGE not in RANGES:
            problems.append(f"{each} is in no range")
        if each in retired:
            problems.append(f"{each} is retired, and must not come back")
        if each in seen:
            problems.append(f"{each} has two patches")
        seen.add(each)
    return problems


def free_ids(first_digit: int, taken: Iterable[str]) -> list[tuple[str, str]]:
    """The free ids of a range, as pairs of the first and the last id of each run.

    Args:
        taken: Ids of patches, and ids that are retired.
    """
    numbers = {_number_of(each) for each in taken}
    # The first number of a range is left out: ids begin at KVX-101.
    first = first_digit * _IDS_PER_RANGE + 1
    runs: list[tuple[int, int]] = []
    for number in range(first, first + _IDS_PER_RANGE - 1):
        if number in numbers:
            continue
        if runs and runs[-1][1] == number - 1:
            runs[-1] = (runs[-1][0], number)
        else:
            runs.append((number, number))
    return [(f"{_PREFIX}{start}", f"{_PREFIX}{end}") for start, end in runs]


def _number_of(patch_id: str) -> int:
    return int(patch_id.removeprefix(_PREFIX))
