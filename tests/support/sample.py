# SPDX-License-Identifier: Apache-2.0
"""How much of the tests runs: the random cases by half, but for ``make test-long``.

On other versions than the main one, what says nothing about the version is left out.
``tools/run_tests.py`` sets the variables.
"""

from __future__ import annotations

import os

IS_SAMPLE = os.environ.get("KVEXT_TESTS") == "sample"
"""Whether this is another version than the main one."""

IS_LONG = os.environ.get("KVEXT_CASES") == "all"

LENGTH_STRIDE = 1 if IS_LONG else 3
"""Of lengths that are enumerated. Prime to the sizes of blocks, so that every remainder occurs."""


def sampled(number: int) -> int:
    """How many of so many random cases to run."""
    return number if IS_LONG else -(-number // 2)
