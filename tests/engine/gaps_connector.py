# SPDX-License-Identifier: Apache-2.0
"""A connector of somebody else, written for vLLM's pull request 32785.

It keeps blocks of the prompts of requests that have ended, in a dictionary of this process, which
is both the scheduler's and the worker's. It loads them within a step, or between steps, and fills
blocks that it lacks, and those that it fails to load, with wrong keys and values.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import torch
from vllm.distributed.kv_transfer.kv_connector.v1.base import (
    KVConnectorBase_V1,
    KVConnectorMetadata,
)

KEPT: dict[tuple[int, ...], dict[str, torch.Tensor]] = {}
"""By all tokens up to a block's end, and by layer: a block."""

_WRONG = 1e3
"""Not NaN: attention on a CPU multiplies what lies behind a row in its last block by zero."""


@dataclass(frozen=True)
class Load:
    """Blocks of a request, and what belongs into each."""

    request_id: str
    keys: dict[int, tuple[int, ...]]


@dataclass
class Metadata(KVConnectorMetadata):
    loads: list[Load] = field(default_factory=list)


class GapsConnector(KVConnectorBase_V1):
    """``kv_connector_extra_config``: ``between_steps``; ``failing_block``, a number, or None."""

    def __init__(self, vllm_config: Any, role: Any, kv_cache_config: Any = None) -> None:
        super().__init__(vllm_config, role, kv_cache_config)
        extra = vllm_config.kv_transfer_config.kv_connector_extra_config
        self._between_steps = bool(extra["between_steps"])
        self._failing_block = extra.get("failing_block")
        self._block_tokens = vllm_config.cache_config.block_size
        self._num_blocks = kv_cache_config.num_blocks
        self._matched: dict[str, range] = {}
        self._metadata = Metadata()
        self._pages: dict[str, torch.Tensor] = {}
        self._received: set[str] = set()
        self._failed_ids: set[int] = set()

    # Scheduler.

    def get_num_new_matched_tokens(
        self, request: Any, num_computed_tokens: int
    ) -> tuple[int, bool]:
        first = num_computed_tokens // self._block_tokens
        blocks = range(first, (request.num_tokens - 1) // self._block_tokens)
        kept = [block for block in blocks if self._key(request, block) in KEPT]
        if not kept:
            return 0, False
        self._matched[request.request_id] = range(first, kept[-1] + 1)
        return (kept[-1] + 1) * self._block_tokens - num_computed_tokens, self._between_steps

    def get_computed_token_gaps(self, request: Any) -> list[tuple[int, int]] | None:
        size = self._block_tokens
        return [
            (block * size, (block + 1) * size)
            for block in self._matched.get(request.request_id, ())
            if self._key(request, block) not in KEPT
        ] or None

    def update_state_after_alloc(self, request: Any, blocks: Any, num_external_tokens: int) -> None:
        matched = self._matched.pop(request.request_id, None)
        if matched is None or not num_external_tokens:
            return
        (block_ids,) = blocks.get_block_ids()
        keys = {block_ids[block]: self._key(request, block) for block in matched}
        self._metadata.loads.append(Load(request.request_id, keys))

    def build_connector_meta(self, scheduler_output: Any) -> KVConnectorMetadata:
        metadata, self._metadata = self._metadata, Metadata()
        return metadata

    def request_finished(self, request: Any, block_ids: list[int]) -> tuple[bool, None]:
        for block in range(request.num_prompt_tokens // self._block_tokens):
            KEPT[self._key(request, block)] = {
                layer: page.clone() for layer, page in _pages_of(block_ids[block])
            }
        return False, None

    def _key(self, request: Any, block: int) -> tuple[int, ...]:
        return tuple(request.all_token_ids[: (block + 1) * self._block_tokens])

    # Worker.

    def register_kv_caches(self, kv_caches: dict[str, torch.Tensor]) -> None:
        _CACHES.clear()
        for layer, cache in kv_caches.items():
            _CACHES[layer] = cache.movedim(cache.shape.index(self._num_blocks), 0)

    def start_load_kv(self, forward_context: Any, **kwargs: Any) -> None:
        for load in self._get_connector_metadata().loads:
            for number, (block_id, key) in enumerate(load.keys.items()):
                kept = KEPT.get(key)
                fails = number == self._failing_block and kept is not None
                for layer, page in _pages_of(block_id):
                    if kept is None or fails:
                        page.fill_(_WRONG)
                    else:
                        page.copy_(kept[layer])
                if fails:
                    self._failed_ids.add(block_id)
                    self._failing_block = None
            if self._between_steps:
                self._received.add(load.request_id)

    def get_finished(self, finished_req_ids: set[str]) -> tuple[None, set[str] | None]:
        received, self._received = self._received, set()
        return None, received or None

    def get_block_ids_with_load_errors(self) -> set[int]:
        failed, self._failed_ids = self._failed_ids, set()
        return failed

    def wait_for_layer_load(self, layer_name: str) -> None:
        pass

    def save_kv_layer(self, *args: Any, **kwargs: Any) -> None:
        pass

    def wait_for_save(self) -> None:
        pass


_CACHES: dict[str, torch.Tensor] = {}
"""By layer; the first dimension is that of blocks."""


def _pages_of(block_id: int) -> list[tuple[str, torch.Tensor]]:
    return [(layer, cache[block_id]) for layer, cache in _CACHES.items()]
