# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vllm-ascend-kvext project
"""The pages of vLLM's attention on GPUs, made by the installed vLLM in host memory.

What the layout reads is compared with torch's indexing: the bytes of each page and, where pages are
divided, the bytes of each token.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from support.layout.upstream_line import HAS_ONE_VIEW, packed, plan, register
from vllm.model_executor.layers.attention.mla_attention import MLACommonBackend
from vllm.model_executor.layers.quantization.turboquant.config import TurboQuantConfig
from vllm.v1 import kv_cache_interface
from vllm.v1.attention.backend import AttentionBackend
from vllm.v1.attention.backends import utils
from vllm.v1.attention.backends.flash_attn import FlashAttentionBackend
from vllm.v1.attention.backends.flash_attn_diffkv import FlashAttentionDiffKVBackend
from vllm.v1.attention.backends.flex_attention import FlexAttentionBackend
from vllm.v1.attention.backends.mla.flashmla_sparse import FlashMLASparseBackend
from vllm.v1.attention.backends.mla.indexer import DeepseekV32IndexerBackend
from vllm.v1.attention.backends.triton_attn import TritonAttentionBackend
from vllm.v1.attention.backends.turboquant_attn import TurboQuantAttentionBackend
from vllm.v1.kv_cache_interface import (
    FullAttentionSpec,
    KVCacheSpec,
    KVQuantMode,
    MambaSpec,
    MLAAttentionSpec,
    SlidingWindowSpec,
)

from vllm_ascend_kvext.errors import LayoutError
from vllm_ascend_kvext.layout.build import build_layout
from vllm_ascend_kvext.layout.model import KVLayout, Plane, RowAddressing
from vllm_ascend_kvext.layout.worker_config import read_nz_layers

HEADS = 2
BLOCK = 32
NUM_PAGES = 40
INTEGERS = {1: torch.uint8, 2: torch.int16, 4: torch.int32}


@pytest.fixture(autouse=True)
def forget_order() -> Iterator[None]:
    yield
    if not HAS_ONE_VIEW:
        utils.get_kv_cache_layout.cache_clear()


ORDERS = ("NHD", "HND")
if HAS_ONE_VIEW:
    ORDERS += ("BLNHC", "BLHNC", "BHLNC", "LHBNC")


APART = ("BHLNC", "LHBNC")
"""Orders in which the heads of a page lie apart."""


class FlashInferBackend(AttentionBackend):
    """FlashInfer's shapes; the package is not installed. Its order is that of FlashAttention."""

    @staticmethod
    def get_kv_cache_shape(
        num_blocks: int, block_size: int, num_kv_heads: int, head_size: int, cache_dtype_str: str
    ) -> tuple[int, ...]:
        size = head_size // 2 + head_size // 16 if cache_dtype_str == "nvfp4" else head_size
        return num_blocks, 2, block_size, num_kv_heads, size

    get_kv_cache_stride_order = getattr(FlashAttentionBackend, "get_kv_cache_stride_order", None)


BYTES = {"dtype": torch.uint8}


def attention(**values: Any) -> FullAttentionSpec:
    sizes = {"block_size": BLOCK, "num_kv_heads": HEADS, "head_size": 64, "dtype": torch.bfloat16}
    return FullAttentionSpec(**(sizes | values))


def latent(**values: Any) -> MLAAttentionSpec:
    sizes = {"block_size": BLOCK, "num_kv_heads": 1, "head_size": 576, "dtype": torch.bfloat16}
    return MLAAttentionSpec(**(sizes | values))


def two(spec: KVCacheSpec) -> dict[str, KVCacheSpec]:
    return {"a": spec, "b": spec}


@dataclass
class Format:
    """The pages of one backend.

    Attributes:
        token_axis: The axis that counts tokens in the backend's own shape.
        planes_by_token: The planes of a layer whose pages are divided, by order; 0 if they are not.
        kernel_block_tokens: The tokens of a kernel block, where a page has several.
    """

    backend: type
    specs: Mapping[str, KVCacheSpec]
    token_axis: int = 2
    planes_by_token: Mapping[str, int] = field(default_factory=lambda: {"NHD": 2, "HND": 2 * HEADS})
    cache_dtype: str = "auto"
    kernel_block_tokens: int | None = None


def turboquant() -> KVCacheSpec:
    """Keys and values of a head in one slot of bytes."""
    name = "turboquant_k8v4"
    if HAS_ONE_VIEW:
        return attention(head_size=128, kv_quant_mode=KVQuantMode.TURBOQUANT_K8V4, **BYTES)
    slot_bytes = TurboQuantConfig.from_cache_dtype(name, 128).slot_size_aligned
    return kv_cache_interface.TQFullAttentionSpec(
        block_size=BLOCK, num_kv_heads=HEADS, head_size=128, tq_slot_size=slot_bytes, **BYTES
    )


