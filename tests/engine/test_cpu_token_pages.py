# SPDX-License-Identifier: Apache-2.0
"""Rows of tokens in pages that vLLM's own CPU attention has written, and in such that we write."""

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

from vllm_ascend_kvext.blending.cpu_token_pages import CpuLayer, CpuTokenPages
from vllm_ascend_kvext.blending.errors import BlendingError, RotationError
from vllm_ascend_kvext.blending.rotary import read_rotary_signature
from vllm_ascend_kvext.blending.segment_mover import SegmentMover
from vllm_ascend_kvext.blending.segment_rows import SegmentLayout, SegmentRows
from vllm_ascend_kvext.blending.token_pages import HostRows
from vllm_ascend_kvext.connector.cpu_backend import CpuBackend
from vllm_ascend_kvext.layout.transfer_plan import TablePart

DTYPES = [torch.float32, torch.bfloat16, torch.float16]
NUM_PAGES = 12
POSITIONS = 4096
LAYERS = ("model.layers.0.self_attn.attn", "model.layers.1.self_attn.attn")

WriteRows = Callable[..., None]


@pytest.fixture(autouse=True)
def current_config() -> Iterator[None]:
    """Modules of vLLM choose their implementation by it."""
    with set_current_vllm_config(VllmConfig()):
        yield


class Pages:
    """Two layers as vLLM registers them, and how to read them.

    Args:
        page_padding: Elements between pages of the first layer, which nothing may touch.
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
        shape = CPUAttentionBackend.get_kv_cache_shape(NUM_PAGES, block_size, num_heads, head_size)
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
        """Of keys and values of both layers. shape: [num_tokens, num_heads, head_size] each."""
        generator = torch.Generator().manual_seed(seed)
        shape = num_tokens, *self.shape
        return [torch.randn(shape, generator=generator).to(self.dtype) for _ in range(4)]

    def storages(self) -> list[torch.Tensor]:
        return [
            bits(torch.empty(0, dtype=each.dtype).set_(each.untyped_storage())).clone()
            for each in self.registered
        ]


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
    layout = SegmentLayout(tuple(plane.row_bytes for plane in pages.planes), "f")
    *offsets, end = layout.plane_offsets_bytes(num_rows)
    return HostRows(torch.full((end,), 0xA5, dtype=torch.uint8), offsets, first_row)


def rows_in(host: HostRows, pages: CpuTokenPages, num_tokens: int) -> list[torch.Tensor]:
    """Integers, plane by plane. shape: [num_tokens, row_elements] each."""
    found = []
    for plane, offset in zip(pages.planes, host.plane_offsets_bytes, strict=True):
        first = offset + host.first_row * plane.row_bytes
        part = host.memory[first : first + num_tokens * plane.row_bytes]
        integers = torch.int32 if plane.dtype.element_bytes == 4 else torch.int16
        found.append(part.view(integers).reshape(num_tokens, -1))
    return found


SIZES = [
    (block_size, num_heads, head_size)
    for block_size in (16, 32, 128)
    for num_heads in (1, 2, 8)
    for head_size in (32, 64, 80, 128)
]


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(("block_size", "num_heads", "head_size"), SIZES)
def test_rows_are_those_of_the_write_op(dtype, block_size, num_heads, head_size) -> None:
    made = Pages(dtype, block_size, num_heads, head_size, page_padding=64)
    pages = made.token_pages()
    random = np.random.default_rng(0)
    # A start within a page, and pages that are not in order; some tokens of most pages are left.
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
    assert all(map(torch.equal, made.storages(), written)), "a read writes no page"

    for registered in made.registered:
        storage = torch.empty(0, dtype=dtype).set_(registered.untyped_storage())
        storage.fill_(-7)
    pages.write({0: slots}, host)
    assert all(map(torch.equal, made.storages(), written)), "every other element stays"


def test_both_ways_of_ordering_a_page_are_met() -> None:
    """On x86 without AMX: a block of 32 tokens, and one of 16."""
    assert {_get_attn_isa(torch.float32, size, 64) for size in (16, 32)} >= {"vec16"}
    assert _get_attn_isa(torch.float32, 32, 64) != "vec16"


def test_keys_do_not_lie_as_the_shape_says() -> None:
    """What makes all this necessary."""
    made = Pages(torch.bfloat16, 16, 2, 64)
    places = made.token_pages()._places
    assert places[0].parts.shape[1] < 64 <= places[1].parts.shape[1]


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("block_size", [16, 32])
def test_a_segment_is_placed_where_the_model_would_have_written_it(dtype, block_size) -> None:
    """Stored from unaligned slots, loaded elsewhere: as if rotated there and written by the op."""
    made = Pages(dtype, block_size, 2, 64)
    pages = made.token_pages()
    layout = SegmentLayout(tuple(plane.row_bytes for plane in pages.planes), "f")
    num_tokens, old_first, new_first = 2 * block_size + 5, 7, 3 * block_size + 1
    keys_0, values_0, keys_1, values_1 = made.random_rows(num_tokens)
    old, new = (torch.arange(first, first + num_tokens) for first in (old_first, new_first))
    source = TablePart(0, (9, 4, 7, 2))
    target = TablePart(3, (11, 1, 8, 5))

    def slots(first: int, table: TablePart) -> torch.Tensor:
        tokens = torch.arange(first, first + num_tokens)
        ids = torch.tensor(table.ids)[tokens // block_size - table.first_page]
        return ids * block_size + tokens % block_size

    for layer, (keys, values) in enumerate(((keys_0, values_0), (keys_1, values_1))):
        made.write_by_op(layer, [rotated(made, keys, old), values], slots(old_first, source))
    host = torch.zeros(layout.num_bytes(num_tokens + 9) + 64, dtype=torch.uint8)
    mover = SegmentMover(pages, host, layout, staging_bytes=20 * sum(layout.row_bytes))
    rows = SegmentRows(old_first, old_first + num_tokens, 64, num_tokens + 9, 4)
    assert mover.store([rows], [source]) == num_tokens * sum(layout.row_bytes)

    head, rest = 6, num_tokens - 6  # The first tokens are left to be computed.
    shift = new_first - old_first
    placed = SegmentRows(
        new_first + head, new_first + num_tokens, 64, num_tokens + 9, 4 + head, shift
    )
    before = made.storages()
    assert mover.load([placed], [target]) == rest * sum(layout.row_bytes)
    found = host_rows(pages, num_tokens)
    pages.read({0: slots(new_first, target)[head:].numpy()}, found)
    tolerance = {torch.float32: 1e-4, torch.bfloat16: 4e-2, torch.float16: 5e-3}[dtype]
    got = [part.view(dtype).reshape(rest, 2, 64).float() for part in rows_in(found, pages, rest)]
    for index, keys in ((0, keys_0), (2, keys_1)):
        wanted = rotated(made, keys, new)[head:].float()
        torch.testing.assert_close(got[index], wanted, rtol=tolerance, atol=tolerance)
        as_it_was = rotated(made, keys, old)[head:].float()
        assert (got[index] - as_it_was).abs().max() > 10 * tolerance, "keys have to turn"
    assert torch.equal(bits(got[1].to(dtype)), bits(values_0[head:]))
    assert torch.equal(bits(got[3].to(dtype)), bits(values_1[head:]))

    # Nothing but those slots has changed: written back as it was, all is as before.
    restored = host_rows(pages, num_tokens)
    for layer, was in zip(made.registered, before, strict=True):
        assert not torch.equal(bits(torch.empty(0, dtype=dtype).set_(layer.untyped_storage())), was)
    reference = Pages(dtype, block_size, 2, 64)
    for layer, was in zip(reference.registered, before, strict=True):
        bits(torch.empty(0, dtype=dtype).set_(layer.untyped_storage())).copy_(was)
    of_reference = reference.token_pages()
    of_reference.read({0: slots(new_first, target)[head:].numpy()}, restored)
    pages.write({0: slots(new_first, target)[head:].numpy()}, restored)
    assert all(map(torch.equal, made.storages(), before))


def rotated(made: Pages, keys: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
    """By the model's own rotary module."""
    flat = keys.reshape(len(keys), -1).clone()
    _, turned = made.rotary(positions, torch.zeros_like(flat), flat)
    return turned.reshape(keys.shape)


