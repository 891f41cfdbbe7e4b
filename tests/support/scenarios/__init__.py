# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vllm-ascend-kvext project
"""Scenarios that ask engines. Engines have their own processes, on a CPU or the emulated NPU.

A *plan* describes one engine and its scenarios, see `processes.Plan`. A *scenario* is a function of
the module that a plan names. It gets the module's ``Engine``, and asks it. The answers become the
report. `serve` runs plans and writes their reports. `processes` starts such a process for a test.
`answers` compares reports.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

Scenario = TypeVar("Scenario", bound=Callable[[Any], None])
_SCENARIOS: set[Callable[[Any], None]] = set()


def scenario(function: Scenario) -> Scenario:
    """Register a function that plans can name. The function gets an engine."""
    _SCENARIOS.add(function)
    return function


def scenario_of(module: Any, name: str) -> Callable[[Any], None]:
    """The scenario of this name in a module. The module may have imported it."""
    function = getattr(module, name, None)
    if function not in _SCENARIOS:
        raise LookupError(f"{module.__name__} has no scenario {name!r}")
    return function