WHOLE = {"NHD": 0, "HND": 0}
ONE = {"NHD": 1, "HND": 1}
WINDOW = SlidingWindowSpec(
    block_size=BLOCK, num_kv_heads=HEADS, head_size=64, dtype=torch.bfloat16, sliding_window=40
)
FORMATS = {
    "FlashAttention": Format(FlashAttentionBackend, two(attention())),
    "FlashAttention with windows": Format(
        FlashAttentionBackend, {"a": attention(), "b": WINDOW, "c": attention(), "d": WINDOW}
    ),
    "FlashAttention in two kernel blocks": Format(
        FlashAttentionBackend,
        two(attention()),
        planes_by_token=WHOLE,
        kernel_block_tokens=BLOCK // 2,
    ),
    "FlashAttention beside states": Format(
        FlashAttentionBackend,
        {
            "attention": attention(),
            "mamba": MambaSpec(
                block_size=BLOCK,
                shapes=((3, 64), (2, 16, 16)),
                dtypes=(torch.bfloat16, torch.float32),
                page_size_padded=attention().page_size_bytes,
                mamba_cache_mode="align",
            ),
        },
    ),
    "FlashAttention, float8": Format(
        FlashAttentionBackend, two(attention(**BYTES)), planes_by_token=WHOLE, cache_dtype="fp8"
    ),
    "FlashAttention, values of another size": Format(
        FlashAttentionDiffKVBackend,
        two(attention(head_size=64, head_size_v=128)),
        token_axis=1,
        planes_by_token={"NHD": 1, "HND": HEADS},
    ),
    "FlashInfer": Format(FlashInferBackend, two(attention())),
    "FlashInfer, nvfp4": Format(
        FlashInferBackend,
        two(attention(kv_quant_mode=KVQuantMode.NVFP4, **BYTES, **packed(2 * 36))),
        planes_by_token=WHOLE,
        cache_dtype="nvfp4",
    ),
    "Triton": Format(TritonAttentionBackend, two(attention())),
    "TurboQuant": Format(
        TurboQuantAttentionBackend,
        two(turboquant()),
        planes_by_token=WHOLE,
        cache_dtype="turboquant_k8v4",
    ),
    "Flex": Format(FlexAttentionBackend, two(attention()), planes_by_token=ONE),
    "MLA": Format(MLACommonBackend, two(latent()), 1, ONE),
    "FlashMLA, sparse, fp8_ds_mla": Format(
        FlashMLASparseBackend,
        two(latent(cache_dtype_str="fp8_ds_mla", **BYTES, **packed(656))),
        1,
        WHOLE,
        "fp8_ds_mla",
    ),
    "indexer of sparse MLA": Format(
        DeepseekV32IndexerBackend, two(latent(head_size=132, **BYTES)), 1, WHOLE
    ),
}


@dataclass
class Worker:
    config: Any
    kv_caches: dict[str, Any]

    @classmethod
    def of(cls, form: Format, order: str, monkeypatch: pytest.MonkeyPatch) -> Worker:
        """What a worker registers; skips orders that the backend or vLLM does not have."""
        monkeypatch.setenv("VLLM_KV_CACHE_LAYOUT", order)
        backends = {"": form.backend}
        if HAS_ONE_VIEW:
            try:
                config, _ = plan(form.specs, backends, NUM_PAGES, BLOCK)
            except ValueError as error:
                pytest.skip(str(error))
        else:
            set_order(order, monkeypatch)
            config, _ = plan(form.specs, backends, NUM_PAGES, BLOCK)
        try:
            kv_caches = register(config, backends, form.kernel_block_tokens, form.cache_dtype)
        except ValueError as error:  # vLLM says that these blocks cannot be divided.
            pytest.skip(str(error))
        return cls(config, kv_caches)

    def layout(self, addressing: RowAddressing | None) -> KVLayout:
        return build_layout(self.config, self.kv_caches, (), addressing=addressing)

    def storage(self, name: str) -> torch.Tensor:
        """The bytes of the storage of a layer, all zero."""
        first = tensors_of(self.kv_caches[name])[0]
        found = torch.empty(0, dtype=torch.uint8).set_(first.untyped_storage())
        return found.zero_()

    def bytes_of(self, name: str, page: int, token: int | None, token_axis: int) -> np.ndarray:
        """Where torch writes if it writes to a page of a layer, or to one token of the page."""
        storage = self.storage(name)
        for tensor in tensors_of(self.kv_caches[name]):
            view = tensor.view(INTEGERS[tensor.element_size()])
            blocks = len(view) // NUM_PAGES
            view = view[page * blocks : (page + 1) * blocks]
            if token is not None:
                view = view.select(token_axis, token)
            view.fill_(1)
            view.mul_(255 if view.dtype is torch.uint8 else -1)
        return np.flatnonzero(storage.numpy())


