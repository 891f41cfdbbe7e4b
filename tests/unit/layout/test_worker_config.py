# SPDX-License-Identifier: Apache-2.0
"""What tensors do not say: tiled pages, private formats, ratios of one group."""

from __future__ import annotations

import sys
from functools import partial
from types import ModuleType, SimpleNamespace

import pytest
from support.layout.fakes import (
    UINT8,
    FakeStorage,
    FakeTensor,
    MLAAttentionSpec,
    config,
    tensor,
)

from vllm_ascend_kvext.layout.build import build_layout
from vllm_ascend_kvext.layout.errors import LayoutError
from vllm_ascend_kvext.layout.worker_config import read_nz_layers

PAGES, TOKENS = 5, 16
LATENT = MLAAttentionSpec(block_size=TOKENS, head_size=32)
LAYERS = {"0.attn": tensor(PAGES, TOKENS, 1, 32), "1.attn": tensor(PAGES, TOKENS, 1, 32)}
LATENT_CONFIG = config(PAGES, (LATENT, *LAYERS))


QUANTIZATIONS = ("fa_quant", "c8_quant")
"""Of vLLM-Ascend; a config has the attributes of one of them."""


def vllm_config(
    quantization: str | None = None,
    layers: tuple[str, ...] = (),
    is_enabled: bool = True,
    **additional: object,
) -> SimpleNamespace:
    quant_config = None
    if quantization is not None:
        asks = f"is_{quantization}_layer"
        quant_config = SimpleNamespace(
            **{f"enable_{quantization}": is_enabled, asks: layers.__contains__}
        )
    return SimpleNamespace(
        parallel_config=SimpleNamespace(), additional_config=additional, quant_config=quant_config
    )


def test_a_plain_config_addresses_rows() -> None:
    (group,) = build_layout(LATENT_CONFIG, LAYERS, read_nz_layers(vllm_config(), LAYERS)).groups
    assert group.rows_per_page == TOKENS


def test_nz_pages_are_taken_whole() -> None:
    """``enable_kv_nz``: kernels write tiles of 16 elements, whatever the shape says."""
    nz_layers = read_nz_layers(vllm_config(enable_kv_nz=True), LAYERS)
    (group,) = build_layout(LATENT_CONFIG, LAYERS, nz_layers).groups
    assert group.rows_per_page == 1 and group.tokens_per_row == TOKENS
    assert group.row_bytes == 2 * TOKENS * 64
    assert all(plane.is_packed for plane in group.planes)


@pytest.mark.parametrize("quantization", QUANTIZATIONS)
def test_quantized_layers_are_taken_whole_and_others_by_row(quantization: str) -> None:
    """Their kernels write tiles, whatever the shape says."""
    nz_layers = read_nz_layers(vllm_config(quantization, ("1.attn",)), LAYERS)
    by_row, whole = build_layout(LATENT_CONFIG, LAYERS, nz_layers).groups
    assert [plane.layer_name for plane in by_row.planes] == ["0.attn"]
    assert [plane.layer_name for plane in whole.planes] == ["1.attn"]
    assert (by_row.rows_per_page, whole.rows_per_page) == (TOKENS, 1)
    not_tiled = vllm_config(quantization, ("1.attn",), is_enabled=False)
    assert not read_nz_layers(not_tiled, LAYERS)


@pytest.fixture
def acl_formats(monkeypatch: pytest.MonkeyPatch) -> dict[FakeStorage, int]:
    """By storage what ``torch_npu.get_npu_format`` says; 2 (ND) for the others."""
    formats: dict[FakeStorage, int] = {}
    torch_npu = ModuleType("torch_npu")
    torch_npu.get_npu_format = lambda one: formats.get(one.untyped_storage(), 2)
    monkeypatch.setitem(sys.modules, "torch_npu", torch_npu)
    return formats


build = partial(build_layout, nz_layers=())


def test_pages_of_a_private_format_are_taken_whole(acl_formats: dict[FakeStorage, int]) -> None:
    """FRACTAL_NZ on 310P."""
    entry = tensor(PAGES, TOKENS, 1, 32)
    (group,) = build(config(PAGES, (LATENT, "a")), {"a": entry}).groups
    assert group.rows_per_page == TOKENS
    acl_formats[entry.untyped_storage()] = 29
    (group,) = build(config(PAGES, (LATENT, "a")), {"a": entry}).groups
    assert group.rows_per_page == 1 and group.planes[0].is_packed


def test_a_private_format_with_padding_is_refused(acl_formats: dict[FakeStorage, int]) -> None:
    """Only the device knows where the elements are."""
    storage = FakeStorage(PAGES * TOKENS * 64 + 512)
    entry = FakeTensor(storage, (PAGES, TOKENS, 1, 32), (TOKENS * 32, 32, 32, 1))
    acl_formats[storage] = 29
    with pytest.raises(LayoutError, match=r"layer a: .*ACL format 29.* 5632 bytes for 5120"):
        build(config(PAGES, (LATENT, "a")), {"a": entry})


def test_format_is_asked_of_npu_tensors_only(acl_formats: dict[FakeStorage, int]) -> None:
    entry = tensor(PAGES, TOKENS, 1, 32, device="cpu")
    acl_formats[entry.untyped_storage()] = 29
    assert build(config(PAGES, (LATENT, "a")), {"a": entry}).num_planes == 1


def test_ratios_in_one_group_need_the_entries_of_each() -> None:
    c4 = MLAAttentionSpec(block_size=TOKENS, head_size=8, dtype=UINT8, compress_ratio=4)
    c8 = MLAAttentionSpec(block_size=TOKENS, head_size=8, dtype=UINT8, compress_ratio=8)
    caches = {
        "a": tensor(PAGES, 4, 8, dtype=UINT8),
        "b": tensor(PAGES, 2, 8, dtype=UINT8),
    }
    (group,) = build(config(PAGES, {"a": c4, "b": c8}), caches).groups
    assert (group.rows_per_page, group.compress_ratio) == (1, 4)
