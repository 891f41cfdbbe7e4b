# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vllm-ascend-kvext project
"""Keeps the state of this package with upstream's objects, in one attribute ``_kvext`` of each.

There is one class of state for each class of object. The state is made at the first access::

    RequestState.of(request).hit_tokens = 512     # request._kvext.hit_tokens

The state is freed with its object. If a feature is taken back, its state stays and has no effect.
The module imports nothing at run time; the type checker alone imports the types.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, TypeVar

if TYPE_CHECKING:
    from array import array

    from vllm_ascend_kvext.counted import Report
    from vllm_ascend_kvext.prefix_cache.keys import GroupKeys
    from vllm_ascend_kvext.prefix_cache.limits import RequestLimits
    from vllm_ascend_kvext.prefix_cache.steps import Steps
    from vllm_ascend_kvext.retention.checkpoint_retention import CheckpointRetention

_State = TypeVar("_State", bound="_OfObject")


class _OfObject:
    __slots__ = ()

    @classmethod
    def of(cls: type[_State], owner: Any) -> _State:
        """The state of an object of upstream that can have further attributes."""
        try:
            state: _State = owner._kvext
        except AttributeError:
            state = cls()
            owner._kvext = state
        return state


@dataclass(slots=True)
class RequestState(_OfObject):
    """State of a ``vllm.v1.request.Request``."""

    limits: RequestLimits | None = None

    hit_tokens: int = 0
    """The tokens that the prefix cache had when the request was last admitted."""

    has_failed_load: bool = False
    """Whether the request was started again because a load failed."""

    has_reported_hints: bool = False
    """Whether hints that cannot be used have been logged."""

    token_ids: array[int] | None = None
    """The first tokens of the request, in the form that workers copy fastest."""


@dataclass(slots=True)
class PoolState(_OfObject):
    """State of a ``vllm.v1.core.block_pool.BlockPool``."""

    group_keys: dict[tuple[int, int], GroupKeys] = field(default_factory=dict)
    """The keys of a group, by group id and tokens per block."""

    on_uncached: Callable[[list[Any]], None] | None = None
    """Called with free blocks that have left the prefix cache and will be reallocated next. None if
    only upstream keeps records of the pool."""


@dataclass(slots=True)
class CoordinatorState(_OfObject):
    """State of a ``vllm.v1.core.kv_cache_coordinator.KVCacheCoordinator``."""

    full_groups: tuple[tuple[int, int], ...] | None = None
    """The group id and the tokens per block of each full-attention group; None before first use."""

    retention: CheckpointRetention | None = None
    """Decides which blocks are cached, and when; None if upstream decides. It is set when the block
    manager is made."""

    interval_tokens: int = 0
    """The distance of the boundaries that retention always keeps; 0 if there are none."""

    waits_for_drafts: bool = False
    """Whether windows move past a token only when no rejected draft can take the token back."""


@dataclass(slots=True)
class BlockManagerState(_OfObject):
    """State of a ``vllm.v1.core.kv_cache_manager.KVCacheManager``."""

    features: set[str] = field(default_factory=set)
    """The features that bind methods of this manager and of its parts."""

    steps: Steps | None = None
    """Steps of running requests, if the fast path handles them."""


@dataclass(slots=True)
class SchedulerState(_OfObject):
    """State of a ``vllm.v1.core.sched.scheduler.Scheduler``."""

    steps_in_flight: Any = None
    """The steps whose outputs are still to come, as the repair ``discarded-frames`` keeps them.
    None before the first step, and if the scheduler processes outputs in a method of its own."""

    has_looked_at_outputs: bool = False
    """Whether ``steps_in_flight`` has been decided."""


@dataclass(slots=True)
class ReportsState(_OfObject):
    """State of the stat loggers and of the output processor, which pass on reports of retention."""

    observe: Callable[[Report, int], None] | None = None
    """Adds the report of one engine, by its index, to Prometheus."""

    counts: Report = field(default_factory=dict)
    """Counts that were reported, but not logged or recorded yet."""
