# SPDX-License-Identifier: Apache-2.0
"""What a test steers: when work runs."""

from __future__ import annotations

from torch_npu import _emulator


def set_seed(seed: int | None) -> None:
    """From now on work is late, in an order that this seed chooses; or at once, if it is None.

    Work in flight is waited for. The same seed gives the same order again where the host makes the
    same calls in the same order, with as many streams made before.
    """
    _emulator.set_seed(seed)


def num_in_flight() -> int:
    """Work that has been enqueued and has not run, waits and records of events included."""
    return _emulator.num_in_flight()