def set_order(order: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Set the order of axes of vLLM before 0.30, which remembers it."""
    monkeypatch.setattr(utils, "_KV_CACHE_LAYOUT_OVERRIDE", order)
    utils.get_kv_cache_layout.cache_clear()


def tensors_of(entry: Any) -> list[torch.Tensor]:
    return list(entry) if isinstance(entry, (list, tuple)) else [entry]


def bytes_of_rows(planes: list[Plane], page: int, rows: range) -> np.ndarray:
    """Where the planes say that rows of a page lie, as `Plane` says it."""
    first_bytes = [
        plane.base_bytes
        + page * plane.page_stride_bytes
        + plane.region_offset_bytes
        + row * plane.row_bytes
        for plane in planes
        for row in rows
    ]
    sizes = [plane.row_bytes for plane in planes for _ in rows]
    return np.sort(
        np.concatenate(
            [np.arange(*span) for span in zip(first_bytes, np.add(first_bytes, sizes), strict=True)]
        )
    )


@pytest.mark.parametrize("order", ORDERS)
@pytest.mark.parametrize("name", FORMATS)
def test_a_page_is_all_bytes_of_its_kernel_blocks(
    name: str, order: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    worker = Worker.of(FORMATS[name], order, monkeypatch)
    groups = worker.layout(RowAddressing.PAGES).groups
    for layer in FORMATS[name].specs:
        (planes,) = filter(
            None,
            ([each for each in group.planes if each.layer_name == layer] for group in groups),
        )
        if layer != "mamba":
            num_pieces = FORMATS[name].specs[layer].num_kv_heads if order in APART else 1
            assert len(planes) == num_pieces
        for page in (0, 1, NUM_PAGES - 1):
            wanted = worker.bytes_of(layer, page, None, 0)
            np.testing.assert_array_equal(bytes_of_rows(planes, page, range(1)), wanted)


@pytest.mark.parametrize("order", ["NHD", "HND"])
@pytest.mark.parametrize("name", FORMATS)
def test_a_row_is_all_bytes_of_its_token_or_of_its_page(
    name: str, order: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    form = FORMATS[name]
    worker = Worker.of(form, order, monkeypatch)
    num_planes = 0 if HAS_ONE_VIEW else form.planes_by_token[order]
    for group in worker.layout(RowAddressing.TOKENS).groups:
        for layer in sorted({plane.layer_name for plane in group.planes}):
            planes = [each for each in group.planes if each.layer_name == layer]
            if not num_planes or layer == "mamba":
                assert group.rows_per_page == 1
                continue
            assert (group.rows_per_page, len(planes)) == (BLOCK, num_planes)
            for page, token in ((0, 0), (1, BLOCK - 1), (NUM_PAGES - 1, 7)):
                wanted = worker.bytes_of(layer, page, token, form.token_axis)
                found = bytes_of_rows(planes, page, range(token, token + 1))
                np.testing.assert_array_equal(found, wanted)


def test_the_shapes_are_those_of_the_other_backends(monkeypatch: pytest.MonkeyPatch) -> None:
    """FlashInfer's shapes are stated above. What else there is has one of the shapes above."""
    if HAS_ONE_VIEW:
        pytest.skip("vLLM makes the shapes, and no backend")
    for backend in (FlashAttentionBackend, TritonAttentionBackend):
        for order in ("NHD", "HND"):
            set_order(order, monkeypatch)
            found = [
                (each.get_kv_cache_shape(9, 16, 4, 64, "auto"), each.get_kv_cache_stride_order())
                for each in (backend, FlashInferBackend)
            ]
            assert found[0] == found[1]


@pytest.mark.parametrize("bits", ["fp8", "int8", "int4"])
def test_scales_that_the_first_forward_sets_in_all_pages_are_refused(bits: str) -> None:
    parallel = {f"{name}_parallel_size": 1 for name in ("pipeline", "tensor")}
    vllm_config = SimpleNamespace(
        parallel_config=SimpleNamespace(**parallel),
        cache_config=SimpleNamespace(cache_dtype=f"{bits}_per_token_head"),
    )
    with pytest.raises(LayoutError, match=f"found {bits}_per_token_head.*first forward"):
        read_nz_layers(vllm_config, {"a": None})
