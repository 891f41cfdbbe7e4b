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

ReasonTuple = tuple[int, int, int]
"""Origin, step, and how often it has been resumed from."""

class RetainedCache:
    """The checkpoints of one block pool: ``csrc/retention/retained_cache.h``.

    What nothing needs is reallocated first; where that runs short, the least worthy checkpoint
    gives its blocks up. See ``csrc/retention/checkpoint_tree.h`` and ``eviction_order.h``.
    """

    def __init__(
        self,
        blocks: list[Any],
        head: Any,
        tail: Any,
        geometry: Any,
        sparse_groups: list[Any],
        full_groups: list[Any],
        has_events: bool,
    ) -> None:
        """Take over the order of a pool's free blocks, of which none is cached.

        Args:
            blocks: Every block, each at the place of its id.
            head: The end of the free queue before the first block.
            tail: The end of the free queue behind the last block.
            geometry: See `geometry_tables`.
            sparse_groups: See `group_tables`.
            full_groups: See `group_tables`.

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

    @property
    def rates(self) -> UseRates:
        """What its checkpoints have turned out to be worth."""

    def num_needs(self, block_id: int) -> int:
        """How many runs and tails of checkpoints, and running requests, need a block."""

    def surplus(self) -> list[int]:
        """Ids of the free blocks that nothing needs, in the order of their reallocation."""

    def counts(self) -> tuple[int, int, int, int]:
        """Checkpoints there are, were kept, were evicted; hits at junctions."""

    @property
    def clock_pools(self) -> float:
        """Pools that have been cached for checkpoints so far."""

    def describe(self) -> list[dict[str, Any]]:
        """All checkpoints, for tests and reports."""

class RetainedRequest:
    """What one request has cached: ``csrc/retention/retained_request.h``."""

    cached_tokens: int

    def __init__(self, cache: RetainedCache, request: Any) -> None: ...
    @property
    def holds_blocks(self) -> bool: ...
    @property
    def boundary_tokens(self) -> int: ...
    @property
    def next_event_tokens(self) -> int: ...
    def admit(self, key_table: Any) -> int:
        """The request has got blocks; returns the tokens that it need not compute."""

    def find_shared(self, key_table: Any, hit_tokens: int, num_prompt_tokens: int) -> list[int]:
        """Per full-attention group, up to which token the prompt is cached."""

    def find_evicted(self, after_tokens: int, upto_tokens: int) -> int:
        """The longest boundary of the prompt whose checkpoint was evicted; 0 if there is none."""

    def want(self, boundary_tokens: int) -> None:
        """It would have resumed at a boundary that is gone."""

    def set_plan(
        self, plan: list[tuple[int, int, int]], stops_tokens: list[int], replay_tokens: int
    ) -> None:
        """Boundaries to keep: tokens, origin and step of each, sorted by tokens.

        Args:
            stops_tokens: Those at which a prefill step is to end, ascending.
        """

    def next_stop_tokens(self, computed_tokens: int) -> int | None:
        """The first of these past what is computed."""

    def cache(self, retention: Any, num_computed_tokens: int) -> None:
        """See `CheckpointRetention.cache`."""

    def before_skip(self, retention: Any, total_computed_tokens: int, is_settled: bool) -> int:
        """See `CheckpointRetention.before_skip`."""

    def release(self, retention: Any, computed_tokens: int, own_tokens: int) -> None:
        """Settle what it leaves behind.

        Args:
            computed_tokens: What it really computed.
            own_tokens: As far as who comes back reads.
        """

    def held_blocks(self) -> list[int]:
        """Ids of blocks that have left a window and that a coming checkpoint needs."""

class UseRates:
    """How useful checkpoints turn out: ``csrc/retention/use_rates.h``. Ages are in pools."""

    def is_worth_trying(self, reason: ReasonTuple) -> bool:
        """Whether to leave one more checkpoint that nobody asked for."""

    def expected_uses(self, reason: ReasonTuple) -> float: ...
    def uses_per_pool(self, reason: ReasonTuple, age_pools: float) -> float: ...
    def count_eviction(self, reason: ReasonTuple) -> None: ...
    def note_age(self, reason: ReasonTuple, age_pools: float, seen_ages: int) -> int:
        """Count a checkpoint that has grown so old unused; returns how many ages it was seen at."""

    def count_use(self, reason: ReasonTuple, age_pools: float, seen_ages: int) -> None: ...
    def count_missed_use(self, reason: ReasonTuple, age_pools: float, seen_ages: int) -> None: ...
