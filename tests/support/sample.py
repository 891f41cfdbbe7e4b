# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vllm-ascend-kvext project
"""Decides how many of the tests run.

``make test`` runs half of the random cases. On versions other than the main one, and with
vLLM-Ascend's managers, it runs a quarter of them, and leaves out tests that show little there.
``make test-long`` runs everything. ``tools/run_tests.py`` sets the variables.
"""

from __future__ import annotations

import os

IS_LONG = os.environ.get("KVEXT_CASES") == "all"

IS_SAMPLE = os.environ.get("KVEXT_TESTS") == "sample" and not IS_LONG
"""Whether this is not the main version with vLLM's own managers. Then not all tests run."""

LENGTH_STRIDE = 1 if IS_LONG else 7 if IS_SAMPLE else 3
"""The step between enumerated lengths. It is prime to block sizes, so every remainder occurs."""


def sampled(number: int) -> int:
    """The number of random cases to run, out of a given number."""
    return number if IS_LONG else -(-number // (4 if IS_SAMPLE else 2))
