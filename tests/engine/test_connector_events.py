# SPDX-License-Identifier: Apache-2.0
"""KV events of the host tier say what vLLM's own events say of the same tokens.

That a router which follows them knows what is stored is checked by ``test_request_machine``.
"""

from __future__ import annotations

import random
from dataclasses import replace
from typing import Any

import pytest
from support.connector.engines import engine_of, plan_of
from support.connector.offload_workloads import offloading, tokens
from support.connector.paged_layouts import FULL
from vllm.distributed.kv_events import BlockStored

pytestmark = pytest.mark.usefixtures("offloading_in_effect")

BLOCK_TOKENS = FULL.groups[0].block_tokens


@pytest.mark.parametrize("are_integers", [False, True], ids=["bytes", "integers"])
@pytest.mark.parametrize("num_blocks", [1, 2])
@pytest.mark.parametrize(
    "names",
    [{}, {"cache_salt": "salt"}, {"adapter": "adapter-6"}, {"cache_salt": "s", "adapter": "a-1"}],
    ids=["plain", "salt", "adapter", "both"],
)
def test_an_entry_of_rows_is_one_block(
    names: dict[str, str], num_blocks: int, are_integers: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("VLLM_KV_EVENTS_USE_INT_BLOCK_HASHES", str(int(are_integers)))
    prompt = tokens(random.Random("events"), 4 * BLOCK_TOKENS + 1)
    stored: dict[str, list[Any]] = {"CPU": [], "GPU": []}
    with engine_of(
        FULL,
        caching=True,
        events=True,
        max_num_batched_tokens=BLOCK_TOKENS,
        offloading=offloading(FULL, chunk_tokens=num_blocks * BLOCK_TOKENS),
    ) as engine:
        engine.add_request(replace(plan_of("first", prompt, max_tokens=1), **names))
        while engine.has_work():
            engine.step()
            for event in engine.last_events:
                assert isinstance(event, BlockStored)
                stored[event.medium].append(event)
    assert len(stored["GPU"]) == 4 == num_blocks * len(stored["CPU"])
    for number, found in enumerate(stored["CPU"]):
        blocks = stored["GPU"][number * num_blocks :][:num_blocks]
        assert found == BlockStored(
            block_hashes=blocks[-1].block_hashes,
            parent_block_hash=blocks[0].parent_block_hash,
            token_ids=[token for block in blocks for token in block.token_ids],
            block_size=num_blocks * BLOCK_TOKENS,
            lora_id=blocks[0].lora_id,
            medium="CPU",
            lora_name=blocks[0].lora_name,
            extra_keys=blocks[0].extra_keys,
        )
        assert isinstance(found.block_hashes[0], int if are_integers else bytes)
