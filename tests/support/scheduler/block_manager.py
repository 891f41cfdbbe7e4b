# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vllm-ascend-kvext project
"""Builds vLLM's real ``KVCacheManager``, and serves requests on it without scheduler and model.

It is for tests that enumerate lengths: one request at a time, with every step written out. For
batches, priorities and asynchronous scheduling, there is the scheduler harness.
"""

from __future__ import annotations

import itertools
import math
import os
from collections.abc import Iterable, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any
from unittest import mock

from vllm.config import KVTransferConfig
from vllm.sampling_params import SamplingParams
from vllm.utils.hashing import sha256
from vllm.v1.core.kv_cache_manager import KVCacheManager
from vllm.v1.core.kv_cache_utils import get_request_block_hasher, init_none_hash
from vllm.v1.kv_cache_interface import KVCacheSpec
from vllm.v1.request import Request, RequestStatus

from .layouts import Attention, Group, config_of
from .releases import INTERVAL_VARIABLE, look_up

_request_ids = itertools.count()
init_none_hash(sha256)


def full(block_tokens: int) -> KVCacheSpec:
    return Group(Attention.FULL, block_tokens).to_spec()


def window(block_tokens: int, window_tokens: int, head_size: int = 1) -> KVCacheSpec:
    """A window group. Groups of equal windows differ in ``head_size``."""
    return Group(Attention.WINDOW, block_tokens, window_tokens).to_spec(head_size=head_size)


def mamba(block_tokens: int, mode: str = "align", draft_blocks: int = 0) -> KVCacheSpec:
    group = Group(Attention.MAMBA, block_tokens)
    return group.to_spec(mamba_cache_mode=mode, num_speculative_blocks=draft_blocks)


@dataclass(frozen=True)
class Layout:
    """The groups of a model, with the ids of those that look ahead (EAGLE/MTP).

    Without a connector, vLLM-Ascend 0.30's lookups do not look ahead.
    """

    specs: tuple[KVCacheSpec, ...]
    eagle_group_ids: frozenset[int] = frozenset()
    has_connector: bool = False


@contextmanager
def retention_interval(interval: int | str | None) -> Iterable[None]:
    """The environment in which a block manager is built."""
    with mock.patch.dict(os.environ):
        os.environ.pop(INTERVAL_VARIABLE, None)
        if interval is not None:
            os.environ[INTERVAL_VARIABLE] = str(interval)
        yield


class BlockManager:
    """A ``KVCacheManager`` that is told each step of each request.

    ``num_blocks`` includes the null block. ``interval`` is in effect while the manager is built.
    ``arguments`` are those of ``KVCacheManager``.
    """

    def __init__(
        self,
        layout: Layout,
        interval: int | str | None = None,
        num_blocks: int = 4096,
        events: bool = False,
        **arguments: Any,
    ) -> None:
        sizes = [spec.block_size for spec in layout.specs]
        arguments = {
            "max_model_len": 1 << 20,
            "scheduler_block_size": math.lcm(*sizes),
            "hash_block_size": math.gcd(*sizes),
            "enable_caching": True,
            "use_eagle": bool(layout.eagle_group_ids),
            "log_stats": False,
            "enable_kv_cache_events": events,
            **arguments,
        }
        with retention_interval(interval):
            config = config_of(layout.specs, layout.eagle_group_ids, num_blocks)
            if layout.has_connector:
                config.kv_transfer_config = KVTransferConfig(kv_connector="any", kv_role="kv_both")
            self.manager = KVCacheManager(config, **arguments)
        self.pool = self.manager.block_pool
        self._hasher = get_request_block_hasher(arguments["hash_block_size"], sha256)

    def request(self, token_ids: Sequence[int], **arguments: object) -> Request:
        request = Request(
            request_id=f"request-{next(_request_ids)}",
            prompt_token_ids=list(token_ids),
            sampling_params=SamplingParams(max_tokens=1 << 20),
            pooling_params=None,
            block_hasher=self._hasher,
            **arguments,
        )
        request.status = RequestStatus.RUNNING
        return request

    def hit_tokens(self, request: Request) -> int:
        """The tokens that a request would hit if it were scheduled for the first time now."""
        return self.manager.get_computed_blocks(request)[1]

    def admit(self, request: Request, chunk_tokens: int) -> int:
        """Look a request up, and schedule its first chunk. Return the hit tokens."""
        blocks, hit_tokens = look_up(self.manager, request)
        num_new_tokens = min(chunk_tokens, request.num_tokens - hit_tokens)
        allocated = self.manager.allocate_slots(request, num_new_tokens, hit_tokens, blocks)
        assert allocated is not None
        request.num_computed_tokens = hit_tokens + num_new_tokens
        return hit_tokens

    def step(self, request: Request, chunk_tokens: int = 1) -> None:
        """Schedule the next tokens of a running request."""
        num_new_tokens = min(chunk_tokens, request.num_tokens - request.num_computed_tokens)
        allocated = self.manager.allocate_slots(request, num_new_tokens)
        assert allocated is not None
        request.num_computed_tokens += num_new_tokens

    def prefill(self, request: Request, chunk_tokens: int) -> int:
        """Admit a request, and compute all of its tokens. Return the hit tokens."""
        hit_tokens = self.admit(request, chunk_tokens)
        while request.num_computed_tokens < request.num_tokens:
            self.step(request, chunk_tokens)
        return hit_tokens

    def decode(self, request: Request, token_ids: Iterable[int]) -> None:
        """Append tokens. Each token is computed in the step after the one that sampled it."""
        for token_id in token_ids:
            if request.num_computed_tokens < request.num_tokens:
                self.step(request)
            request.append_output_token_ids(token_id)

    def preempt(self, request: Request) -> None:
        self.manager.free(request)
        request.num_computed_tokens = 0
        request.num_preemptions += 1

    def finish(self, request: Request) -> None:
        request.status = RequestStatus.FINISHED_LENGTH_CAPPED
        self.manager.free(request)

    def reset(self) -> None:
        assert self.manager.reset_prefix_cache()
