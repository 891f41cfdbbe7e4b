# SPDX-License-Identifier: Apache-2.0
"""Nothing is profiled."""

from __future__ import annotations


def step() -> None:
    pass
