# SPDX-License-Identifier: Apache-2.0
"""How an operator says that it is asked for something that the emulation does not have.

An argument that an operator does not know at all is refused by Python: operators take no ``**``.
"""

from __future__ import annotations

from collections.abc import Mapping


def refuse_given(operator: str, arguments: Mapping[str, object]) -> None:
    """Refuses documented arguments that are not emulated, if they hold anything but their default.

    The default of each of them is None, zero, an empty list or False.
    """
    for name, value in arguments.items():
        if value is None or value is False or (isinstance(value, (int, float)) and value == 0):
            continue
        if isinstance(value, (list, tuple)) and not value:
            continue
        raise NotImplementedError(f"{operator}: {name} is not emulated")


def require(operator: str, is_met: bool, requirement: str) -> None:
    """Refuses what the operator's documentation forbids."""
    if not is_met:
        raise RuntimeError(f"{operator}: {requirement}")
