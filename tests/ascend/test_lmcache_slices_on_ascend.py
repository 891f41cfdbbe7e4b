# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vllm-ascend-kvext project
"""The blocks that LMCache's connector sends for DeepSeek-V4's groups, against the rows they hold.

The groups are those that vllm-ascend plans, the slices are cut by the installed LMCache.
"""

from __future__ import annotations

from typing import Any

import pytest

pytest.importorskip(
    "vllm_ascend",
    reason="needs KVEXT_ASCEND_SOURCES and a pytest process that runs tests/ascend alone",
)
pytest.importorskip(
    "lmcache.integration", reason="LMCache is not installed here: see `make test-lmcache`"
)

from ascend_geometry import HIT_UNIT_TOKENS, planned_config
from lmcache.integration.vllm import lmcache_mp_connector as connector
from lmcache.integration.vllm import lmcache_mp_metadata as metadata
from support.layout.upstream_line import HAS_ONE_VIEW
from vllm import SamplingParams
from vllm.config import VllmConfig
from vllm.v1.kv_cache_interface import KVCacheConfig
from vllm.v1.request import Request

from vllm_ascend_kvext.lmcache.token_blocks import counted_in_tokens

PROMPTS_TOKENS = (1024, 8192, 16384, 17000, 40000)


class Pages:
    """Block ids of one group, and the contents of each of their rows, by token."""

    def __init__(self, spec: Any, prompt_tokens: int, first_id: int) -> None:
        tokens_per_row = getattr(spec, "compress_ratio", None) or 1
        tokens_per_block = spec.block_size * tokens_per_row
        self.block_of_token = [
            first_id + token // tokens_per_row // spec.block_size for token in range(prompt_tokens)
        ]
        self.ids = sorted(set(self.block_of_token))
        self.whole = prompt_tokens // tokens_per_block

    def of(self, first_token: int, end_token: int) -> list[int]:
        return sorted(set(self.block_of_token[first_token:end_token]))


def stored(
    config: KVCacheConfig, pages: list[Pages], prompt_tokens: int, chunk_tokens: int
) -> tuple[tuple[int, int], list[list[int]]] | None:
    """The part of a computed prompt that LMCache would store: tokens, and ids per group."""
    sampling = SamplingParams(max_tokens=1)
    request = Request("a", list(range(prompt_tokens)), sampling, None)
    tracker = metadata.LMCacheMPRequestTracker(request)
    tracker.state = metadata.LMCacheMPRequestState.READY
    tracker.append_block_ids(tuple(group.ids for group in pages))
    tracker.increase_num_scheduled_tokens(prompt_tokens)
    group_tokens = connector.get_group_tokens_per_block(VllmConfig(), config)
    found = metadata.LMCacheMPRequestMetadata.GetStoreMetadata(tracker, chunk_tokens, group_tokens)
    return None if found is None else ((found.op.start, found.op.end), found.op.block_ids)


def pages_of(config: KVCacheConfig, prompt_tokens: int) -> list[Pages]:
    return [
        Pages(group.kv_cache_spec, prompt_tokens, first_id=1000 * (index + 1))
        for index, group in enumerate(config.kv_cache_groups)
    ]


@pytest.mark.parametrize("prompt_tokens", PROMPTS_TOKENS)
@pytest.mark.parametrize("block_size", HIT_UNIT_TOKENS)
def test_what_is_sent_holds_the_tokens_that_it_is_sent_for(
    block_size: int, prompt_tokens: int
) -> None:
    config = planned_config(block_size)
    pages = pages_of(config, prompt_tokens)
    chunk_tokens = HIT_UNIT_TOKENS[block_size]
    found = stored(counted_in_tokens(config), pages, prompt_tokens, chunk_tokens)
    end_tokens = prompt_tokens // chunk_tokens * chunk_tokens
    if not end_tokens:
        assert found is None
        return
    assert found == ((0, end_tokens), [group.of(0, end_tokens) for group in pages])


@pytest.mark.parametrize("block_size", HIT_UNIT_TOKENS)
def test_a_missing_group_stores_nothing(block_size: int) -> None:
    config = planned_config(block_size)
    pages = pages_of(config, 40000)
    for missing in range(len(pages)):
        empty = Pages(config.kv_cache_groups[missing].kv_cache_spec, 0, first_id=1)
        some = [*pages[:missing], empty, *pages[missing + 1 :]]
        assert stored(counted_in_tokens(config), some, 40000, HIT_UNIT_TOKENS[block_size]) is None


@pytest.mark.skipif(HAS_ONE_VIEW, reason="vllm-ascend 0.30 counts tokens itself")
def test_without_it_rows_are_taken_for_tokens() -> None:
    """The defect: a prompt of a whole chunk is not stored, and pages of others are sent."""
    config = planned_config(128)
    assert stored(config, pages_of(config, 16384), 16384, 16384) is None
    chunk_tokens = 128
    found = stored(config, pages_of(config, 40000), 40000, chunk_tokens)
    assert found is not None
    (_, end_tokens), block_ids = found
    assert block_ids != [group.of(0, end_tokens) for group in pages_of(config, 40000)]


@pytest.mark.parametrize("block_size", HIT_UNIT_TOKENS)
def test_pages_are_as_large_as_they_were(block_size: int) -> None:
    config = planned_config(block_size)
    for old, new in zip(
        config.kv_cache_groups, counted_in_tokens(config).kv_cache_groups, strict=True
    ):
        assert new.kv_cache_spec.page_size_bytes == old.kv_cache_spec.page_size_bytes
