# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vllm-ascend-kvext project
"""The settings that a log is played with: which they are, and one play of one of them.

The module imports vLLM only when a play begins.
"""

from __future__ import annotations

import os
import statistics
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import TYPE_CHECKING, Any

from vllm_ascend_kvext.activation import register
from vllm_ascend_kvext.replay.trace import LoggedRequest
from vllm_ascend_kvext.settings import (
    MODE_VARIABLE,
    RETENTION_INTERVAL_VARIABLE,
    RETENTION_VARIABLE,
    Mode,
    Retention,
)
from vllm_ascend_kvext.store.store_policy import StorePolicy

if TYPE_CHECKING:
    from vllm_ascend_kvext.replay.geometry.model_config import PlannedModel
    from vllm_ascend_kvext.replay.logged_play import Pace

_GIB = 1 << 30


@dataclass(frozen=True, slots=True)
class Variant:
    """One way to serve the log.

    Attributes:
        name: The name in tables.
        policy: The retention policy of this package; None for vLLM alone.
        interval_tokens: vLLM's retention interval; None for dense caching.
        host_gib: The size of host memory of all workers together; 0 for none.
        is_shared: Whether a shared tier that never fills stands behind host memory.
        stores_all: Whether everything that is computed is stored, and put into the shared tier.
    """

    name: str
    policy: Retention | None = None
    interval_tokens: int | None = None
    host_gib: float = 0.0
    is_shared: bool = False
    stores_all: bool = False

    @property
    def needs_package(self) -> bool:
        return self.policy is not None or self.host_gib > 0


@dataclass(frozen=True, slots=True)
class VariantResult:
    """What a variant came to.

    Attributes:
        hit_tokens: The tokens of all prompts that did not have to be computed.
        endless_tokens: The tokens that an endless cache would have hit.
        computed_tokens: The computed tokens of prompts, with those that were computed again.
        host_bytes: The bytes in host memory at the end, on all workers.
        shared_bytes: The bytes in the shared tier at the end.
        waited_s: The mean time from arrival to the first step.
        duration_s: The time from the first arrival to the last answer, by the pace of the play.
        scheduler_s: The CPU time of the scheduler.
        reasons: Why loads were not longer, and why something was not stored, with counts.
        refusal: Why there is no result; empty if there is one.
    """

    name: str
    num_requests: int = 0
    prompt_tokens: int = 0
    hit_tokens: int = 0
    endless_tokens: int = 0
    computed_tokens: int = 0
    num_preemptions: int = 0
    host_bytes: int = 0
    shared_bytes: int = 0
    waited_s: float = 0.0
    duration_s: float = 0.0
    scheduler_s: float = 0.0
    reasons: Mapping[str, Mapping[str, int]] = field(default_factory=dict)
    refusal: str = ""

    @property
    def hit_rate(self) -> float:
        return self.hit_tokens / max(1, self.prompt_tokens)

    @property
    def endless_rate(self) -> float:
        return self.endless_tokens / max(1, self.prompt_tokens)

    def as_fields(self) -> dict[str, Any]:
        """All numbers, as plain data for JSON."""
        return asdict(self) | {"hit_rate": self.hit_rate, "endless_rate": self.endless_rate}


