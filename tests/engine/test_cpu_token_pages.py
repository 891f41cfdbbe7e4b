# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vllm-ascend-kvext project
"""Rows of tokens, in pages that vLLM's CPU attention has written and in pages that we write."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from vllm.config import VllmConfig, set_current_vllm_config
from vllm.model_executor.layers.rotary_embedding import get_rope
from vllm.v1.attention.backends.cpu_attn import CPUAttentionBackend, _get_attn_isa

from vllm_ascend_kvext.errors import BlendingError
from vllm_ascend_kvext.segments.keys.rotary import read_rotary_signature
from vllm_ascend_kvext.segments.token_rows import HostRows, SegmentLayout
from vllm_ascend_kvext.segments.worker.cpu_backend import CpuBackend
from vllm_ascend_kvext.segments.worker.cpu_token_pages import CpuLayer, CpuTokenPages

DTYPES = [torch.float32, torch.bfloat16, torch.float16]
NUM_PAGES = 12
POSITIONS = 4096
LAYERS = ("model.layers.0.self_attn.attn", "model.layers.1.self_attn.attn")

WriteRows = Callable[..., None]


@pytest.fixture(autouse=True)
def current_config() -> Iterator[None]:
    """The configuration by which vLLM's modules choose their implementation."""
    with set_current_vllm_config(VllmConfig()):
        yield


class Pages:
    """Two layers as vLLM registers them, and how to read them.

    Args:
        page_padding: Elements between the pages of the first layer. Nothing may touch them.
    """

    def __init__(
        self,
        dtype: torch.dtype,
        block_size: int,
        num_heads: int,
        head_size: int,
        page_padding: int = 0,
    ) -> None:
        self.shape = num_heads, head_size
        self.dtype, self.block_size = dtype, block_size
        layer = SimpleNamespace(get_attn_backend=lambda: CPUAttentionBackend)
        layers = dict.fromkeys(LAYERS, layer)
        self.backend = CpuBackend(
            SimpleNamespace(
                model_config=SimpleNamespace(dtype=dtype),
                cache_config=SimpleNamespace(block_size=block_size),
                compilation_config=SimpleNamespace(static_forward_context=layers),
            )
        )
        shape = shape_of(block_size, num_heads, head_size)
        self.registered = [padded(shape, dtype, page_padding), torch.full(shape, -7, dtype=dtype)]
        self.rotary = get_rope(head_size, POSITIONS, True, {"rope_theta": 10_000.0}, dtype)
        self.signature = read_rotary_signature(self.rotary, dtype)

    def token_pages(self, write_rows: WriteRows | None = None) -> CpuTokenPages:
        caches = [
            self.backend.caches_of(*each) for each in zip(LAYERS, self.registered, strict=True)
        ]
        return CpuTokenPages(
            [
                CpuLayer(name, 0, *both, self.signature)
                for name, both in zip(LAYERS, caches, strict=True)
            ],
            write_rows or self.backend.write_rows,
        )

    def write_by_op(self, layer: int, rows: list[torch.Tensor], slots: Any) -> None:
        caches = self.backend.caches_of(LAYERS[layer], self.registered[layer])
        self.backend.write_rows(*rows, *caches, torch.as_tensor(slots))

    def random_rows(self, num_tokens: int, seed: int = 0) -> list[torch.Tensor]:
        """Keys and values of both layers. shape: each [num_tokens, num_heads, head_size]."""
        generator = torch.Generator().manual_seed(seed)
        shape = num_tokens, *self.shape
        return [torch.randn(shape, generator=generator).to(self.dtype) for _ in range(4)]

    def storages(self) -> list[torch.Tensor]:
        return [
            bits(torch.empty(0, dtype=each.dtype).set_(each.untyped_storage())).clone()
            for each in self.registered
        ]


def shape_of(block_size: int, num_heads: int, head_size: int) -> tuple[int, ...]:
    """The shape of a layer's pages.

    Since vLLM 0.30, the backend only names the axes (``LBHNC``).
    """
    by_backend = getattr(CPUAttentionBackend, "get_kv_cache_shape", None)
    if by_backend is None:
        return NUM_PAGES, num_heads, block_size, 2 * head_size
    return by_backend(NUM_PAGES, block_size, num_heads, head_size)


def padded(shape: tuple[int, ...], dtype: torch.dtype, page_padding: int) -> torch.Tensor:
    """A tensor with a gap behind each page."""
    axis = shape.index(NUM_PAGES)
    inner = list(torch.empty(shape[axis + 1 :]).stride())
    page = int(np.prod(shape[axis + 1 :])) + page_padding
    strides = [*([NUM_PAGES * page] if axis else []), page, *inner]
    storage = torch.full((shape[0] * strides[0],), -7, dtype=dtype)
    return storage.as_strided(shape, strides)


