# SPDX-License-Identifier: Apache-2.0
"""How much of the tests runs.

``make test`` runs half of the random cases. On other versions than the main one it leaves out what
says little about the version. ``make test-long`` leaves out neither.

``tools/run_tests.py`` sets the variables.
"""

from __future__ import annotations

import os

IS_LONG = os.environ.get("KVEXT_CASES") == "all"

IS_SAMPLE = os.environ.get("KVEXT_TESTS") == "sample" and not IS_LONG
"""Whether this is another version than the main one, and not all is to run on it."""

LENGTH_STRIDE = 1 if IS_LONG else 3
"""Of lengths that are enumerated. Prime to the sizes of blocks, so that every remainder occurs."""


def sampled(number: int) -> int:
    """How many of so many random cases to run."""
    return number if IS_LONG else -(-number // 2)
