# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vllm-ascend-kvext project
"""The host tiers that are compared at equal bytes, each on vLLM's real scheduler."""

from __future__ import annotations

import enum
import gc
import math
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from typing import Any

from retention.layouts import BenchLayout
from retention.traces import Trace
from retention.variants import installed
from support.connector.held import held_by
from support.scheduler.layouts import Attention
from vllm.v1.kv_cache_interface import KVCacheConfig, KVCacheTensor

from host_tier.engine import Engine, HostTier, host_memory
from host_tier.model_connector import ModelTier
from host_tier.pages import pages_of
from host_tier.policies import Clairvoyant, Future, LruBlocks, LruChunks, Policy, unit_names
from host_tier.pools import footprint_bytes, page_bytes, row_bytes_per_token, tail_bytes, tight_pool
from host_tier.serving import Serving

BURST_TOKENS = 128
"""The tokens by which a decoding request advances in a step. Answers have up to 8,000 tokens."""

POOL_SHARE = 0.02
"""The share of a trace that the device pool holds, if that is enough for its longest requests. The
device alone hits little, so that the difference between host tiers is seen."""

ENDLESS_BYTES = 1 << 60
"""The size of an endless tier. It is only counted, and not allocated."""

LMCACHE_CHUNK_TOKENS = 256
"""LMCache's default."""

RETENTION_INTERVAL = 0
"""What vLLM 0.30 keeps of windows by default, on the device and in its host memory."""


class Contender(enum.Enum):
    """What is compared."""

    DEVICE = "device"
    """The device pool, without a host tier."""

    ENDLESS = "endless"
    """Plain LRU by block in endless memory."""

    LRU = "lru"
    """Plain LRU by block: everything that is computed is stored."""

    LMCACHE = "lmcache"
    """A model of LMCache's policy."""

    VLLM = "vllm"
    """vLLM's OffloadingConnector by default: prompts are stored."""

    VLLM_ANSWERS = "vllm+answers"
    """vLLM's OffloadingConnector, with ``offload_prompt_only`` off."""

    KVEXT = "kvext"
    """KvextConnector with its defaults."""

    CLAIRVOYANT = "clairvoyant"
    """A tier that knows what will be asked for. It is a bound."""

    @property
    def has_size(self) -> bool:
        """Whether the result depends on the size of host memory."""
        return self not in (Contender.DEVICE, Contender.ENDLESS)


PEERS = (Contender.LRU, Contender.LMCACHE, Contender.VLLM, Contender.VLLM_ANSWERS)


@dataclass(frozen=True, slots=True)
class Served:
    """A trace, served with one host tier.

    Attributes:
        hit_tokens: The tokens of prompts that were not computed, on the device or from host memory.
        shared_tokens: What an endless cache would hit, with blocks of the layout's hash.
        order: The numbers of the requests in the order of their admission.
        num_leaks: The blocks that KvextConnector holds at the end. It must be 0.
        refused: Why there is no result; empty if there is one.
    """

    prompt_tokens: int = 0
    hit_tokens: int = 0
    shared_tokens: int = 0
    host_bytes: int = 0
    held_bytes: int = 0
    scheduler_s: float = 0.0
    num_steps: int = 0
    num_preemptions: int = 0
    num_leaks: int = 0
    order: tuple[int, ...] = ()
    refused: str = ""

    @property
    def hit_rate(self) -> float:
        return self.hit_tokens / self.prompt_tokens


