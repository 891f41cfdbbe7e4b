# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vllm-ascend-kvext project
"""Planes of registered tensors. The layouts are made by hand, and real models do not have them.

Tensors do not show everything. So tiled pages, private formats and ratios within a group are tested
here, too. The round trips of ``tests/ops`` and ``tests/ascend`` move the layouts of real models
byte by byte.
"""

from __future__ import annotations

import sys
from functools import partial
from types import ModuleType, SimpleNamespace

import pytest
from support.layout.fakes import (
    BFLOAT16,
    FLOAT16,
    INT8,
    UINT8,
    AscendMLAAttentionSpec,
    ChunkedLocalAttentionSpec,
    CrossAttentionSpec,
    FakeStorage,
    FakeTensor,
    FullAttentionSpec,
    MambaSpec,
    MLAAttentionSpec,
    SlidingWindowSpec,
    config,
    tensor,
)

from vllm_ascend_kvext.errors import GroupError, LayoutError
from vllm_ascend_kvext.groups.model import GroupKind
from vllm_ascend_kvext.layout.build import build_layout
from vllm_ascend_kvext.layout.model import LayoutGroup, RowAddressing
from vllm_ascend_kvext.layout.planner import TransferPlanner
from vllm_ascend_kvext.layout.row_map import RowMap, StoredChunk, StoredRows
from vllm_ascend_kvext.layout.worker_config import read_nz_layers
from vllm_ascend_kvext.token_range import TokenRange

build = partial(build_layout, nz_layers=())

PAGES = 5
HEADS = 3
TOKENS = 4
HEAD = 8
FULL = FullAttentionSpec(block_size=TOKENS, num_kv_heads=HEADS, head_size=HEAD)
ROW = HEADS * HEAD * 2
"""The bytes of one token's keys."""
PAGE = TOKENS * ROW


def placed(group: LayoutGroup) -> list[tuple[int, int, int, int]]:
    """For each plane: the offset of page 0's region, page stride, row bytes, and rows per page."""
    return [
        (
            plane.base_bytes + plane.region_offset_bytes,
            plane.page_stride_bytes,
            plane.row_bytes,
            group.rows_per_page,
        )
        for plane in group.planes
    ]


def build_one(spec: object, entry: object, addressing: RowAddressing | None = None) -> LayoutGroup:
    (group,) = build(config(PAGES, (spec, "a")), {"a": entry}, addressing=addressing).groups
    return group


def test_a_page_is_one_row_whatever_the_order_of_its_bytes() -> None:
    """The orders are: tokens first, heads first, and two kernel blocks."""
    spec = FullAttentionSpec(block_size=32, num_kv_heads=4, head_size=8)
    heads_first = tensor(PAGES, 2, 32, 4, 8, order=(0, 1, 3, 2, 4))
    entries = [tensor(PAGES, 2, 32, 4, 8), heads_first, tensor(2 * PAGES, 2, 16, 4, 8)]
    planes = [build_one(spec, entry, RowAddressing.PAGES).planes[0] for entry in entries]
    assert {plane.row_bytes for plane in planes} == {4096}


