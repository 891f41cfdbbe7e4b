# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vllm-ascend-kvext project
"""Whether an emulator runs this process, as in `make test-aarch64`.

The emulator of programs answers some questions about a process itself, and passes on neither calls
for memory nodes nor advice about memory. What a test cannot see through it, the test skips.
"""

from __future__ import annotations

from pathlib import Path

import pytest


def is_emulated() -> bool:
    """Whether the number of this process's threads is hidden. The kernel always tells it."""
    fields = Path("/proc/self/stat").read_text().rpartition(")")[2].split()
    num_threads = fields[17]
    return num_threads == "0"


def not_emulated(reason: str) -> pytest.MarkDecorator:
    """Skips a test in an emulator of programs.

    Args:
        reason: What the emulator does otherwise than the kernel.
    """
    return pytest.mark.skipif(is_emulated(), reason=f"an emulator of programs {reason}")
