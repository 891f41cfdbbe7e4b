# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vllm-ascend-kvext project
"""A block that is copied for a hit inside it is copied as a whole, whatever shares its pages.

vLLM's own functions plan, allocate and copy. The groups have several layers, and states that are
shorter than the keys and values of a block.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from functools import partial
from itertools import pairwise
from types import ModuleType
from typing import Any

import pytest
import torch
from support.layout.upstream_line import config_by_layers
from vllm.v1.kv_cache_interface import (
    FullAttentionSpec,
    KVCacheConfig,
    KVCacheGroupSpec,
    KVCacheSpec,
    MambaSpec,
)

from vllm_ascend_kvext.patches.repairs import block_copies

pytestmark = pytest.mark.vllm(">=0.30")

NUM_CASES = 200
NUM_BLOCKS = 12
LAYOUTS = ("LBHNC", "BLHNC")
"""All blocks of a layer in a row, and all layers of a block in a row."""

Copy = Callable[[Sequence[torch.Tensor], int, Sequence[Any]], None]


def full_attention(rng: random.Random) -> FullAttentionSpec:
    return FullAttentionSpec(
        block_size=rng.choice((16, 32)),
        num_kv_heads=rng.choice((1, 2)),
        head_size=rng.choice((8, 16)),
        dtype=torch.float32,
    )


def states(rng: random.Random, full: FullAttentionSpec) -> MambaSpec:
    """A state that fills a third of a page, or the page."""
    elements = full.page_size_bytes // 4
    width = rng.choice((elements // 3 - 4, elements - 4))
    return MambaSpec(
        block_size=full.block_size,
        shapes=((4,), (width,)),
        dtypes=(torch.float32, torch.float32),
        page_size_padded=full.page_size_bytes,
    )


def config_of(rng: random.Random, layout: str) -> KVCacheConfig:
    """Groups of states and of full attention with the same pages, in a random order."""
    full = full_attention(rng)
    num_layers = rng.choice((1, 2, 3))
    specs: list[KVCacheSpec] = [full, *(states(rng, full) for _ in range(rng.choice((1, 3))))]
    rng.shuffle(specs)
    groups = [
        KVCacheGroupSpec(
            [f"layers.{place * len(specs) + number}" for place in range(num_layers)], spec
        )
        for number, spec in enumerate(specs)
    ]
    config = config_by_layers(groups, NUM_BLOCKS)
    if layout == "BLHNC":
        for tensor in config.kv_cache_tensors:
            tensor.layer_stride = full.page_size_bytes
            tensor.block_stride = full.page_size_bytes * num_layers
    config.kv_cache_layout = layout
    return config


def caches_of(config: KVCacheConfig) -> list[torch.Tensor]:
    """The tensors of all layers, in the order in which the model runner keeps them."""
    from vllm.v1.kv_cache_layout import KVCacheLayout
    from vllm.v1.worker.utils import allocate_kv_cache

    found = allocate_kv_cache(config, "cpu", KVCacheLayout[config.kv_cache_layout])
    return [found[name] for name in sorted(found, key=lambda name: int(name.split(".")[1]))]


def wrong_bytes(copy: Copy, rng: random.Random, layout: str) -> int:
    """The number of bytes of pages that differ from what they should be after some copies."""
    config = config_of(rng, layout)
    caches = caches_of(config)
    storage = torch.empty(0, dtype=torch.uint8).set_(caches[0].untyped_storage())
    storage.copy_(torch.randint(0, 256, storage.shape, dtype=torch.uint8))
    blocks = rng.sample(range(1, NUM_BLOCKS), 2 * rng.choice((1, 2, 5)))
    from vllm.v1.core.kv_cache_utils import KVCacheBlockCopy

    copies = [KVCacheBlockCopy(*pair) for pair in list(pairwise(blocks))[::2]]
    (page_bytes,) = {group.kv_cache_spec.page_size_bytes for group in config.kv_cache_groups}
    expected = storage.clone()
    tensor = max(config.kv_cache_tensors, key=lambda tensor: len(tensor.layers))
    for each in copies:
        for layer in range(len(tensor.layers)):
            at = layer * tensor.layer_stride
            source, target = (at + block * tensor.block_stride for block in each)
            expected[target : target + page_bytes] = expected[source : source + page_bytes]
    copy(caches, NUM_BLOCKS, copies)
    return int((storage != expected).sum())


def upstreams() -> Copy:
    from vllm.v1.worker.utils import copy_kv_cache_blocks_inplace

    return copy_kv_cache_blocks_inplace


def wrong_cases(copy: Copy) -> list[int]:
    found = []
    for number in range(NUM_CASES):
        rng = random.Random(number)
        torch.manual_seed(number)
        if wrong_bytes(copy, rng, LAYOUTS[number % 2]):
            found.append(number)
    return found


def test_stock_leaves_out_parts_of_blocks() -> None:
    assert len(wrong_cases(upstreams())) > NUM_CASES / 20


def test_every_block_is_copied_as_a_whole() -> None:
    assert not wrong_cases(partial(block_copies.copy_every_view, upstreams(), None))


def test_no_view_is_copied_twice() -> None:
    """Layers that share another layer's cache have the same view."""
    calls: list[list[torch.Tensor]] = []
    config = config_of(random.Random(0), "LBHNC")
    caches = caches_of(config)
    block_copies.copy_every_view(
        lambda part, *_: calls.append(part), None, caches + caches, NUM_BLOCKS, [(1, 2)]
    )
    places = [(each.data_ptr(), each.shape, each.stride()) for part in calls for each in part]
    assert len(places) == len(set(places))
    assert all(len({each.data_ptr() for each in part}) == len(part) for part in calls)