def list_variants(
    has_sparse_groups: bool,
    unit_tokens: int,
    intervals_tokens: Sequence[int],
    host_gibs: Sequence[float],
) -> list[Variant]:
    """The variants of one command.

    Args:
        has_sparse_groups: Whether retention has something to choose in this model.
        unit_tokens: Intervals are rounded up to a multiple of it.
        intervals_tokens: vLLM's retention intervals.
        host_gibs: The sizes of host memory, ascending.
    """
    variants = [Variant("dense caching")]
    policy = None
    if has_sparse_groups:
        rounded = [-(-tokens // unit_tokens) * unit_tokens for tokens in intervals_tokens]
        variants += [
            Variant(f"vLLM, interval {tokens:,}", None, tokens) for tokens in dict.fromkeys(rounded)
        ]
        policy = Retention.ADAPTIVE
        variants.append(Variant("adaptive retention", policy))
    behind = "adaptive + host" if has_sparse_groups else "dense + host"
    variants += [Variant(f"{behind} {gib:.3g} GiB", policy, host_gib=gib) for gib in host_gibs]
    if host_gibs:
        middle_gib = host_gibs[len(host_gibs) // 2]
        for ending, stores_all in ((" + shared", False), (" + shared, all", True)):
            name = f"{behind} {middle_gib:.3g} GiB{ending}"
            variants.append(Variant(name, policy, None, middle_gib, True, stores_all))
    return variants


def play_variant(
    variant: Variant,
    model: PlannedModel,
    requests: Iterable[LoggedRequest],
    pace: Pace,
    connector_options: Mapping[str, Any],
    on_progress: Callable[[int], object],
) -> VariantResult:
    """Play a log in this process, which serves this variant alone and then ends.

    Args:
        connector_options: Keys of ``kv_connector_extra_config`` besides those of the variant.
        on_progress: Called with the number of requests that have ended.

    Raises:
        TraceError: The log is wrong, or does not fit into the pool.
    """
    set_environment(variant)
    if variant.needs_package:
        register()
    from dataclasses import replace

    from vllm_ascend_kvext.replay.counted_tier import CountedTier
    from vllm_ascend_kvext.replay.engine import Engine, HostMemory, ScheduledModel
    from vllm_ascend_kvext.replay.geometry.model_config import with_interval
    from vllm_ascend_kvext.replay.logged_play import play

    interval_tokens = variant.interval_tokens
    config = with_interval(model.kv_cache_config, interval_tokens)
    host = None
    shared = CountedTier() if variant.is_shared else None
    if variant.host_gib:
        host_bytes = round(variant.host_gib * _GIB / model.num_workers)
        options = dict(connector_options)
        if variant.stores_all:
            options["store_policy"] = StorePolicy.ALL.value
        host = HostMemory(model.pages, host_bytes, options, shared, plans=False)
    engine = Engine(
        ScheduledModel(
            model.vllm_config, config, model.scheduler_block_tokens, model.hash_block_tokens
        ),
        host,
    )
    played = play(requests, engine, model.hash_block_tokens, pace, on_progress)
    outcome = played.outcome
    result = VariantResult(
        variant.name,
        num_requests=outcome.num_requests,
        prompt_tokens=outcome.prompt_tokens,
        hit_tokens=outcome.hit_tokens,
        endless_tokens=outcome.shared_tokens,
        computed_tokens=outcome.computed_tokens,
        num_preemptions=outcome.num_preemptions,
        waited_s=statistics.fmean(played.waited_s or [0.0]),
        duration_s=played.duration_s,
        scheduler_s=outcome.scheduler_s,
    )
    if engine.side is None:
        return result
    tier = engine.side.counters.tier
    return replace(
        result,
        host_bytes=tier.bytes_held * model.num_workers,
        shared_bytes=shared.num_bytes * model.num_workers if shared is not None else 0,
        reasons={
            "shortfalls": _named(tier.shortfalls),
            "refused stores": _named(tier.refused_stores),
        },
    )


def set_environment(variant: Variant) -> None:
    """Set the variables of this process as for an engine of a variant."""
    os.environ.pop(RETENTION_VARIABLE, None)
    os.environ.pop(RETENTION_INTERVAL_VARIABLE, None)
    if variant.needs_package:
        os.environ[MODE_VARIABLE] = Mode.SAFE.value
    if variant.policy is not None:
        os.environ[RETENTION_VARIABLE] = variant.policy.value
    if variant.interval_tokens is not None:
        os.environ[RETENTION_INTERVAL_VARIABLE] = str(variant.interval_tokens)


def _named(counts: Mapping[Any, int]) -> dict[str, int]:
    return {reason.value: count for reason, count in counts.items() if count}
