# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vllm-ascend-kvext project
"""A progress bar on a terminal, and a line every few seconds elsewhere."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import TextIO

_WIDTH = 30
_TERMINAL_PERIOD_S = 0.2
_FILE_PERIOD_S = 10.0


class ProgressBar:
    """Shows how much of a known amount is done, and how long the rest takes.

    Args:
        total: The amount; at least 1.
        unit: What is counted, in the plural.
        stream: Where the bar is shown.
        clock: The time in seconds.
    """

    def __init__(
        self,
        total: int,
        unit: str,
        stream: TextIO,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._total = total
        self._unit = unit
        self._stream = stream
        self._clock = clock
        self._is_terminal = stream.isatty()
        self._began_s = self._shown_s = clock()
        self._num_shown = 0

    def show(self, done: int) -> None:
        """Show the bar, unless it was shown a moment before."""
        now_s = self._clock()
        period_s = _TERMINAL_PERIOD_S if self._is_terminal else _FILE_PERIOD_S
        if now_s - self._shown_s < period_s and done < self._total:
            return
        self._shown_s = now_s
        line = self._line(done, now_s - self._began_s)
        if self._is_terminal:
            # Spaces cover what a longer line before has left.
            self._stream.write(f"\r{line:{self._num_shown}}")
            self._num_shown = len(line)
        else:
            self._stream.write(f"{line}\n")
        self._stream.flush()

    def clear(self) -> None:
        """Remove the bar, so that other lines can be printed."""
        if self._is_terminal and self._num_shown:
            self._stream.write(f"\r{'':{self._num_shown}}\r")
            self._stream.flush()
            self._num_shown = 0

    def _line(self, done: int, elapsed_s: float) -> str:
        share = min(1.0, done / self._total)
        filled = round(share * _WIDTH)
        bar = "#" * filled + "." * (_WIDTH - filled)
        rest = f", {_duration(elapsed_s / share * (1 - share))} left" if 0 < share < 1 else ""
        return f"[{bar}] {share:4.0%} {done:,}/{self._total:,} {self._unit}{rest}"


def _duration(seconds: float) -> str:
    minutes, rest_s = divmod(round(seconds), 60)
    return f"{minutes} min {rest_s:02} s" if minutes else f"{rest_s} s"
