# SPDX-License-Identifier: Apache-2.0
"""The compiled module: descriptors in, bytes moved. Source: ``csrc/``.

Tables are those of `vllm_ascend_kvext.transfer.schema`, given through the buffer protocol. They
must not change during a call: the interpreter lock is released. Every function that is handed
descriptors raises `DescriptorError`, and then has written nothing.
"""

from typing import TypedDict

from vllm_ascend_kvext.transfer.schema import Table

class Description(TypedDict):
    version: str
    instruction_sets: list[str]
    kernel: str

def validate(
    pools: Table, host_address: int, host_bytes: int, planes: Table, runs: Table, direction: int
) -> None:
    """Find the descriptors valid. Memory is not touched, so that addresses may be a device's."""

def page_transfer(
    pools: Table,
    host_address: int,
    host_bytes: int,
    planes: Table,
    runs: Table,
    direction: int,
    num_threads: int = 1,
    streaming: int = -1,
) -> None:
    """Validate, then copy on the CPU.

    Args:
        num_threads: 1 to 256, the caller's included. Small transfers use fewer.
        streaming: Stores that go past the caches: 1 on, 0 off, -1 where they pay.
    """

def expand(
    pools: Table, host_address: int, host_bytes: int, planes: Table, runs: Table, direction: int
) -> tuple[Table, Table, Table]:
    """Validate, then list the copies: sources, destinations, sizes, shape ``[num_copies]`` each.

    What is adjacent at both ends is one copy.
    """

def copy(
    destination: int, source: int, num_bytes: int, num_threads: int = 1, streaming: int = -1
) -> None:
    """Copy plain memory with the same kernels and threads: the limit, for benchmarks."""

def describe() -> Description:
    """The version, the instruction sets this CPU has kernels for, and the kernel used."""
