# SPDX-License-Identifier: Apache-2.0
"""What we remember with upstream's objects: one attribute, ``_kvext``, on each of them.

There is one kind of state for each kind of object, made at the first look at it::

    RequestState.of(request).hit_tokens = 512     # request._kvext.hit_tokens

State goes when its object does. Features that are taken back leave it there, without effect.
Imports nothing: types are named for the type checker alone.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, TypeVar

if TYPE_CHECKING:
    from array import array

    from vllm_ascend_kvext._native import RetainedCache
    from vllm_ascend_kvext.counted import Report
    from vllm_ascend_kvext.patches.repairs.discarded_frames import StepsInFlight
    from vllm_ascend_kvext.prefix_cache.keys import GroupKeys
    from vllm_ascend_kvext.prefix_cache.limits import RequestLimits
    from vllm_ascend_kvext.prefix_cache.lookup import Lookup
    from vllm_ascend_kvext.prefix_cache.runs import TailRule
    from vllm_ascend_kvext.prefix_cache.steps import Steps
    from vllm_ascend_kvext.retention.checkpoint_retention import CheckpointRetention

_State = TypeVar("_State", bound="_OfObject")


class _OfObject:
    __slots__ = ()

    @classmethod
    def of(cls: type[_State], owner: Any) -> _State:
        """The state of an object of upstream, which has room for one."""
        try:
            state: _State = owner._kvext
        except AttributeError:
            state = owner._kvext = cls()
        return state


@dataclass(slots=True)
class RequestState(_OfObject):
    """State of a ``vllm.v1.request.Request``."""

    limits: RequestLimits | None = None
    hit_tokens: int = 0  # Found in the prefix cache when it was admitted last.
    has_failed_load: bool = False  # It was started again for a load that failed.
    has_reported_hints: bool = False  # The log has been told of hints that cannot be used.
    token_ids: array[int] | None = None  # Its first tokens, as workers copy them fastest.


@dataclass(slots=True)
class PoolState(_OfObject):
    """State of a ``vllm.v1.core.block_pool.BlockPool``."""

    group_keys: dict[tuple[int, int], GroupKeys] = field(default_factory=dict)
    """By group id and tokens per block."""

    retained: RetainedCache | None = None
    """The checkpoints that decide what is reallocated next, if any do."""


@dataclass(slots=True)
class GroupManagerState(_OfObject):
    """State of a ``SingleTypeKVCacheManager``."""

    tail_rule: tuple[bool, TailRule | None] | None = None
    """Whether blocks are left out when it caches, and the rule where it is known. Set when it first
    caches."""


@dataclass(slots=True)
class CoordinatorState(_OfObject):
    """State of a ``vllm.v1.core.kv_cache_coordinator.KVCacheCoordinator``."""

    lookup: Lookup | None = None
    """Looks all groups up; None where upstream has to, and before the first lookup."""

    has_described_lookup: bool = False  # ``lookup`` has been decided on.
    full_groups: tuple[tuple[int, int], ...] | None = None
    """Group id and tokens per block of each full-attention group, once asked for."""

    retention: CheckpointRetention | None = None
    """What decides which blocks are cached, and when, if it is not upstream. Set before the first
    step."""


@dataclass(slots=True)
class BlockManagerState(_OfObject):
    """State of a ``vllm.v1.core.kv_cache_manager.KVCacheManager``."""

    steps: Steps | None = None  # Set with its first step.


@dataclass(slots=True)
class SchedulerState(_OfObject):
    """State of a ``vllm.v1.core.sched.scheduler.Scheduler``."""

    steps_in_flight: StepsInFlight | None = None
    """Those whose outputs are still to come; None where the scheduler processes outputs in a method
    of its own, and before the first step."""

    has_looked_at_outputs: bool = False  # ``steps_in_flight`` has been decided on.


@dataclass(slots=True)
class ReportsState(_OfObject):
    """State of what passes reports of retention on: stat loggers and the output processor."""

    observe: Callable[[Report, int], None] | None = None
    """Adds the report of one engine, by its index, to Prometheus."""

    counts: Report = field(default_factory=dict)  # Reported, and not logged or recorded so far.
