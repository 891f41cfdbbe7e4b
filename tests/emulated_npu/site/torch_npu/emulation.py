# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vllm-ascend-kvext project
"""Functions with which a test decides when work runs."""

from __future__ import annotations

from torch_npu import _emulator


def set_seed(seed: int | None) -> None:
    """Have work run late from now on, in an order that a seed chooses; None has it run at once.

    This function waits for work in flight. The same seed gives the same order if the host makes
    the same calls in the same order, and has made as many streams before.
    """
    _emulator.set_seed(seed)


def num_in_flight() -> int:
    """Number of enqueued operations that have not run, including waits and records of events."""
    return _emulator.num_in_flight()


def num_replays() -> int:
    """Number of replays of graphs in this process."""
    return _emulator.num_replays()
