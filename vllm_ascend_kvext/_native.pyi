# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vllm-ascend-kvext project
"""The compiled module, which moves bytes and runs retention. Its source is ``csrc/``.

Tables have the columns of `vllm_ascend_kvext.transfer.schema`, and are passed through the buffer
protocol. Tables must not change during a call, because the interpreter lock is released. Every
function that takes descriptors raises `DescriptorError` if they are wrong, and then has written
nothing.

``cpus`` are the CPUs on which copies run, ascending. If there are none, copies run where the thread
that makes the first of these copies may run. The caller also copies if it may run only on ``cpus``.
The caller copies transfers below 64 KiB alone, on any CPU, because waking a thread would take
longer.
``niceness`` is the value of ``nice``, 0 to 19.
"""

from collections.abc import Sequence
from typing import Any, TypedDict

from vllm_ascend_kvext.transfer.schema import Frequencies, Table

class Description(TypedDict):
    """What the module can do on this CPU.

    Attributes:
        instruction_sets: The kernels that copy, the best first; the last one is "memcpy".
        kernel: The kernel that is used, the first one.
        rotation_kernels: The kernels that rotate keys, the best first; the last one is "plain".
        rotation_kernel: The kernel that is used, the first one.
        cpu_features: What the CPU and the kernel of the system can do, of the features that the
            module asks for. The names are those of ``/proc/cpuinfo``.
    """

    version: str
    instruction_sets: list[str]
    kernel: str
    rotation_kernel: str
    rotation_kernels: list[str]
    cpu_features: list[str]

def validate(
    pools: Table, host_address: int, host_bytes: int, planes: Table, runs: Table, direction: int
) -> tuple[int, int]:
    """Check the descriptors. Memory is not touched, so addresses may be addresses of a device.

    Returns:
        The number of bytes that move, and the number of copied runs. Each run of a group is copied
        once per plane of the group.
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
        streaming: Whether stores bypass the caches: 1 yes, 0 no, -1 for large transfers only.
    """

def rotated_page_transfer(
    pools: Table,
    host_address: int,
    host_bytes: int,
    planes: Table,
    runs: Table,
    direction: int,
    rotations: Table,
    shifts: Table,
    frequencies: Frequencies,
    num_threads: int = 1,
    streaming: int = -1,
    cpus: Sequence[int] = (),
    niceness: int = 0,
) -> None:
    """Validate, then copy on the CPU, and rotate the rows of the planes that ``rotations`` names.

    The arguments are the same as in `page_transfer` and `KeyRotation`.
    """