def test_blocks_of_a_whole_storage_are_copied_once() -> None:
    calls: list[list[torch.Tensor]] = []
    caches = caches_of(config_of(random.Random(0), "BLHNC"))
    block_copies.copy_every_view(
        lambda part, *_: calls.append(part), None, caches, NUM_BLOCKS, [(1, 2)]
    )
    assert [len(part) for part in calls] == [1]


def test_each_layer_of_vllm_ascend_has_a_call_of_its_own() -> None:
    """A convolution and keys begin at one address. Two layers share a cache, and one has none."""
    page = torch.zeros(NUM_BLOCKS, 16)
    state = [page[:, :4], page[:, 4:12]]
    keys_and_values = (page[:, :8], page[:, 8:])
    calls: list[list[Any]] = []
    caches = [state, None, keys_and_values, keys_and_values, page]
    block_copies.copy_every_layer(
        lambda part, *_: calls.append(part), None, caches, NUM_BLOCKS, [(1, 2)]
    )
    expected = (state, keys_and_values, page)
    assert len(calls) == len(expected)
    assert all(part[0] is cache for part, cache in zip(calls, expected, strict=True))


def test_nothing_is_copied_without_copies() -> None:
    def fail(*_: Any) -> None:
        raise AssertionError

    for copy in (block_copies.copy_every_view, block_copies.copy_every_layer):
        copy(fail, None, [], NUM_BLOCKS, [])


class Importer(ModuleType):
    """A module that has imported a function of the name of upstream's."""

    copy_kv_cache_blocks_inplace: Any


def importer(found: Any, defined_in: str = block_copies._DEFINED_IN) -> Importer:
    module = Importer("importer")
    found.__module__ = defined_in
    module.copy_kv_cache_blocks_inplace = found
    return module


def test_a_function_that_is_imported_already_is_wrapped_and_given_back() -> None:
    wrappings = block_copies._Wrappings()
    called: list[Any] = []

    def copy(part: Any, *_: Any) -> None:
        called.append(part)

    module = importer(copy)
    wrappings.wrap(module)
    cache = torch.zeros(4, 2)
    module.copy_kv_cache_blocks_inplace([cache, cache], 4, [(1, 2)])
    assert len(called) == 1 and len(called[0]) == 1
    wrappings.take_back()
    assert module.copy_kv_cache_blocks_inplace is copy
    wrappings.wrap(module)
    assert module.copy_kv_cache_blocks_inplace is copy


def test_a_function_of_vllm_ascend_is_left_to_its_own_repair() -> None:
    def copy(*_: Any) -> None: ...

    module = importer(copy, "vllm_ascend.worker.utils")
    block_copies._Wrappings().wrap(module)
    assert module.copy_kv_cache_blocks_inplace is copy
