# SPDX-License-Identifier: Apache-2.0
"""Every case runs on the main version; on the others a part of the random ones is enough.

``tools/run_tests.py`` sets the variable for all environments but that of the main version.
"""

from __future__ import annotations

import os

IS_SAMPLE = os.environ.get("KVEXT_TESTS") == "sample"

LENGTH_STRIDE = 3 if IS_SAMPLE else 1
"""Of lengths that are enumerated. Prime to the sizes of blocks, so that every remainder occurs."""


def sampled(number: int) -> int:
    """How many of so many random cases to run."""
    return -(-number // 2) if IS_SAMPLE else number
