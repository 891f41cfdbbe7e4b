# SPDX-License-Identifier: Apache-2.0
"""What a test steers: when work runs, and what was called."""

from __future__ import annotations

import os

from torch_npu import _emulator

SEED_VARIABLE = "EMULATED_NPU_SEED"


def set_seed(seed: int | None) -> None:
    """From now on work is late, in an order that this seed chooses; or at once, if it is None.

    Work in flight is waited for.
    """
    _emulator.synchronize_all()
    _emulator.set_seed(seed)


def seed_from_environment() -> None:
    """Begin with the seed of the environment, if there is one."""
    text = os.environ.get(SEED_VARIABLE)
    set_seed(int(text) if text else None)


def count_operators(is_counting: bool = True) -> None:
    """Count calls from now on, or no more."""
    _emulator.count_operators(is_counting)


def operator_counts() -> dict[str, int]:
    """How often each operator was called while calls were counted, torch's own included."""
    return dict(_emulator.operator_counts())