class Match:
    """A trace on a layout, for contenders one after the other."""

    def __init__(self, layout: BenchLayout, trace: Trace) -> None:
        self.trace = trace
        self.num_blocks = tight_pool(layout, trace, POOL_SHARE)
        self.pages = pages_of(layout.name, self.num_blocks)
        self.layout = replace(layout, to_config=self._to_config)
        self.footprint_bytes = footprint_bytes(trace, self.pages)
        self._plan = layout.to_config

    def serve(
        self,
        contender: Contender,
        host_bytes: int = 0,
        order: Sequence[int] = (),
        options: Mapping[str, Any] | None = None,
    ) -> Served:
        """Serve the trace.

        Args:
            host_bytes: The bytes of host memory, for contenders that have a size.
            order: For the clairvoyant tier, the order in which requests will be admitted.
            options: Further options of KvextConnector.

        Raises:
            DoesNotFitError: A request does not fit into the device pool.
        """
        tier = self._tier(contender, host_bytes, order, options or {})
        with _entered(contender):
            try:
                engine = Engine(self.layout, self.num_blocks, tier)
            except (AssertionError, ValueError) as error:
                return Served(refused=f"{type(error).__name__}: {error}".splitlines()[0])
            gc.collect()
            gc.disable()
            try:
                unit_tokens = self.layout.hash_block_tokens
                serving = Serving(engine, self.trace, unit_tokens, unit_tokens, BURST_TOKENS)
                outcome = serving.run()
            finally:
                gc.enable()
        side = engine.side
        held_bytes = tier.policy.held_bytes if isinstance(tier, ModelTier) else 0
        if side is not None:
            held_bytes = side.counters.tier.bytes_held
        return Served(
            prompt_tokens=outcome.prompt_tokens,
            hit_tokens=outcome.hit_tokens,
            shared_tokens=outcome.shared_tokens,
            host_bytes=host_bytes,
            held_bytes=held_bytes,
            scheduler_s=outcome.scheduler_s,
            num_steps=outcome.num_steps,
            num_preemptions=outcome.num_preemptions,
            num_leaks=side.references.num_references + len(held_by(side).pinned_ids) if side else 0,
            order=tuple(serving.admitted),
        )

    def _tier(
        self,
        contender: Contender,
        host_bytes: int,
        order: Sequence[int],
        options: Mapping[str, Any],
    ) -> HostTier | None:
        if contender is Contender.DEVICE:
            return None
        if contender is Contender.KVEXT:
            more_options = tuple(options.items())
            return host_memory(self.pages, host_bytes, None, None, more_options, plans=False)
        if contender in (Contender.VLLM, Contender.VLLM_ANSWERS):
            from host_tier.vllm_offloading import OffloadingMemory

            return OffloadingMemory(host_bytes, contender is Contender.VLLM_ANSWERS)
        return ModelTier(self._policy(contender, host_bytes, order))

    def _policy(self, contender: Contender, host_bytes: int, order: Sequence[int]) -> Policy:
        layout = self.layout
        hash_tokens = layout.hash_block_tokens
        sizes = page_bytes(self.pages)
        if contender is Contender.LMCACHE:
            chunk_tokens = math.lcm(LMCACHE_CHUNK_TOKENS, layout.unit_tokens)
            pairs = zip(sizes, layout.groups, strict=True)
            chunk_bytes = sum(size * (chunk_tokens // group.block_tokens) for size, group in pairs)
            return LruChunks(chunk_tokens, chunk_bytes, hash_tokens, host_bytes)
        if contender is Contender.CLAIRVOYANT:
            unit_tokens = max(128, hash_tokens)
            names = {
                number: unit_names(
                    traced.prompt.block_hashes(hash_tokens),
                    unit_tokens // hash_tokens,
                    traced.num_prompt_tokens,
                    unit_tokens,
                )
                for number, traced in enumerate(self.trace.requests)
            }
            future = Future(order, names)
            unit_bytes = round(unit_tokens * row_bytes_per_token(self.pages))
            tail = tail_bytes(self.pages)
            return Clairvoyant(future, unit_tokens, hash_tokens, unit_bytes, tail, host_bytes)
        is_state = [group.attention is Attention.MAMBA for group in layout.groups]
        num_bytes = host_bytes if contender is Contender.LRU else ENDLESS_BYTES
        return LruBlocks(layout.needs, sizes, is_state, layout.unit_tokens, hash_tokens, num_bytes)

    def _to_config(self, num_blocks: int) -> KVCacheConfig:
        """The configuration as vLLM 0.30 has it by default, with the bytes of a block."""
        config = self._plan(num_blocks)
        tensors = config.kv_cache_tensors
        if not tensors:
            # The groups share the memory of a block, which is as large as the largest page.
            size = max(page_bytes(self.pages))
            names = [name for group in config.kv_cache_groups for name in group.layer_names]
            tensors = [KVCacheTensor(size * num_blocks, names, 0, size)]
        return replace(
            config, kv_cache_tensors=tensors, prefix_cache_retention_interval=RETENTION_INTERVAL
        )


@contextmanager
def _entered(contender: Contender) -> Iterator[None]:
    """What a contender needs in this process, inside the block."""
    with ExitStack() as stack:
        if contender is Contender.KVEXT:
            stack.enter_context(installed(None))
        elif contender in (Contender.VLLM, Contender.VLLM_ANSWERS):
            from host_tier.vllm_offloading import without_padding

            stack.enter_context(without_padding())
        yield
