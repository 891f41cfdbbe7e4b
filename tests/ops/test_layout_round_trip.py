# SPDX-License-Identifier: Apache-2.0
"""Every layout that the installed vLLM makes: stored, loaded elsewhere, compared byte by byte."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial

import pytest
from support.layout import fixtures as layout_fixtures
from support.layout.eleven_groups import eleven_groups
from support.layout.fixtures import latent_rows
from support.layout.round_trip import Mover, movers, round_trip
from support.layout.truth import LayoutFixture
from support.transfer.ascend_backends import simulated_backends
from vllm.config import VllmConfig
from vllm.model_executor.layers.mamba.mamba_utils import get_conv_state_layout
from vllm.v1.attention.backends.cpu_attn import CPUAttentionBackend

from vllm_ascend_kvext.groups.model import GroupKind
from vllm_ascend_kvext.groups.specs import read_cache_groups
from vllm_ascend_kvext.layout.build import build_layout
from vllm_ascend_kvext.layout.errors import LayoutError
from vllm_ascend_kvext.layout.fingerprint import layout_fingerprint
from vllm_ascend_kvext.layout.page_format import PageFormat, read_page_format
from vllm_ascend_kvext.layout.rows import TokenRange
from vllm_ascend_kvext.layout.views import storage_tensors
from vllm_ascend_kvext.layout.worker_config import WorkerConfig, read_worker_config

FIXTURES: dict[str, Callable[[], LayoutFixture]] = {
    "keys then values": layout_fixtures.keys_then_values,
    "keys and values by page": layout_fixtures.keys_and_values_by_page,
    "heads outside tokens": layout_fixtures.heads_outside_tokens,
    "kernel blocks": layout_fixtures.kernel_blocks,
    "kernel blocks apart": layout_fixtures.kernel_blocks_apart,
    "CPU attention": layout_fixtures.cpu_attention,
    "latent rows": layout_fixtures.latent_rows,
    "attention and Mamba": layout_fixtures.attention_and_mamba,
    "eleven groups": eleven_groups,
}
if layout_fixtures.HAS_DEEPSEEK_V4:
    FIXTURES["DeepSeek-V4, packed"] = partial(layout_fixtures.deepseek_v4, "fp8_ds_mla", 9)
    FIXTURES["DeepSeek-V4, bfloat16"] = partial(layout_fixtures.deepseek_v4, "auto", 9)

RANGES = {
    "from the start": TokenRange(0, 256),
    "whole pages": TokenRange(1024, 1280),
    "cut pages": TokenRange(1030, 1277),
    "less than a row": TokenRange(1030, 1031),
}


PAGE_FORMAT = PageFormat("cpu", ("TESTS",), "", "auto", "SD", "ND")


@pytest.fixture(scope="module")
def all_movers(tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, Mover]]:
    """The Ascend backends on a simulated device among them."""
    with simulated_backends(tmp_path_factory.mktemp("shim")) as backends:
        yield movers(backends)


@pytest.mark.parametrize("tokens", RANGES)
@pytest.mark.parametrize("name", FIXTURES)
def test_round_trip(name: str, tokens: str, all_movers: dict[str, Mover]) -> None:
    if "Mamba" in name and RANGES[tokens].end % 16:
        pytest.skip("there is no state within a page")
    num_bytes = round_trip(FIXTURES[name], RANGES[tokens], all_movers, seed=len(name))
    assert num_bytes or tokens == "less than a row"


@pytest.mark.parametrize("name", FIXTURES)
def test_scheduler_and_worker_read_the_same_groups(name: str) -> None:
    """Bundles on the worker's side, their first spec on the scheduler's."""
    fixture = FIXTURES[name]()
    groups = read_cache_groups(fixture.config, 1)
    assert groups == read_cache_groups(fixture.scheduler_config, 1)
    for index, group in enumerate(groups):
        reaches = fixture.reaches(index)
        assert {reach.kind for reach in reaches} == {group.kind}
        assert {reach.tokens_per_page for reach in reaches} == {group.tokens_per_page}
        assert {reach.window_tokens for reach in reaches} == {group.window_tokens}
        assert {reach.holds_states for reach in reaches} == {group.holds_states}


@pytest.mark.parametrize("name", FIXTURES)
def test_another_worker_has_the_same_fingerprint(name: str) -> None:
    """Whatever memory it got."""
    one, other = (
        layout_fingerprint(
            FIXTURES[name]().layout(), model={"name": name}, parallel={}, page_format=PAGE_FORMAT
        )
        for _ in range(2)
    )
    assert one == other


def test_layouts_have_different_fingerprints() -> None:
    found = {
        layout_fingerprint(make().layout(), model={}, parallel={}, page_format=PAGE_FORMAT)
        for make in FIXTURES.values()
    }
    # Where a page is one row, only the kernels' format says how it was cut into blocks.
    assert len(found) >= len(FIXTURES) - 1


@pytest.mark.skipif(not layout_fixtures.HAS_DEEPSEEK_V4, reason="needs vLLM 0.23.0")
def test_deepseek_v4_byte_for_byte() -> None:
    """By hand: rows of 584 bytes, pages padded to multiples of 576, layers sharing page sizes."""
    layout = layout_fixtures.deepseek_v4("fp8_ds_mla", num_blocks=4).layout()
    assert {
        (
            group.kind,
            group.tokens_per_page,
            plane.page_stride_bytes,
            plane.row_bytes,
            group.rows_per_page,
        )
        for group in layout.groups
        for plane in group.planes
    } == {
        (GroupKind.FULL, 256, 37440, 64 * 584, 1),  # attention of ratio 4
        (GroupKind.FULL, 256, 8640, 64 * 132, 1),  # keys and scales of the indexer
        (GroupKind.FULL, 256, 1728, 2 * 584, 1),  # attention of ratio 128
        (GroupKind.WINDOW, 64, 37440, 64 * 584, 1),
        (GroupKind.WINDOW, 4, 37440, 8192, 4),  # compressor of ratio 4
        (GroupKind.WINDOW, 4, 8640, 2048, 4),  # of the indexer
        (GroupKind.WINDOW, 8, 37440, 4096, 8),  # compressor of ratio 128
    }
    assert layout.num_scheduler_groups == 5


@pytest.mark.parametrize("name", ["decode_context_parallel_size", "prefill_context_parallel_size"])
def test_context_parallelism_is_refused(name: str) -> None:
    """Of vLLM's own config, whose scheduler then counts twice the tokens per block."""
    vllm_config = VllmConfig()
    setattr(vllm_config.parallel_config, name, 2)
    fixture = latent_rows()
    worker = read_worker_config(vllm_config, fixture.kv_caches)
    with pytest.raises(LayoutError, match="context parallelism: found a size of 2"):
        build_layout(fixture.config, fixture.kv_caches, worker)


