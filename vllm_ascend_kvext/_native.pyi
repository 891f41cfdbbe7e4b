# SPDX-License-Identifier: Apache-2.0
"""The compiled module: descriptors in, bytes moved. Source: ``csrc/``.

Tables are those of `vllm_ascend_kvext.transfer.schema`, given through the buffer protocol. They
must not change during a call: the interpreter lock is released. Every function that is handed
descriptors raises `DescriptorError`, and then has written nothing.

``cpus`` are where copies run, ascending; none: wherever the thread that first asks for this may
run. The caller copies too where it may only run there, and transfers below 64 KiB alone, wherever
it runs: that takes less time than waking a thread. ``niceness`` is as of ``nice``, 0 to 19.
"""

from collections.abc import Sequence
from typing import TypedDict

from vllm_ascend_kvext.transfer.schema import Table

class Description(TypedDict):
    version: str
    instruction_sets: list[str]
    kernel: str

def validate(
    pools: Table, host_address: int, host_bytes: int, planes: Table, runs: Table, direction: int
) -> tuple[int, int]:
    """Find the descriptors valid. Memory is not touched, so that addresses may be a device's.

    Returns:
        The bytes that move, and the runs of all planes: every run of a group times every plane of
        that group.
    """

def page_transfer(
    pools: Table,
    host_address: int,
    host_bytes: int,
    planes: Table,
    runs: Table,
    direction: int,
    num_threads: int = 1,
    streaming: int = -1,
    cpus: Sequence[int] = (),
    niceness: int = 0,
) -> None:
    """Validate, then copy on the CPU.

    Args:
        num_threads: 1 to 256. Small transfers use fewer.
        streaming: Stores that go past the caches: 1 on, 0 off, -1 where they pay.
    """

def expand(
    pools: Table, host_address: int, host_bytes: int, planes: Table, runs: Table, direction: int
) -> tuple[Table, Table, Table]:
    """Validate, then list the copies: sources, destinations, sizes, shape ``[num_copies]`` each.

    What is adjacent at both ends is one copy.
    """

def copy(
    destination: int,
    source: int,
    num_bytes: int,
    num_threads: int = 1,
    streaming: int = -1,
    cpus: Sequence[int] = (),
    niceness: int = 0,
) -> None:
    """Copy plain memory with the same kernels and threads: the limit, for benchmarks."""

def require_cpus(cpus: Sequence[int], niceness: int = 0) -> None:
    """Start a thread there.

    Raises:
        ValueError: There is none among them, or one that the kernel does not give.
    """

def describe() -> Description:
    """The version, the instruction sets this CPU has kernels for, and the kernel used."""