def test_beside_states_rows_are_addressed_in_kernel_blocks_with_gaps() -> None:
    """V of a kernel block lies behind its K. Without states, such a page is one row."""
    storage = FakeStorage(PAGES * 2 * 2 * PAGE)
    spec = FullAttentionSpec(block_size=2 * TOKENS, num_kv_heads=HEADS, head_size=HEAD)
    strides = (2 * PAGE // 2, HEADS * HEAD, HEAD, 1)
    entry = [
        FakeTensor(storage, (2 * PAGES, TOKENS, HEADS, HEAD), strides, offset)
        for offset in (0, PAGE // 2)
    ]
    states = MambaSpec(block_size=2 * TOKENS, shapes=((4 * PAGE // 2,),), dtypes=(BFLOAT16,))
    state = FakeTensor(storage, (PAGES, 4 * PAGE // 2), (4 * PAGE // 2, 1))
    alone = build_one(spec, entry, RowAddressing.TOKENS)
    assert (alone.tokens_per_row, alone.blocks_per_page) == (2 * TOKENS, 1)
    layout = build(
        config(PAGES, (spec, "a"), (states, "b")),
        {"a": entry, "b": [state]},
        addressing=RowAddressing.TOKENS,
    )
    full, _ = layout.groups
    assert (full.tokens_per_row, full.blocks_per_page) == (1, 2)
    assert full.rows_per_page == 2 * full.rows_per_block == 2 * TOKENS
    assert [each[:3] for each in placed(full)] == [(0, 2 * PAGE, ROW), (PAGE, 2 * PAGE, ROW)]
    # Tokens of the second kernel block of page 3 are rows of kernel block 7.
    tables = [[1, 3], [1, 3]]
    plan = TransferPlanner(layout).plan_load(
        [StoredChunk(RowMap.of([StoredRows(0, 8, 16, 8, 8, 0, 0)]))],
        TokenRange(8, 15),
        tables,
        groups=(0,),
    )
    runs = [tuple(run[1:4]) for run in plan.runs.tolist()]
    assert runs == [(6, 0, 4), (7, 0, 3)]


def test_rows_with_gaps_make_a_page_one_row() -> None:
    """The rows are halves of joined rows, so a page has as many pieces as tokens."""
    storage = FakeStorage(PAGES * 2 * PAGE)
    joined = (TOKENS * HEADS * 2 * HEAD, HEADS * 2 * HEAD, HEAD, 1)
    halves = [
        FakeTensor(storage, (PAGES, TOKENS, HEADS, HEAD), joined, part * HEADS * HEAD)
        for part in range(2)
    ]
    group = build_one(FULL, halves)
    assert group.rows_per_page == 1
    assert sorted(placed(group)) == [(piece * ROW, 2 * PAGE, ROW, 1) for piece in range(8)]


def test_too_many_pieces_are_refused() -> None:
    spec = MLAAttentionSpec(block_size=300, head_size=8)
    storage = FakeStorage(PAGES * 300 * 32)
    gaps = FakeTensor(storage, (PAGES, 300, 8), (300 * 16, 16, 1))
    with pytest.raises(LayoutError, match="300 pieces"):
        build_one(spec, gaps)


@pytest.mark.parametrize(("device", "rows"), [("npu:3", TOKENS), ("cpu", 1), ("cuda:0", 1)])
def test_rows_are_addressed_where_they_are_known(device: str, rows: int) -> None:
    entry = tensor(PAGES, TOKENS, HEADS, 2 * HEAD, device=device)
    assert build_one(FULL, entry).rows_per_page == rows


@pytest.mark.parametrize(("device", "rows"), [("npu:3", TOKENS), ("cpu", 1), ("cuda:0", TOKENS)])
def test_rows_are_divided_on_a_gpu_where_tokens_are_needed(device: str, rows: int) -> None:
    entry = {"a": tensor(PAGES, TOKENS, HEADS, 2 * HEAD, device=device)}
    layout = build(config(PAGES, (FULL, "a")), entry, needs_token_rows=True)
    assert layout.groups[0].rows_per_page == rows


def indexer_page() -> tuple[AscendMLAAttentionSpec, list[object]]:
    """A page of 72 bytes: each row has 16 bytes of keys and a scale of 2 bytes."""
    spec = AscendMLAAttentionSpec(
        block_size=TOKENS, head_size=16, dtype=INT8, compress_ratio=4, scale_dim=1
    )
    storage = FakeStorage(64 + PAGES * 72)
    keys = tensor(PAGES, TOKENS, 1, 16, dtype=INT8, storage=storage, page_stride=72, offset=64)
    scales = tensor(PAGES, TOKENS, 1, 1, dtype=FLOAT16, storage=storage, page_stride=36, offset=64)
    return spec, [keys, scales]


def test_planes_follow_the_entry_not_the_addresses() -> None:
    spec, entry = indexer_page()
    assert placed(build_one(spec, entry[::-1])) == [(128, 72, 2, TOKENS), (64, 72, 16, TOKENS)]


def test_two_shapes_of_the_same_bytes_make_a_page_one_row() -> None:
    """On A5, the indexer has a third view, of keys and scales together."""
    spec, (keys, scales) = indexer_page()
    both = tensor(PAGES, TOKENS, 1, 18, dtype=INT8, storage=keys.storage, page_stride=72, offset=64)
    group = build_one(spec, [keys, scales, both])
    assert placed(group) == [(64, 72, 72, 1)]
    assert group.tokens_per_row == 16


def test_kinds_of_attention() -> None:
    layout = build(
        config(
            PAGES,
            (SlidingWindowSpec(block_size=TOKENS, sliding_window=9), "window"),
            (ChunkedLocalAttentionSpec(block_size=TOKENS, attention_chunk_size=8), "chunked"),
            (FullAttentionSpec(block_size=TOKENS, sliding_window=9), "unified"),
        ),
        {name: tensor(PAGES, 2, TOKENS, 1, 8) for name in ("window", "chunked", "unified")},
    )
    assert [(g.kind, g.window_tokens, g.restart_tokens) for g in layout.groups] == [
        (GroupKind.WINDOW, 9, 0),
        (GroupKind.CHUNKED, 8, 8),
        (GroupKind.FULL, 0, 0),
    ]


def test_a_layer_that_shares_a_cache_brings_no_plane() -> None:
    entry = tensor(PAGES, 2, TOKENS, HEADS, HEAD)
    shared = build(config(PAGES, (FULL, "a", "b")), {"a": entry, "b": entry})
    unlisted = build(config(PAGES, (FULL, "a")), {"a": entry, "b": entry})
    assert shared == unlisted
    assert shared.num_planes == 2


def test_an_empty_group_keeps_its_number() -> None:
    layout = build(
        config(PAGES, (FULL,), (FULL, "a")), {"a": tensor(PAGES, 2, TOKENS, HEADS, HEAD)}
    )
    assert layout.num_scheduler_groups == 2
    assert layout.groups[0].kv_cache_group_id == 1


KEYS = tensor(PAGES, TOKENS, HEADS, HEAD)
BOTH = tensor(PAGES, 2, TOKENS, HEADS, HEAD)
OF_MORE_PAGES = tensor(PAGES + 1, 2, TOKENS, HEADS, HEAD)
EXPANDED = tensor(PAGES, 2, TOKENS, HEADS, HEAD, page_stride=0)
CONTRADICTIONS = {
    "missing layer": (FULL, {}, "1 of 1 configured layers"),
    "unknown layer": (FULL, {"a": BOTH, "b": OF_MORE_PAGES}, "layer b has a tensor of its own"),
    "other pages": (FULL, {"a": OF_MORE_PAGES}, "of 5 pages"),
    "only K": (FULL, {"a": KEYS}, f"{PAGE} bytes per page.*{2 * PAGE}"),
    "more than K and V": (FULL, {"a": (BOTH, KEYS)}, f"{3 * PAGE} bytes per page.*{2 * PAGE}"),
    "other rows": (FULL, {"a": tensor(PAGES, 8, HEADS, HEAD)}, "8 rows, expected 4"),
    "expanded": (FULL, {"a": EXPANDED}, "positive"),
    "cross attention": (CrossAttentionSpec(block_size=TOKENS), {"a": BOTH}, "CrossAttentionSpec"),
    "no axes": (FULL, {"a": tensor(PAGES)}, "found none"),
}


@pytest.mark.parametrize("name", CONTRADICTIONS)
def test_contradictions_are_refused(name: str) -> None:
    spec, caches, message = CONTRADICTIONS[name]
    with pytest.raises(GroupError, match=message):
        build(config(PAGES, (spec, "a")), caches, addressing=RowAddressing.TOKENS)


def test_planes_of_one_group_in_each_others_way_are_refused() -> None:
    """Different groups may share the bytes of equal pages, because block ids separate them."""
    spec = MLAAttentionSpec(block_size=TOKENS, head_size=HEADS * HEAD)
    storage = FakeStorage(4 * PAGES * PAGE)
    caches = {
        name: tensor(PAGES, TOKENS, HEADS * HEAD, storage=storage, page_stride=PAGE, offset=offset)
        for name, offset in (("a", 0), ("b", PAGE // 4))
    }
    with pytest.raises(LayoutError, match="layers a and b"):
        build(config(PAGES, (spec, "a", "b")), caches)
    assert build(config(PAGES, (spec, "a"), (spec, "b")), caches).num_planes == 2


def test_tensors_of_one_device_type_only() -> None:
    caches = {name: tensor(PAGES, 2, TOKENS, HEADS, HEAD, device=name) for name in ("npu", "cpu")}
    with pytest.raises(LayoutError, match=r"\['cpu', 'npu'\]"):
        build(config(PAGES, (FULL, "npu", "cpu")), caches)


# Properties that tensors do not show.

NUM_TOKENS = 16
LATENT = MLAAttentionSpec(block_size=NUM_TOKENS, head_size=32)
LAYERS = {name: tensor(PAGES, NUM_TOKENS, 1, 32) for name in ("0.attn", "1.attn")}
LATENT_CONFIG = config(PAGES, (LATENT, *LAYERS))
QUANTIZATIONS = ("fa_quant", "c8_quant")
"""Quantizations of vLLM-Ascend. A config has the attributes of one of them."""


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
    assert group.rows_per_page == NUM_TOKENS


def test_nz_pages_are_taken_whole() -> None:
    """With ``enable_kv_nz``, kernels write tiles of 16 elements. The shape does not show this."""
    nz_layers = read_nz_layers(vllm_config(enable_kv_nz=True), LAYERS)
    (group,) = build_layout(LATENT_CONFIG, LAYERS, nz_layers).groups
    assert group.rows_per_page == 1 and group.tokens_per_row == NUM_TOKENS
    assert sum(plane.row_bytes for plane in group.planes) == 2 * NUM_TOKENS * 64
    assert all(plane.is_packed for plane in group.planes)


@pytest.mark.parametrize("quantization", QUANTIZATIONS)
def test_quantized_layers_are_taken_whole_and_others_by_row(quantization: str) -> None:
    """The kernels of quantized layers write tiles. The shape does not show this."""
    nz_layers = read_nz_layers(vllm_config(quantization, ("1.attn",)), LAYERS)
    by_row, whole = build_layout(LATENT_CONFIG, LAYERS, nz_layers).groups
    assert [plane.layer_name for plane in by_row.planes] == ["0.attn"]
    assert [plane.layer_name for plane in whole.planes] == ["1.attn"]
    assert (by_row.rows_per_page, whole.rows_per_page) == (NUM_TOKENS, 1)
    not_tiled = vllm_config(quantization, ("1.attn",), is_enabled=False)
    assert not read_nz_layers(not_tiled, LAYERS)


@pytest.fixture
def acl_formats(monkeypatch: pytest.MonkeyPatch) -> dict[FakeStorage, int]:
    """Results of ``torch_npu.get_npu_format``, by storage. Other storages have format 2 (ND)."""
    formats: dict[FakeStorage, int] = {}
    torch_npu = ModuleType("torch_npu")
    torch_npu.get_npu_format = lambda one: formats.get(one.untyped_storage(), 2)
    monkeypatch.setitem(sys.modules, "torch_npu", torch_npu)
    return formats


def test_pages_of_a_private_format_are_taken_whole(acl_formats: dict[FakeStorage, int]) -> None:
    """The format is FRACTAL_NZ, as on a 310P."""
    entry = tensor(PAGES, NUM_TOKENS, 1, 32)
    (group,) = build(config(PAGES, (LATENT, "a")), {"a": entry}).groups
    assert group.rows_per_page == NUM_TOKENS
    acl_formats[entry.untyped_storage()] = 29
    (group,) = build(config(PAGES, (LATENT, "a")), {"a": entry}).groups
    assert group.rows_per_page == 1 and group.planes[0].is_packed


def test_a_private_format_with_padding_is_refused(acl_formats: dict[FakeStorage, int]) -> None:
    """Only the device knows the places of the elements."""
    storage = FakeStorage(PAGES * NUM_TOKENS * 64 + 512)
    entry = FakeTensor(storage, (PAGES, NUM_TOKENS, 1, 32), (NUM_TOKENS * 32, 32, 32, 1))
    acl_formats[storage] = 29
    with pytest.raises(LayoutError, match=r"layer a: .*ACL format 29.* 5632 bytes for 5120"):
        build(config(PAGES, (LATENT, "a")), {"a": entry})


def test_format_is_asked_of_npu_tensors_only(acl_formats: dict[FakeStorage, int]) -> None:
    entry = tensor(PAGES, NUM_TOKENS, 1, 32, device="cpu")
    acl_formats[entry.untyped_storage()] = 29
    assert build(config(PAGES, (LATENT, "a")), {"a": entry}).num_planes == 1


def test_ratios_in_one_group_need_the_entries_of_each() -> None:
    c4 = MLAAttentionSpec(block_size=NUM_TOKENS, head_size=8, dtype=UINT8, compress_ratio=4)
    c8 = MLAAttentionSpec(block_size=NUM_TOKENS, head_size=8, dtype=UINT8, compress_ratio=8)
    caches = {
        "a": tensor(PAGES, 4, 8, dtype=UINT8),
        "b": tensor(PAGES, 2, 8, dtype=UINT8),
    }
    (group,) = build(config(PAGES, {"a": c4, "b": c8}), caches).groups
    assert (group.rows_per_page, group.compress_ratio) == (1, 4)


def test_pages_whose_inside_has_another_order_are_another_layout() -> None:
    """A page that is one row has the same size, whether tokens or heads come first in it."""
    spec = FullAttentionSpec(block_size=TOKENS, num_kv_heads=HEADS, head_size=HEAD)
    tokens_first = tensor(PAGES, 2, TOKENS, HEADS, HEAD)
    heads_first = tensor(PAGES, 2, TOKENS, HEADS, HEAD, order=(0, 1, 3, 2, 4))
    planes = [
        build(config(PAGES, (spec, "a")), {"a": each}, addressing=RowAddressing.PAGES).groups
        for each in (tokens_first, tokens_first, heads_first)
    ]
    assert planes[0] == planes[1] != planes[2]