def test_a_default_config_is_that_of_a_plain_worker() -> None:
    assert read_worker_config(VllmConfig(), {}) == WorkerConfig()


def test_the_page_format_of_a_default_config() -> None:
    vllm_config = VllmConfig()
    vllm_config.cache_config.cache_dtype = "fp8_e5m2"
    found = read_page_format(
        vllm_config,
        device_type="cpu",
        attention_backends=[CPUAttentionBackend.get_name()],
        instruction_set="amx",
        has_nz_pages=False,
        environ={},
    )
    assert found == PageFormat(
        "cpu", ("CPU_ATTN",), "amx", "fp8_e5m2", get_conv_state_layout(), "ND"
    )


def test_tensors_of_another_worker_are_refused() -> None:
    one, other = latent_rows(), latent_rows()
    with pytest.raises(LayoutError, match="no tensor has its storage"):
        storage_tensors(one.layout(), other.kv_caches)


@pytest.mark.parametrize("name", FIXTURES)
def test_groups_are_those_of_the_fixture(name: str) -> None:
    fixture = FIXTURES[name]()
    found = {
        (g.scheduler_group, g.kind, g.tokens_per_page, g.tokens_per_row, g.restart_tokens)
        for g in fixture.layout().groups
    }
    expected = {
        (
            paged.group,
            paged.reach.kind,
            paged.reach.tokens_per_page,
            paged.reach.tokens_per_row,
            paged.reach.restart_tokens,
        )
        for paged in fixture.tensors
    }
    assert found == expected
