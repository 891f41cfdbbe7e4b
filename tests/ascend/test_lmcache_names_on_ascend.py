# SPDX-License-Identifier: Apache-2.0
"""The names of LMCache's objects for the groups that vllm-ascend plans."""

from __future__ import annotations

import pytest

pytest.importorskip(
    "vllm_ascend",
    reason="needs KVEXT_ASCEND_SOURCES and a pytest process that runs tests/ascend alone",
)

from ascend_geometry import HIT_UNIT_TOKENS, planned_config
from vllm.config import VllmConfig

from vllm_ascend_kvext.lmcache.object_names import config_fingerprint
from vllm_ascend_kvext.lmcache.token_blocks import (
    counted_in_tokens,
    require_chunks_of_whole_blocks,
    tokens_per_block,
)


def fingerprint(block_size: int) -> str:
    return config_fingerprint(
        VllmConfig(),
        counted_in_tokens(planned_config(block_size)),
        versions={},
        instruction_set="",
        environ={},
    )


def test_every_block_size_has_a_name_of_its_own() -> None:
    assert len({fingerprint(block_size) for block_size in HIT_UNIT_TOKENS}) == len(HIT_UNIT_TOKENS)
    assert fingerprint(128) == fingerprint(128)


@pytest.mark.parametrize("block_size", HIT_UNIT_TOKENS)
def test_the_unit_of_chunks_is_that_of_hits(block_size: int) -> None:
    tokens = tokens_per_block(planned_config(block_size), 1)
    require_chunks_of_whole_blocks(HIT_UNIT_TOKENS[block_size], tokens, "tcp://host:1")
