# SPDX-License-Identifier: Apache-2.0
"""From registered tensors to planes: offsets by hand, for every shape that is registered."""

from __future__ import annotations

from functools import partial

import pytest
from support.layout.fakes import (
    BFLOAT16,
    FLOAT16,
    FLOAT32,
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
    SlidingWindowMLASpec,
    SlidingWindowSpec,
    config,
    tensor,
)

from vllm_ascend_kvext.groups.errors import GroupError
from vllm_ascend_kvext.groups.model import GroupKind
from vllm_ascend_kvext.layout.build import build_layout
from vllm_ascend_kvext.layout.errors import LayoutError
from vllm_ascend_kvext.layout.model import KVLayout, LayoutGroup, RowAddressing
from vllm_ascend_kvext.layout.worker_config import WorkerConfig

build = partial(build_layout, worker=WorkerConfig())

PAGES = 5
HEADS, TOKENS, HEAD = 3, 4, 8
FULL = FullAttentionSpec(block_size=TOKENS, num_kv_heads=HEADS, head_size=HEAD)
ROW = HEADS * HEAD * 2
"""Bytes of K of one token."""
PAGE = TOKENS * ROW

Placed = tuple[int, int, int, int]


def placed(group: LayoutGroup) -> list[Placed]:
    """Offset of page 0's region, page stride, row bytes, rows per page."""
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
    layout = build(config(PAGES, (spec, "a")), {"a": entry}, addressing=addressing)
    (group,) = layout.groups
    assert_inside(layout)
    return group


def assert_inside(layout: KVLayout) -> None:
    """No plane leaves its pool, no region its page."""
    for group in layout.groups:
        for plane in group.planes:
            region_bytes = plane.row_bytes * group.rows_per_page
            assert plane.region_offset_bytes + region_bytes <= plane.page_stride_bytes
            last = plane.base_bytes + (layout.num_pages - 1) * plane.page_stride_bytes
            end_bytes = last + plane.region_offset_bytes + region_bytes
            assert end_bytes <= layout.storages[plane.storage].num_bytes