def test_a_shift_of_zero_keeps_every_bit() -> None:
    """Of what is no number, too."""
    made = Pages(torch.bfloat16, 16, 2, 64)
    pages = made.token_pages()
    for each in made.registered:
        bits(each).random_(-(1 << 15), (1 << 15) - 1)
    layout = SegmentLayout(tuple(plane.row_bytes for plane in pages.planes), "f")
    host = torch.zeros(layout.num_bytes(40), dtype=torch.uint8)
    mover = SegmentMover(pages, host, layout)
    mover.store([SegmentRows(3, 43, 0, 40, 0)], [TablePart(0, (4, 2, 6))])
    stored = host.clone()
    mover.load([SegmentRows(3, 43, 0, 40, 0)], [TablePart(0, (7, 8, 9))])
    host.zero_()
    mover.store([SegmentRows(3, 43, 0, 40, 0)], [TablePart(0, (7, 8, 9))])
    assert torch.equal(host, stored)


# Refused


def shifted(write_rows: WriteRows, change: Callable[..., Any]) -> WriteRows:
    """The write op, but something is different about it."""

    def write(keys, values, key_cache, value_cache, slots) -> None:
        write_rows(*change(keys, values, key_cache, value_cache, slots))

    return write


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
    with pytest.raises(BlendingError, match="Serve this model without blending") as caught:
        made.token_pages(shifted(made.backend.write_rows, WRONG_OPS[name]))
    if name == "a page further":
        assert "found 2048 elements written (some outside the page)" in str(caught.value)
    assert all(map(torch.equal, made.storages(), before)), "no page of the model is written"


def test_an_op_that_writes_between_rows_is_refused() -> None:
    made = Pages(torch.float32, 16, 2, 64, page_padding=64)

    def write(keys, values, key_cache, value_cache, slots) -> None:
        made.backend.write_rows(keys, values, key_cache, value_cache, slots)
        storage = torch.empty(0, dtype=key_cache.dtype).set_(key_cache.untyped_storage())
        storage[3 * key_cache.stride(0) - 1] = 5

    with pytest.raises(BlendingError, match="each once, found 2049 elements written"):
        made.token_pages(write)


def test_quantised_pages_are_refused() -> None:
    made = Pages(torch.bfloat16, 16, 2, 64)
    made.registered = [each.to(torch.float8_e4m3fn) for each in made.registered]
    with pytest.raises(RotationError, match="found float8_e4m3fn: quantised keys"):
        made.token_pages()


def test_another_backend_is_refused(monkeypatch) -> None:
    made = Pages(torch.bfloat16, 16, 2, 64)
    monkeypatch.setattr(CPUAttentionBackend, "get_name", staticmethod(lambda: "OTHER"))
    with pytest.raises(BlendingError, match="expected pages of CPU_ATTN in one tensor"):
        made.token_pages()


def test_a_tensor_of_another_shape_is_refused() -> None:
    made = Pages(torch.bfloat16, 16, 2, 64)
    made.registered[0] = made.registered[0].reshape(NUM_PAGES, -1)
    with pytest.raises(BlendingError, match=r"four axes, found CPU_ATTN with shape \[12, "):
        made.token_pages()