def expand(
    pools: Table, host_address: int, host_bytes: int, planes: Table, runs: Table, direction: int
) -> tuple[Table, Table, Table]:
    """Validate, then list the copies: sources, destinations, sizes, shape ``[num_copies]`` each.

    Bytes that are adjacent in source and destination are one copy.
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
    """Copy plain memory with the same kernels and threads. Benchmarks use it as the limit."""

def require_cpus(cpus: Sequence[int], niceness: int = 0) -> None:
    """Start a thread on these CPUs.

    Raises:
        ValueError: There are no CPUs, or the kernel does not give one of them.
    """

def describe() -> Description:
    """The version, the instruction sets with kernels for this CPU, and the chosen kernels."""

Boundary = tuple[int, int, int]
"""Tokens, origin and step: see ``vllm_ascend_kvext.retention.reasons``."""

GroupRun = tuple[int, int, int]
"""The number of a group (sparse groups come first), the first block and the stop of a run."""

class Geometry:
    """The tables of a `HitGeometry` and the grid of a policy; ``csrc/retention/geometry.h``."""

    def __init__(self, tables: dict[str, Any]) -> None: ...
    def lasting_boundaries(
        self, plan: Sequence[Boundary], after_tokens: int, upto_tokens: int
    ) -> list[Boundary]:
        """Boundaries in ``(after_tokens, upto_tokens]`` that are planned or on the grid, ascending.

        Args:
            plan: Ascending. A planned boundary on the grid keeps its reason.
        """

class RetainedCache:
    """The checkpoints of one block pool; ``csrc/retention/retained_cache.h``.

    Blocks that nothing needs are reallocated first. If there are too few of them, the least worthy
    checkpoint is evicted; see ``csrc/retention/checkpoint_tree.h`` and ``eviction_order.h``.
    """

    def __init__(
        self,
        blocks: list[Any],
        head: Any,
        tail: Any,
        hash_block_tokens: int,
        geometry: Geometry,
        sparse_groups: Sequence[Any],
        full_groups: Sequence[Any],
        quiet_sparse_groups: Sequence[bool],
        quiet_full_groups: Sequence[bool],
        hits_inside_blocks: bool = False,
    ) -> None:
        """Take over the order of a pool's free blocks. No block may be cached yet.

        Args:
            blocks: All blocks. The index of a block is its id.
            head: The end of the free queue before the first block.
            tail: The end of the free queue behind the last block.
            hash_block_tokens: Tokens per hash of a request.
            sparse_groups: The sparse groups, each a `ManagedGroup`.
            full_groups: The full-attention groups, each a `ManagedGroup`.
            quiet_sparse_groups: For each sparse group, whether it is quiet: neither events nor
                records of upstream tell which of its blocks are cached.
            quiet_full_groups: For each full-attention group, whether it is quiet.
            hits_inside_blocks: Whether a hit may end inside a block. No group may be quiet then.

        Raises:
            TypeError: The blocks do not have the known form of upstream's blocks.
        """

    def make_room(self, num_blocks: int) -> None:
        """Evict checkpoints until nothing needs the next ``num_blocks`` free blocks."""

    def clear(self) -> None:
        """Forget all checkpoints. The pool must have uncached all blocks before."""

    def split_freed(self, blocks: list[Any]) -> tuple[list[Any], list[Any], int]:
        """Split blocks that are about to be freed. Null blocks are left out.

        Returns:
            The uncached blocks; the cached blocks, needed blocks first; the number of cached blocks
            at the end that nothing needs.
        """

    def note_surplus(self, freed: list[Any], num_surplus: int) -> None:
        """Note blocks appended to the free queue. Nothing needs the last ``num_surplus`` blocks."""

    def note_uncached(self, freed: list[Any]) -> None:
        """Note uncached blocks that were put at the front of the free queue, in this order."""

    def counts(self) -> tuple[int, int, int, int]:
        """Four counts: checkpoints that exist, were kept, were evicted; hits at junctions."""

class RetainedRequest:
    """The blocks that one request has cached; ``csrc/retention/retained_request.h``.

    A caller begins a step, caches the step's runs, and ends the step. A step that was begun but not
    ended is begun again.

    Methods that take a key table raise `TypeError` if upstream's objects do not have the known
    form, and `IndexError` if a full block has no hash. Then nothing has been cached.
    """

    cached_tokens: int

    def __init__(self, cache: RetainedCache, request: Any) -> None: ...
    @property
    def holds_blocks(self) -> bool: ...
    @property
    def next_event_tokens(self) -> int: ...
    def find_prefixes(
        self, key_table: Any, hit_tokens: int, num_prompt_tokens: int
    ) -> tuple[list[int], int]:
        """Find the parts of a prompt that earlier requests have computed.

        Returns:
            For each full-attention group, the number of tokens up to which the prompt is cached.
            Then the longest boundary past the hit whose checkpoint was evicted; 0 if there is none.
        """

    def admit(self, key_table: Any, inner_tokens: int = 0) -> int:
        """Note that the request has got blocks; returns the tokens that it need not compute.

        Args:
            inner_tokens: The tokens of its hit, if the hit may end inside a block.
        """

    def keep_inside(
        self,
        key_table: Any,
        tokens: int,
        origin: int,
        step: int,
        full_tokens: Sequence[int],
    ) -> bool:
        """Keep a boundary inside a block, which has been computed.

        Args:
            full_tokens: For each full-attention group, the tokens that must be cached for a hit.

        Returns:
            Whether all blocks that a hit reads are cached.
        """

    def plan(
        self,
        plan: Sequence[Boundary],
        rungs: Sequence[tuple[int, int]],
        stops_tokens: Sequence[int],
        replay_tokens: int,
    ) -> None:
        """Plan which boundaries to keep.

        Args:
            plan: The planned boundaries, ascending. Boundaries inside blocks are left to
                `keep_inside`. The origin WANTED means that the boundary's
                checkpoint is gone, but should have been kept.
            rungs: Pairs of a rung and the tokens of a boundary that no request asked for. A rung is
                planned if such rungs turn out useful.
            stops_tokens: Boundaries at which a prefill step is to end, ascending.
            replay_tokens: The token at which a request with the same prompt resumes.
        """

    def next_stop_tokens(self, computed_tokens: int) -> int | None:
        """The first of ``stops_tokens`` past the computed tokens; None if there is none."""

    def begin_step(
        self, key_table: Any, num_computed_tokens: int, num_tokens: int
    ) -> list[GroupRun] | None:
        """Begin a step.

        Returns:
            The runs of groups that are not quiet, in the order in which upstream's functions are to
            cache them now. None if there is nothing to do.
        """

    def begin_last_step(
        self, key_table: Any, computed_tokens: int, own_tokens: int
    ) -> list[GroupRun] | None:
        """Begin the last step, before the request's blocks are freed.

        Args:
            computed_tokens: The tokens that the request really computed.
            own_tokens: The tokens that a later request reads if it extends or resumes this one.

        Returns:
            The same as `begin_step`; None if the request holds no blocks.
        """

    def cache_quiet_runs(self, key_table: Any) -> None:
        """Cache the step's runs of quiet groups."""

    def end_step(self, key_table: Any) -> None:
        """End a step whose runs are cached: keep the boundaries that are now complete.

        Raises:
            RuntimeError: Runs of quiet groups are not cached yet.
        """

    def end_last_step(self, key_table: Any) -> list[Any]:
        """Keep the boundaries that are complete. Returns the blocks to be uncached."""

    def settled_tokens(self, total_tokens: int) -> int:
        """The computed tokens, except tokens of steps in flight, because these may be rejected."""

    def before_skip(
        self, total_tokens: int, is_settled: bool, skipped_tokens: Sequence[int] = ...
    ) -> int:
        """See `CheckpointRetention.before_skip`.

        Args:
            skipped_tokens: For each sparse group, the number of first tokens that no computation
                reads any more. Not needed if all managers are upstream's.
        """
