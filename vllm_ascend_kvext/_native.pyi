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
from typing import Any, TypedDict

from vllm_ascend_kvext.transfer.schema import Frequencies, Table

class Description(TypedDict):
    version: str
    instruction_sets: list[str]
    kernel: str
    rotation_kernel: str

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

    Arguments are those of `page_transfer`, and those of `KeyRotation`.
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
    """The version, the instruction sets this CPU has kernels for, and the kernels used."""

Boundary = tuple[int, int, int]
"""Tokens, origin and step: see ``vllm_ascend_kvext.retention.reasons``."""

GroupRun = tuple[int, int, int]
"""The place of a group, sparse ones first, and the first block and the stop of a run."""

class Geometry:
    """`HitGeometry` and the grid of a policy, as tables: ``csrc/retention/geometry.h``."""

    def __init__(self, tables: dict[str, Any]) -> None: ...
    def lasting_boundaries(
        self, plan: Sequence[Boundary], after_tokens: int, upto_tokens: int
    ) -> list[Boundary]:
        """Boundaries in ``(after_tokens, upto_tokens]`` that are planned or on the grid, ascending.

        Args:
            plan: Ascending. A planned boundary on the grid keeps its reason.
        """

class RetainedCache:
    """The checkpoints of one block pool: ``csrc/retention/retained_cache.h``.

    Blocks that nothing needs are reallocated first. Where they run short, the least worthy
    checkpoint gives its blocks up: see ``csrc/retention/checkpoint_tree.h`` and
    ``eviction_order.h``.
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
    ) -> None:
        """Take over the order of a pool's free blocks, of which none is cached.

        Args:
            blocks: Every block, each at the place of its id.
            head: The end of the free queue before the first block.
            tail: The end of the free queue behind the last block.
            hash_block_tokens: Tokens per hash of a request.
            sparse_groups: Of `ManagedGroup`.
            full_groups: Of `ManagedGroup`.
            quiet_sparse_groups: Whether a sparse group is quiet: neither an event nor upstream's
                books tell what of it is cached.
            quiet_full_groups: The same of full-attention groups.

        Raises:
            TypeError: These are not upstream's blocks as they are known.
        """

    def make_room(self, num_blocks: int) -> None:
        """Evict checkpoints until nothing needs the next blocks to be reallocated."""

    def clear(self) -> None:
        """Forget all checkpoints; the pool has uncached all blocks."""

    def split_freed(self, blocks: list[Any]) -> tuple[list[Any], list[Any], int]:
        """Split what is about to be freed; nulls are left out.

        Returns:
            Blocks that are not cached; those that are, needed ones first; how many at the end of
            these nothing needs.
        """

    def note_surplus(self, freed: list[Any], num_surplus: int) -> None:
        """Blocks were appended to the free queue, and nothing needs the last ``num_surplus``."""

    def note_uncached(self, freed: list[Any]) -> None:
        """Blocks that are not cached were put at the front of the free queue, in this order."""

    def counts(self) -> tuple[int, int, int, int]:
        """Checkpoints there are, were kept, were evicted; hits at junctions."""

class RetainedRequest:
    """What one request has cached: ``csrc/retention/retained_request.h``.

    A step is begun, its runs are cached, and it is ended. A step that was begun and not ended is
    begun once more.

    Methods that are given a key table raise `TypeError` where upstream's objects are not as they
    are known, and `IndexError` where a full block has no hash; then nothing has been cached.
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
        """What earlier requests have computed of a prompt.

        Returns:
            Per full-attention group, up to which token the prompt is cached; the longest boundary
            of the prompt past the hit whose checkpoint was evicted, 0 if there is none.
        """

    def admit(self, key_table: Any) -> int:
        """The request has got blocks; returns the tokens that it need not compute."""

    def plan(
        self,
        plan: Sequence[Boundary],
        rungs: Sequence[tuple[int, int]],
        stops_tokens: Sequence[int],
        replay_tokens: int,
    ) -> None:
        """Plan which boundaries to keep.

        Args:
            plan: Ascending. A boundary that is wanted is gone, and should have stayed.
            rungs: Rung and tokens of boundaries that no request asked for. They are planned where
                they turn out useful.
            stops_tokens: Boundaries at which a prefill step is to end, ascending.
            replay_tokens: Where a request with the same prompt resumes.
        """

    def next_stop_tokens(self, computed_tokens: int) -> int | None:
        """The first of these past what is computed."""

    def begin_step(
        self, key_table: Any, num_computed_tokens: int, num_tokens: int
    ) -> list[GroupRun] | None:
        """Begin a step.

        Returns:
            Which runs upstream's functions are to cache now, in their order: those of groups that
            are not quiet. None where there is nothing to do at all.
        """

    def begin_last_step(
        self, key_table: Any, computed_tokens: int, own_tokens: int
    ) -> list[GroupRun] | None:
        """Begin the last step, before the request's blocks are freed.

        Args:
            computed_tokens: What it really computed.
            own_tokens: Up to which token a request that extends it, or resumes it, reads.

        Returns:
            As `begin_step`; None where it holds no blocks.
        """

    def cache_quiet_runs(self, key_table: Any) -> None:
        """Cache the step's runs of quiet groups."""

    def end_step(self, key_table: Any) -> None:
        """Keep the boundaries that are complete, now that the runs are cached.

        Raises:
            RuntimeError: Runs of quiet groups are not cached yet.
        """

    def end_last_step(self, key_table: Any) -> list[Any]:
        """Keep the boundaries that are complete; returns blocks to be uncached."""

    def settled_tokens(self, total_tokens: int) -> int:
        """Computed tokens without those of steps in flight, which may be rejected."""

    def before_skip(
        self, total_tokens: int, is_settled: bool, skipped_tokens: Sequence[int] = ...
    ) -> int:
        """See `CheckpointRetention.before_skip`.

        Args:
            skipped_tokens: Per sparse group, how many tokens no computation reads any more; not
                needed where all managers are upstream's.
        """
