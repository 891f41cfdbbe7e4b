# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vllm-ascend-kvext project
"""Every layout that the installed vLLM makes: how it is read. `test_connector_pages` moves it."""

from __future__ import annotations

import pytest
from support.connector import paged_layouts
from support.connector.paged_layouts import PagedLayout
from support.layout.fixtures import FIXTURES, deepseek_v4, latent_rows
from support.layout.upstream_line import HAS_ONE_VIEW
from vllm.config import VllmConfig

from vllm_ascend_kvext.errors import LayoutError
from vllm_ascend_kvext.groups.model import GroupKind
from vllm_ascend_kvext.layout.worker_config import read_nz_layers


@pytest.mark.parametrize("name", FIXTURES)
def test_groups_are_those_of_the_fixture(name: str) -> None:
    FIXTURES[name]().check_groups()


@pytest.mark.parametrize(
    "layout",
    [*paged_layouts.LAYOUTS, *paged_layouts.STATE_LAYOUTS, *paged_layouts.UPSTREAM_LAYOUTS],
    ids=lambda layout: layout.name,
)
def test_groups_of_small_pages_are_those_of_the_fixture(layout: PagedLayout) -> None:
    layout.make(16).check_groups()


def test_deepseek_v4_byte_for_byte() -> None:
    """By hand: rows of 584 bytes, pages padded to multiples of 576.

    Layers share page sizes; since vLLM 0.30 those of a group lie side by side in a block.
    """
    layout = deepseek_v4("fp8_ds_mla", num_blocks=4).layout()
    page_bytes = {  # The page stride is larger where each layer has pages of its own.
        (GroupKind.FULL, 256, 64 * 584): 37440,  # attention of ratio 4
        (GroupKind.FULL, 256, 64 * 132): 8640,  # keys and scales of the indexer
        (GroupKind.FULL, 256, 2 * 584): 1728,  # attention of ratio 128
        (GroupKind.WINDOW, 64, 64 * 584): 37440,
        (GroupKind.WINDOW, 4, 4 * 8192): 37440,  # compressor of ratio 4
        (GroupKind.WINDOW, 4, 4 * 2048): 8640,  # of the indexer
        (GroupKind.WINDOW, 8, 8 * 4096): 37440,  # compressor of ratio 128
    }
    block_bytes = 21 * (37440 + 8640) + 20 * 1728
    assert {
        (group.kind, group.tokens_per_page, plane.row_bytes * group.rows_per_page): (
            plane.page_stride_bytes
        )
        for group in layout.groups
        for plane in group.planes
    } == {page: block_bytes if HAS_ONE_VIEW else size for page, size in page_bytes.items()}
    rows_of_states = {1} if HAS_ONE_VIEW else {4, 8}
    for group in layout.groups:
        assert group.rows_per_page in (rows_of_states if group.holds_states else {1})
    assert layout.num_scheduler_groups == 5


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("decode_context_parallel_size", "context parallelism: found a size of 2"),
        ("prefill_context_parallel_size", "context parallelism: found a size of 2"),
        ("pipeline_parallel_size", "found pipeline_parallel_size 2, expected 1"),
    ],
)
def test_parallelism_that_is_refused(name: str, message: str) -> None:
    """vLLM's own config makes its scheduler count twice the tokens per block."""
    vllm_config = VllmConfig()
    setattr(vllm_config.parallel_config, name, 2)
    with pytest.raises(LayoutError, match=message):
        read_nz_layers(vllm_config, latent_rows().kv_caches)


def test_pages_of_tiled_scales_are_refused() -> None:
    vllm_config = VllmConfig()
    vllm_config.cache_config.cache_dtype = "mxfp8"
    with pytest.raises(LayoutError, match="found mxfp8"):
        read_nz_layers(vllm_config, latent_rows().kv_caches)


def test_a_default_config_is_that_of_a_plain_worker() -> None:
    assert not read_nz_layers(VllmConfig(), {"a": None})
