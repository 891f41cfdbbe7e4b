# SPDX-License-Identifier: Apache-2.0
"""Makes KV events of the host tier for routers. `vllm.distributed.kv_events` publishes them.

There is one event per entry of rows. Its hash is the hash that vLLM's own events have for the block
that ends where the entry ends. Its parent is the hash where the entry begins. Tails have no events,
because no request can use them without the rows before them.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from vllm.distributed.kv_events import BlockRemoved, BlockStored
from vllm.v1.core.kv_cache_utils import generate_block_hash_extra_keys, maybe_convert_block_hash

from vllm_ascend_kvext.store.entries import Entry, Kind
from vllm_ascend_kvext.store.prefix import Prefix

if TYPE_CHECKING:
    from vllm.distributed.kv_events import KVCacheEvent
    from vllm.v1.request import Request

MEDIUM_CPU = "CPU"


class TierEvents:
    """Collects events until vLLM takes them. Without ``is_enabled`` it collects none."""

    def __init__(self, is_enabled: bool) -> None:
        self._is_enabled = is_enabled
        self._events: list[KVCacheEvent] = []
        # The numbers of the announced entries that end at a key, usually one number.
        self._announced: dict[bytes, set[int]] = {}

    def stored(self, entry: Entry, prefix: Prefix, request: Request) -> None:
        """Announce an entry that can be found from now on. The request may have ended."""
        kind, first_tokens, end_tokens = entry.piece
        if not self._is_enabled or kind is not Kind.ROWS:
            return
        self._announced.setdefault(entry.key, set()).add(entry.number)
        parent = prefix.key_at(first_tokens) if first_tokens else None
        lora = request.lora_request
        extra_keys, _ = generate_block_hash_extra_keys(request, first_tokens, end_tokens, 0)
        self._events.append(
            BlockStored(
                block_hashes=[maybe_convert_block_hash(entry.key)],
                parent_block_hash=None if parent is None else maybe_convert_block_hash(parent),
                token_ids=list(request.all_token_ids[first_tokens:end_tokens]),
                block_size=end_tokens - first_tokens,
                lora_id=lora.adapter_id if lora else None,
                medium=MEDIUM_CPU,
                lora_name=lora.name if lora else None,
                extra_keys=[extra_keys],
            )
        )

    def removed(self, entry: Entry) -> None:
        """Announce that an entry was removed. The event does not say why.

        There is no event while another entry ends at the same key, and none if this entry was not
        announced.
        """
        numbers = self._announced.get(entry.key)
        if numbers is None:
            return
        numbers.discard(entry.number)
        if numbers:
            return
        del self._announced[entry.key]
        self._events.append(
            BlockRemoved(block_hashes=[maybe_convert_block_hash(entry.key)], medium=MEDIUM_CPU)
        )

    def take(self) -> list[Any]:
        """Return the events since the last call, in their order."""
        events = self._events
        self._events = []
        return events