@pytest.mark.parametrize(
    ("entry", "expected"),
    [
        pytest.param(
            tensor(2, PAGES, TOKENS, HEADS, HEAD),
            [(0, PAGE, ROW, TOKENS), (PAGES * PAGE, PAGE, ROW, TOKENS)],
            id="K pages, then V pages",
        ),
        pytest.param(
            tensor(PAGES, 2, TOKENS, HEADS, HEAD),
            [(0, 2 * PAGE, ROW, TOKENS), (PAGE, 2 * PAGE, ROW, TOKENS)],
            id="K and V in each page",
        ),
        pytest.param(
            tensor(2, PAGES, TOKENS, HEADS, HEAD, order=(1, 0, 2, 3, 4)),
            [(0, 2 * PAGE, ROW, TOKENS), (PAGE, 2 * PAGE, ROW, TOKENS)],
            id="K and V in each page, though the shape says otherwise",
        ),
        pytest.param(
            tensor(PAGES, 2, TOKENS, HEADS, HEAD, order=(0, 1, 3, 2, 4)),
            [(part * PAGE // HEADS, 2 * PAGE, HEAD * 2, TOKENS) for part in range(2 * HEADS)],
            id="heads outside tokens",
        ),
        pytest.param(
            tensor(PAGES, TOKENS, HEADS, 2 * HEAD),
            [(0, 2 * PAGE, 2 * ROW, TOKENS)],
            id="K and V in each row",
        ),
        pytest.param(
            tensor(2 * PAGES, TOKENS // 2, HEADS, 2 * HEAD),
            [(0, 2 * PAGE, 2 * ROW, TOKENS)],
            id="two kernel blocks per page, adjacent rows",
        ),
        pytest.param(
            tensor(PAGES, TOKENS, HEADS, 2 * HEAD, offset=64),
            [(128, 2 * PAGE, 2 * ROW, TOKENS)],
            id="storage offset",
        ),
    ],
)
def test_keys_and_values(entry: object, expected: list[Placed]) -> None:
    assert placed(build_one(FULL, entry)) == expected


def test_kernel_blocks_apart_make_a_page_one_row() -> None:
    """K and V of each half page are together: rows of a page are not adjacent."""
    group = build_one(FULL, tensor(2 * PAGES, 2, TOKENS // 2, HEADS, HEAD))
    assert placed(group) == [(0, 2 * PAGE, 2 * PAGE, 1)]
    assert group.tokens_per_row == TOKENS and group.planes[0].is_packed


def test_a_page_that_is_one_row_says_how_its_bytes_are_ordered() -> None:
    """Tokens first, heads first, and two kernel blocks: as many bytes, in three orders."""
    spec = FullAttentionSpec(block_size=32, num_kv_heads=4, head_size=8)
    heads_first = tensor(PAGES, 2, 32, 4, 8, order=(0, 1, 3, 2, 4))
    entries = [tensor(PAGES, 2, 32, 4, 8), heads_first, tensor(2 * PAGES, 2, 16, 4, 8)]
    planes = [build_one(spec, entry, RowAddressing.PAGES).planes[0] for entry in entries]
    assert {plane.row_bytes for plane in planes} == {4096}
    assert [plane.axes for plane in planes] == [
        ((1, 2), (2, 32), (3, 4), (4, 8)),
        ((1, 2), (3, 4), (2, 32), (4, 8)),
        ((0, 2), (1, 2), (2, 16), (3, 4), (4, 8)),
    ]


def test_rows_with_gaps_make_a_page_one_row() -> None:
    """Halves of joined rows: as many pieces as tokens, each copied as it lies."""
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


def test_a_tuple_of_tensors() -> None:
    pair = tuple(tensor(PAGES, TOKENS, HEADS, HEAD) for _ in range(2))
    group = build_one(FULL, pair)
    assert placed(group) == [(0, PAGE, ROW, TOKENS)] * 2
    assert [plane.storage for plane in group.planes] == [0, 1]


def test_latent_and_rope() -> None:
    spec = MLAAttentionSpec(block_size=TOKENS, head_size=12)
    group = build_one(spec, (tensor(PAGES, TOKENS, 1, 8), tensor(PAGES, TOKENS, 1, 4)))
    assert [plane.row_bytes for plane in group.planes] == [16, 8]


def test_latent_in_three_dimensions() -> None:
    spec = MLAAttentionSpec(block_size=TOKENS, head_size=12)
    assert placed(build_one(spec, tensor(PAGES, TOKENS, 12))) == [(0, 96, 24, TOKENS)]


@pytest.mark.parametrize(
    "shape",
    [(PAGES, HEADS, TOKENS, 2 * HEAD), (2, PAGES, HEADS, TOKENS, HEAD)],
    ids=["keys and values in a row", "keys before values"],
)
@pytest.mark.parametrize("addressing", RowAddressing)
def test_what_stands_before_the_tokens_makes_a_page_one_row(
    shape: tuple[int, ...], addressing: RowAddressing
) -> None:
    group = build_one(FULL, tensor(*shape), addressing)
    assert group.rows_per_page == 1 and group.tokens_per_row == TOKENS
    assert group.row_bytes == 2 * PAGE
    assert all(plane.is_packed for plane in group.planes)


def test_as_many_heads_as_tokens_are_not_guessed() -> None:
    spec = FullAttentionSpec(block_size=4, num_kv_heads=4, head_size=HEAD)
    assert build_one(spec, tensor(PAGES, 4, 4, 2 * HEAD)).rows_per_page == 1


@pytest.mark.parametrize(("device", "rows"), [("npu:3", TOKENS), ("cpu", 1), ("cuda:0", 1)])
def test_rows_are_addressed_where_they_are_known(device: str, rows: int) -> None:
    entry = tensor(PAGES, TOKENS, HEADS, 2 * HEAD, device=device)
    assert build_one(FULL, entry).rows_per_page == rows


def test_bytes_have_an_order_that_only_kernels_know() -> None:
    spec = MLAAttentionSpec(block_size=TOKENS, head_size=132, dtype=UINT8)
    group = build_one(spec, tensor(PAGES, TOKENS, 132, dtype=UINT8))
    assert placed(group) == [(0, 528, 528, 1)]


def indexer_page() -> tuple[AscendMLAAttentionSpec, list[object]]:
    """Keys of 16 bytes per row, then a scale of 2: 72 bytes per page."""
    spec = AscendMLAAttentionSpec(
        block_size=TOKENS, head_size=16, dtype=INT8, compress_ratio=4, scale_dim=1
    )
    storage = FakeStorage(64 + PAGES * 72)
    keys = tensor(PAGES, TOKENS, 1, 16, dtype=INT8, storage=storage, page_stride=72, offset=64)
    scales = tensor(PAGES, TOKENS, 1, 1, dtype=FLOAT16, storage=storage, page_stride=36, offset=64)
    return spec, [keys, scales]


def test_several_regions_in_one_page() -> None:
    spec, entry = indexer_page()
    group = build_one(spec, entry)
    assert placed(group) == [(64, 72, 16, TOKENS), (128, 72, 2, TOKENS)]
    assert {plane.base_bytes for plane in group.planes} == {64}
    assert (group.tokens_per_row, group.tokens_per_page) == (4, 16)


def test_planes_follow_the_entry_not_the_addresses() -> None:
    spec, entry = indexer_page()
    assert placed(build_one(spec, entry[::-1])) == [(128, 72, 2, TOKENS), (64, 72, 16, TOKENS)]


def test_two_shapes_of_the_same_bytes_make_a_page_one_row() -> None:
    """On A5 the indexer has a third view, over keys and scales."""
    spec, (keys, scales) = indexer_page()
    both = tensor(PAGES, TOKENS, 1, 18, dtype=INT8, storage=keys.storage, page_stride=72, offset=64)
    group = build_one(spec, [keys, scales, both])
    assert placed(group) == [(64, 72, 72, 1)]
    assert group.tokens_per_row == 16


def test_padding_is_left_out() -> None:
    spec = SlidingWindowMLASpec(
        block_size=2, head_size=4, dtype=FLOAT32, page_size_padded=64, sliding_window=8
    )
    group = build_one(spec, [tensor(PAGES, 2, 1, 4, dtype=FLOAT32, page_stride=16)])
    assert placed(group) == [(0, 64, 16, 2)]


def test_one_blob_of_layers_of_different_groups() -> None:
    storage = FakeStorage(PAGES * 64)
    c4 = AscendMLAAttentionSpec(block_size=TOKENS, head_size=8, compress_ratio=4)
    window = SlidingWindowMLASpec(block_size=TOKENS, head_size=8, sliding_window=TOKENS)
    state = SlidingWindowMLASpec(
        block_size=2, head_size=4, dtype=FLOAT32, page_size_padded=64, sliding_window=8
    )
    layout = build(
        config(PAGES, (c4, "a.attn"), (window, "a.swa"), (state, "a.state_cache")),
        {
            "a.attn": [tensor(PAGES, TOKENS, 1, 8, storage=storage)],
            "a.swa": [tensor(PAGES, TOKENS, 1, 8, storage=storage)],
            "a.state_cache": [
                tensor(PAGES, 2, 1, 4, dtype=FLOAT32, storage=storage, page_stride=16)
            ],
        },
    )
    assert_inside(layout)
    assert len(layout.storages) == 1
    assert [group.kind for group in layout.groups] == [
        GroupKind.FULL,
        GroupKind.WINDOW,
        GroupKind.WINDOW,
    ]
    assert [group.holds_states for group in layout.groups] == [False, False, True]
    assert [group.scheduler_group for group in layout.groups] == [0, 1, 2]


def test_one_scheduler_group_becomes_several_where_ratios_differ() -> None:
    c4 = MLAAttentionSpec(block_size=16, head_size=8, compress_ratio=4)
    c8 = MLAAttentionSpec(block_size=16, head_size=8, compress_ratio=8)
    layout = build(
        config(PAGES, {"b": c8, "a": c4}), {"a": tensor(PAGES, 4, 8), "b": tensor(PAGES, 2, 8)}
    )
    assert [(g.scheduler_group, g.tokens_per_row, g.rows_per_page) for g in layout.groups] == [
        (0, 4, 4),
        (0, 8, 2),
    ]
    assert layout.unit_tokens == 8


def test_mamba_states() -> None:
    spec = MambaSpec(block_size=16, shapes=((3, 4), (2, 2)), dtypes=(BFLOAT16, FLOAT32))
    storage = FakeStorage(PAGES * 40)
    entry = [
        tensor(PAGES, 3, 4, storage=storage, page_stride=20),
        tensor(PAGES, 2, 2, dtype=FLOAT32, storage=storage, page_stride=10, offset=6),
    ]
    group = build_one(spec, entry)
    assert placed(group) == [(0, 40, 24, 1), (24, 40, 16, 1)]
    assert group.is_snapshot and group.tokens_per_row == 16
    assert not any(plane.is_packed for plane in group.planes)


def test_a_compressor_without_overlap_restarts() -> None:
    state = SlidingWindowMLASpec(block_size=2, head_size=8, sliding_window=8)
    c8 = AscendMLAAttentionSpec(block_size=TOKENS, head_size=8, compress_ratio=8)
    for ratio_is_there in (True, False):
        groups = [(state, "a.state_cache"), *([(c8, "a.attn")] if ratio_is_there else [])]
        caches = {"a.state_cache": tensor(PAGES, 2, 1, 8), "a.attn": tensor(PAGES, TOKENS, 1, 8)}
        names = {name for group in groups for name in group[1:]}
        layout = build(config(PAGES, *groups), {name: caches[name] for name in sorted(names)})
        assert layout.groups[0].restart_tokens == (8 if ratio_is_there else 0)


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
    assert layout.groups[0].scheduler_group == 1


def test_planes_follow_the_config_not_the_dictionary() -> None:
    caches = {name: tensor(PAGES, 2, TOKENS, HEADS, HEAD) for name in "ab"}
    one = build(config(PAGES, (FULL, "b", "a")), caches)
    other = build(config(PAGES, (FULL, "b", "a")), dict(reversed(caches.items())))
    assert one == other
    assert [plane.layer_name for plane in one.groups[0].planes] == ["b", "b", "a", "a"]


STORAGE = FakeStorage(PAGES * 2 * PAGE)


@pytest.mark.parametrize(
    ("spec", "caches", "message"),
    [
        pytest.param(FULL, {}, "1 of 1 configured layers", id="missing layer"),
        pytest.param(
            FULL,
            {
                "a": tensor(PAGES, 2, TOKENS, HEADS, HEAD),
                "b": tensor(PAGES, 2, TOKENS, HEADS, HEAD),
            },
            "layer b has a tensor of its own",
            id="unknown layer",
        ),
        pytest.param(
            FULL, {"a": tensor(PAGES + 1, 2, TOKENS, HEADS, HEAD)}, "of 5 pages", id="other pages"
        ),
        pytest.param(
            FULL,
            {"a": tensor(PAGES, TOKENS, HEADS, HEAD)},
            f"{PAGE} bytes per page.*{2 * PAGE}",
            id="only K",
        ),
        pytest.param(
            FULL,
            {"a": tuple(tensor(PAGES, TOKENS, HEADS, HEAD) for _ in range(3))},
            f"{3 * PAGE} bytes per page.*{2 * PAGE}",
            id="more than K and V",
        ),
        pytest.param(
            FULL, {"a": tensor(PAGES, 8, HEADS, HEAD)}, "8 rows, expected 4", id="other rows"
        ),
        pytest.param(
            FULL,
            {"a": tensor(PAGES, 2, TOKENS, HEADS, HEAD, page_stride=0)},
            "positive",
            id="expanded",
        ),
        pytest.param(
            CrossAttentionSpec(block_size=TOKENS),
            {"a": tensor(PAGES, 2, TOKENS, 1, 8)},
            "CrossAttentionSpec",
            id="cross attention",
        ),
        pytest.param(FULL, {"a": tensor(PAGES)}, "found none", id="no axes"),
    ],
)
def test_contradictions_are_refused(spec: object, caches: dict, message: str) -> None:
    with pytest.raises(GroupError, match=message):
        build(config(PAGES, (spec, "a")), caches, addressing=RowAddressing.TOKENS)


def test_two_axes_that_may_count_pages_are_refused() -> None:
    with pytest.raises(LayoutError, match="two such axes"):
        build(config(2, (FULL, "a")), {"a": tensor(2, 2, TOKENS, HEADS, HEAD)})


@pytest.mark.parametrize(
    ("same_group", "offset", "stride", "is_refused"),
    [
        # offset in elements of two bytes, stride in bytes of the second layer's pages
        (False, 0, PAGE, False),  # one blob: block ids keep the layers apart
        (True, 0, PAGE, False),  # the same bytes: a shared cache
        (True, HEAD, PAGE, True),  # half a page off
        (False, HEAD, PAGE, True),
        (False, 0, PAGE + ROW, True),  # other pages over the same bytes
        (False, PAGES * PAGE // 2, PAGE, False),  # behind it
        (True, PAGES * PAGE // 2, PAGE, False),
        (False, PAGE // 2, PAGE, True),  # page 0 is the other's page 1
        (True, PAGE // 2, PAGE, True),
    ],
)
def test_planes_in_each_others_way(
    same_group: bool, offset: int, stride: int, is_refused: bool
) -> None:
    spec = MLAAttentionSpec(block_size=TOKENS, head_size=HEADS * HEAD)
    storage = FakeStorage(4 * PAGES * PAGE)
    caches = {
        "a": tensor(PAGES, TOKENS, HEADS * HEAD, storage=storage),
        "b": tensor(
            PAGES,
            TOKENS,
            HEADS * HEAD,
            storage=storage,
            offset=offset,
            page_stride=stride // 2,
        ),
    }
    groups = [(spec, "a", "b")] if same_group else [(spec, "a"), (spec, "b")]
    if is_refused:
        with pytest.raises(LayoutError, match="layers a and b"):
            build(config(PAGES, *groups), caches)
    else:
        assert_inside(build(config(PAGES, *groups), caches))


@pytest.mark.parametrize("same_group", [True, False])
def test_pages_that_begin_at_different_bytes(same_group: bool) -> None:
    """Page by page they overlap, and no page reaches another: block ids keep groups apart."""
    spec = MLAAttentionSpec(block_size=TOKENS, head_size=HEADS * HEAD)
    storage = FakeStorage(4 * PAGES * PAGE)
    caches = {
        name: tensor(PAGES, TOKENS, HEADS * HEAD, storage=storage, page_stride=PAGE, offset=offset)
        for name, offset in (("a", 0), ("b", PAGE // 4))
    }
    if same_group:
        with pytest.raises(LayoutError, match="layers a and b"):
            build(config(PAGES, (spec, "a", "b")), caches)
    else:
        assert build(config(PAGES, (spec, "a"), (spec, "b")), caches).num_planes == 2


def test_tensors_of_one_device_type_only() -> None:
    caches = {name: tensor(PAGES, 2, TOKENS, HEADS, HEAD, device=name) for name in ("npu", "cpu")}
    with pytest.raises(LayoutError, match=r"\['cpu', 'npu'\]"):
        build(config(PAGES, (FULL, "npu", "cpu")), caches)


def test_a_layer_in_several_groups_deals_its_tensors_out() -> None:
    """The first vLLM-Ascend with DeepSeek-V4 registers all caches of a layer in one list."""
    attention = AscendMLAAttentionSpec(block_size=TOKENS, head_size=16, compress_ratio=4)
    indexer, (keys, scales) = indexer_page()
    state = SlidingWindowMLASpec(block_size=2, head_size=4, dtype=FLOAT32, sliding_window=8)
    entry = (
        tensor(PAGES, TOKENS, 1, 16),
        keys,
        scales,
        tensor(PAGES, 2, 1, 2, dtype=FLOAT32),
        tensor(PAGES, 2, 1, 2, dtype=FLOAT32),
    )
    layout = build(config(PAGES, (attention, "a"), (indexer, "a"), (state, "a")), {"a": entry})
    assert [len(group.planes) for group in layout.groups] == [1, 2, 2]
    with pytest.raises(LayoutError, match=r"5 tensors are registered.*after 3"):
        build(config(PAGES, (attention, "a"), (indexer, "a")), {"a": entry})
