# SPDX-License-Identifier: Apache-2.0
"""What tensors do not say: context parallelism, tiled pages, private formats, replicas."""

from __future__ import annotations

import sys
from dataclasses import dataclass, field
from functools import partial
from types import ModuleType

import pytest
from support.layout.fakes import (
    FLOAT32,
    UINT8,
    FakeStorage,
    FakeTensor,
    FullAttentionSpec,
    MambaSpec,
    MLAAttentionSpec,
    SlidingWindowMLASpec,
    SlidingWindowSpec,
    config,
    tensor,
)

from vllm_ascend_kvext.layout.build import build_layout
from vllm_ascend_kvext.layout.errors import LayoutError
from vllm_ascend_kvext.layout.worker_config import WorkerConfig, read_worker_config

PAGES, TOKENS = 5, 16
LATENT = MLAAttentionSpec(block_size=TOKENS, head_size=32)
LAYERS = {"0.attn": tensor(PAGES, TOKENS, 1, 32), "1.attn": tensor(PAGES, TOKENS, 1, 32)}
LATENT_CONFIG = config(PAGES, (LATENT, *LAYERS))


@dataclass(frozen=True)
class ParallelConfig:
    decode_context_parallel_size: int = 1
    prefill_context_parallel_size: int = 1


@dataclass(frozen=True)
class QuantConfig:
    enable_fa_quant: bool
    layers: tuple[str, ...]

    def is_fa_quant_layer(self, prefix: str) -> bool:
        return prefix in self.layers


@dataclass(frozen=True)
class C8QuantConfig:
    """Of vLLM-Ascend 0.23.0; older ones have no such attributes."""

    enable_c8_quant: bool
    layers: tuple[str, ...]
    enable_fa_quant: bool = False

    def is_c8_quant_layer(self, prefix: str) -> bool:
        return prefix in self.layers


@dataclass(frozen=True)
class VllmConfig:
    parallel_config: ParallelConfig = ParallelConfig()
    additional_config: dict[str, object] = field(default_factory=dict)
    quant_config: QuantConfig | C8QuantConfig | None = None


@pytest.mark.parametrize(
    ("decode", "prefill"), [(2, 1), (1, 2), (2, 2)], ids=["decode", "prefill", "both"]
)
def test_context_parallelism_is_refused(decode: int, prefill: int) -> None:
    """A block then stands for more tokens than its page has rows."""
    worker = read_worker_config(VllmConfig(ParallelConfig(decode, prefill)), LAYERS)
    with pytest.raises(LayoutError, match=rf"size of {decode * prefill} .*expected 1"):
        build_layout(LATENT_CONFIG, LAYERS, worker)


def test_a_plain_config_addresses_rows() -> None:
    worker = read_worker_config(VllmConfig(), LAYERS)
    assert worker == WorkerConfig()
    (group,) = build_layout(LATENT_CONFIG, LAYERS, worker).groups
    assert group.rows_per_page == TOKENS


def test_nz_pages_are_taken_whole() -> None:
    """``enable_kv_nz``: kernels write tiles of 16 elements, whatever the shape says."""
    worker = read_worker_config(VllmConfig(additional_config={"enable_kv_nz": True}), LAYERS)
    (group,) = build_layout(LATENT_CONFIG, LAYERS, worker).groups
    assert group.rows_per_page == 1 and group.tokens_per_row == TOKENS
    assert group.row_bytes == 2 * TOKENS * 64
    assert all(plane.is_packed for plane in group.planes)


def test_layers_under_fa_quant_are_taken_whole_and_others_by_row() -> None:
    quantized = VllmConfig(quant_config=QuantConfig(True, ("1.attn",)))
    by_row, whole = build_layout(
        LATENT_CONFIG, LAYERS, read_worker_config(quantized, LAYERS)
    ).groups
    assert [plane.layer_name for plane in by_row.planes] == ["0.attn"]
    assert [plane.layer_name for plane in whole.planes] == ["1.attn"]
    assert (by_row.rows_per_page, whole.rows_per_page) == (TOKENS, 1)


def test_layers_under_c8_are_taken_whole_and_others_by_row() -> None:
    """Their kernels write tiles of 32 elements, whatever the shape says."""
    quantized = VllmConfig(quant_config=C8QuantConfig(True, ("1.attn",)))
    by_row, whole = build_layout(
        LATENT_CONFIG, LAYERS, read_worker_config(quantized, LAYERS)
    ).groups
    assert [plane.layer_name for plane in by_row.planes] == ["0.attn"]
    assert [plane.layer_name for plane in whole.planes] == ["1.attn"]
    assert (by_row.rows_per_page, whole.rows_per_page) == (TOKENS, 1)


@pytest.mark.parametrize("make", [QuantConfig, C8QuantConfig])
def test_a_quantization_that_does_not_tile_addresses_rows(
    make: type[QuantConfig] | type[C8QuantConfig],
) -> None:
    quantized = VllmConfig(quant_config=make(False, ("0.attn", "1.attn")))
    assert read_worker_config(quantized, LAYERS) == WorkerConfig()


@pytest.fixture
def acl_formats(monkeypatch: pytest.MonkeyPatch) -> dict[FakeStorage, int]:
    """By storage what ``torch_npu.get_npu_format`` says; 2 (ND) for the others."""
    formats: dict[FakeStorage, int] = {}
    torch_npu = ModuleType("torch_npu")
    torch_npu.get_npu_format = lambda one: formats.get(one.untyped_storage(), 2)
    monkeypatch.setitem(sys.modules, "torch_npu", torch_npu)
    return formats


build = partial(build_layout, worker=WorkerConfig())


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


def test_planes_of_mla_are_replicated_over_tensor_parallel_ranks() -> None:
    window = SlidingWindowMLASpec(block_size=TOKENS, head_size=8, sliding_window=TOKENS)
    heads = SlidingWindowSpec(block_size=TOKENS, sliding_window=TOKENS)
    full = FullAttentionSpec(block_size=TOKENS)
    mamba = MambaSpec(block_size=TOKENS, shapes=((4,),), dtypes=(FLOAT32,))
    layout = build(
        config(
            PAGES,
            (LATENT, "mla"),
            (window, "swa"),
            (window, "state_cache"),
            (heads, "window"),
            (full, "full"),
            (mamba, "mamba"),
        ),
        {
            "mla": tensor(PAGES, TOKENS, 32),
            "swa": tensor(PAGES, TOKENS, 8),
            "state_cache": tensor(PAGES, TOKENS, 8),
            "window": tensor(PAGES, 2, TOKENS, 1, 8),
            "full": tensor(PAGES, 2, TOKENS, 1, 8),
            "mamba": [tensor(PAGES, 4, dtype=FLOAT32)],
        },
    )
    replicated = {
        plane.layer_name: plane.is_replicated for group in layout.groups for plane in group.planes
    }
    assert replicated == {
        "mla": True,
        "swa": True,
        "state_cache": True,
        "window": False,
        "full": False,
        "mamba": False,
    }


def test_ratios_in_one_group_need_the_entries_of_each() -> None:
    c4 = MLAAttentionSpec(block_size=TOKENS, head_size=8, dtype=UINT8, compress_ratio=4)
    c8 = MLAAttentionSpec(block_size=TOKENS, head_size=8, dtype=UINT8, compress_ratio=8)
    caches = {
        "a": tensor(PAGES, 4, 8, dtype=UINT8),
        "b": tensor(PAGES, 2, 8, dtype=UINT8),
    }
    (group,) = build(config(PAGES, {"a": c4, "b": c8}), caches).groups
    assert (group.rows_per_page, group.compress_ratio) == (1, 4)
