# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vllm-ascend-kvext project
"""Workers of one engine that exchange values, as threads of this process."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

_TIMEOUT_S = 60.0


class Meeting:
    """Where some workers exchange values. A worker that does not come breaks it for all."""

    def __init__(self, num_workers: int) -> None:
        self._values: list[Any] = [None] * num_workers
        self._barrier = threading.Barrier(num_workers, timeout=_TIMEOUT_S)

    def exchange(self, rank: int, value: Any) -> list[Any]:
        self._values[rank] = value
        self._barrier.wait()
        values = list(self._values)
        self._barrier.wait()
        return values


def in_threads(call: Callable[[int], Any], num_ranks: int) -> list[Any]:
    """Call a function for each rank at the same time. Returns results and exceptions, by rank."""
    results: list[Any] = [None] * num_ranks

    def run(rank: int) -> None:
        try:
            results[rank] = call(rank)
        except Exception as error:
            results[rank] = error

    threads = [threading.Thread(target=run, args=(rank,)) for rank in range(num_ranks)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return results
