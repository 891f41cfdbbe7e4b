# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vllm-ascend-kvext project
"""Takes host memory from the kernel by a mapping of this process, and counts it first.

Nothing is rounded up but to a page. The module does not know what the memory is for.
"""

from __future__ import annotations

import contextlib
import mmap
from typing import TYPE_CHECKING

from vllm_ascend_kvext.connector.common.host_memory import (
    MemoryNeed,
    in_words,
    require_left,
    tightest_bound,
)
from vllm_ascend_kvext.connector.worker.memory_node import prefer_node

if TYPE_CHECKING:
    import torch

_MIN_STEP_BYTES = 4 << 20
_STEPS_OF_WHAT_IS_LEFT = 64
"""Plain memory is taken in steps of a 64th of what is left. So 64 workers may take theirs at once,
and each of them still notices in time that too little is left."""

REMEDY = "Give the connector less memory, and mind that every worker of a host takes as much."


def require_memory(need: MemoryNeed, remedy: str = REMEDY) -> None:
    """Raise `HostMemoryError` if the machine, or a control group, has less left than needed."""
    require_left(need, tightest_bound(), remedy)


def map_memory(num_bytes: int, node: int | None = None) -> torch.Tensor:
    """Map memory of this process. Its pages are not taken yet, see `take_memory`.

    It uses huge pages if there are any. The mapping is private, because the kernel has other rules
    for huge pages of shared memory, and by default gives none. A forked process does not get the
    mapping: otherwise the kernel would copy what this process writes while the other one lives,
    and a device would go on with the old page.

    Args:
        node: The memory node from which pages are taken; None leaves the choice to the kernel.

    Returns:
        The memory, from the first byte of a page on. dtype: uint8, shape: ``[num_bytes]``. It is
        unmapped when no tensor refers to it.

    Raises:
        OSError: If the process may not have so much memory.
    """
    import torch

    memory = mmap.mmap(-1, num_bytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    with contextlib.suppress(OSError):  # The kernel may have no huge pages.
        memory.madvise(mmap.MADV_HUGEPAGE)
    memory.madvise(mmap.MADV_DONTFORK)
    tensor = torch.frombuffer(memory, dtype=torch.uint8)
    prefer_node(tensor.data_ptr(), num_bytes, node)
    return tensor


def take_memory(tensor: torch.Tensor) -> None:
    """Write to each page of memory once.

    Otherwise the kernel would hand out pages at the first write to them. Stores have then been
    measured to take five times as long. Other processes may take memory at the same time. So what
    is left is read again and again.

    Raises:
        HostMemoryError: If less memory is left. Without this check, the kernel would kill some
            process.
    """
    num_bytes = int(tensor.numel())
    first = 0
    while first < num_bytes:
        bound = tightest_bound()
        rest = MemoryNeed(num_bytes - first, 1, is_pinned=False)
        taken = f"{in_words(first)} of {in_words(num_bytes)} were taken meanwhile."
        require_left(rest, bound, f"{taken} {REMEDY}")
        step_bytes = num_bytes
        if bound is not None:
            step_bytes = max(_MIN_STEP_BYTES, bound.left_bytes // _STEPS_OF_WHAT_IS_LEFT)
        tensor[first : first + step_bytes].zero_()
        first += step_bytes