def bits(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.view(torch.int16 if tensor.element_size() == 2 else torch.int32)


def host_rows(pages: CpuTokenPages, num_rows: int, first_row: int = 0) -> HostRows:
    layout = SegmentLayout(tuple(plane.row_bytes for plane in pages.planes))
    *offsets, end = layout.plane_offsets_bytes(num_rows)
    return HostRows(torch.full((end,), 0xA5, dtype=torch.uint8), offsets, first_row)


def rows_in(host: HostRows, pages: CpuTokenPages, num_tokens: int) -> list[torch.Tensor]:
    """The rows as integers, plane by plane. shape: each [num_tokens, row_elements]."""
    found = []
    for plane, offset in zip(pages.planes, host.plane_offsets_bytes, strict=True):
        first = offset + host.first_row * plane.row_bytes
        part = host.memory[first : first + num_tokens * plane.row_bytes]
        integers = torch.int32 if plane.dtype.element_bytes == 4 else torch.int16
        found.append(part.view(integers).reshape(num_tokens, -1))
    return found


SIZES = [
    *((16, 1, 32), (16, 2, 64), (16, 8, 80), (32, 2, 80), (32, 1, 128), (32, 8, 64)),
    *((128, 1, 64), (128, 2, 128), (128, 8, 32)),
]
"""Sizes of blocks, numbers of heads, and head sizes."""


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(("block_size", "num_heads", "head_size"), SIZES)
def test_rows_are_those_of_the_write_op(dtype, block_size, num_heads, head_size) -> None:
    made = Pages(dtype, block_size, num_heads, head_size, page_padding=64)
    pages = made.token_pages()
    random = np.random.default_rng(0)
    # The range starts within a page, pages are in no order, and most pages keep some tokens.
    slots = random.permutation(np.arange(block_size + 3, NUM_PAGES * block_size))
    slots = slots[: len(slots) // 2]
    rows = made.random_rows(len(slots))
    for layer in range(2):
        made.write_by_op(layer, rows[2 * layer : 2 * layer + 2], slots)
    written = made.storages()

    host = host_rows(pages, len(slots) + 5, first_row=3)
    pages.read({0: slots}, host)
    for found, wanted in zip(rows_in(host, pages, len(slots)), rows, strict=True):
        assert torch.equal(found, bits(wanted).reshape(len(slots), -1))
    untouched = host._replace(first_row=0)
    assert all((part.view(torch.uint8) == 0xA5).all() for part in rows_in(untouched, pages, 3))
    assert all(map(torch.equal, made.storages(), written)), "a read has changed pages"

    for registered in made.registered:
        storage = torch.empty(0, dtype=dtype).set_(registered.untyped_storage())
        storage.fill_(-7)
    pages.write({0: slots}, host)
    assert all(map(torch.equal, made.storages(), written)), "a write has changed other elements"


def test_both_ways_of_ordering_a_page_are_met() -> None:
    """On x86 without AMX, blocks of 32 tokens have one order, and blocks of 16 tokens another."""
    assert {_get_attn_isa(torch.float32, size, 64) for size in (16, 32)} >= {"vec16"}
    assert _get_attn_isa(torch.float32, 32, 64) != "vec16"


# Refused


WRONG_OPS: dict[str, Callable[..., Any]] = {
    "a page further": lambda k, v, kc, vc, slots: (k, v, kc, vc, (slots + 16) % (5 * 16)),
    "keys twice": lambda k, v, kc, vc, slots: (k, k, kc, vc, slots),
    "half a row": lambda k, v, kc, vc, slots: (
        torch.cat([k[:, :, :32]] * 2, -1), v, kc, vc, slots
    ),
    "rounded": lambda k, v, kc, vc, slots: (k.round(), v, kc, vc, slots),
    "scaled by the slot": lambda k, v, kc, vc, slots: (
        torch.where(slots[:, None, None] >= 48, k * 2, k), v, kc, vc, slots
    ),
    "pages from the third on in another order": lambda k, v, kc, vc, slots: (
        k, v, kc, vc, torch.where(slots >= 48, slots ^ 15, slots)
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", WRONG_OPS)
def test_an_op_that_is_not_understood_is_refused(name: str) -> None:
    made = Pages(torch.float32, 16, 2, 64)
    before = made.storages()
    write_rows, change = made.backend.write_rows, WRONG_OPS[name]
    with pytest.raises(BlendingError, match="Serve this model without segments") as caught:
        made.token_pages(lambda *given: write_rows(*change(*given)))
    if name == "a page further":
        assert "found 2048 elements written (some outside the page)" in str(caught.value)
    assert all(map(torch.equal, made.storages(), before)), "pages of the model are changed"


def test_an_op_that_writes_between_rows_is_refused() -> None:
    made = Pages(torch.float32, 16, 2, 64, page_padding=64)

    def write(keys, values, key_cache, value_cache, slots) -> None:
        made.backend.write_rows(keys, values, key_cache, value_cache, slots)
        storage = torch.empty(0, dtype=key_cache.dtype).set_(key_cache.untyped_storage())
        storage[3 * key_cache.stride(0) - 1] = 5

    with pytest.raises(BlendingError, match="each once, found 2049 elements written"):
        made.token_pages(write)


def test_another_backend_or_shape_is_refused(monkeypatch) -> None:
    made = Pages(torch.bfloat16, 16, 2, 64)
    made.registered[0] = made.registered[0].reshape(NUM_PAGES, -1)
    with pytest.raises(BlendingError, match=r"four axes, found CPU_ATTN with shape \[12, "):
        made.token_pages()
    monkeypatch.setattr(CPUAttentionBackend, "get_name", staticmethod(lambda: "OTHER"))
    with pytest.raises(BlendingError, match="expected pages of CPU_ATTN in one tensor"):
        made.token_pages()
