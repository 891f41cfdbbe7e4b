# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vllm-ascend-kvext project
"""Specs, configs and tensors without memory. They have the attributes that the layout reads.

The classes have vLLM's names, because specs are identified by the names of their base classes.
"""

from __future__ import annotations

import itertools
import math
from dataclasses import dataclass, field
from typing import Any

from vllm_ascend_kvext.groups.model import CacheGroup
from vllm_ascend_kvext.groups.specs import cache_group, read_layer_specs


@dataclass(frozen=True)
class FakeDtype:
    name: str
    itemsize: int

    def __str__(self) -> str:
        return f"torch.{self.name}"


BFLOAT16 = FakeDtype("bfloat16", 2)
FLOAT16 = FakeDtype("float16", 2)
FLOAT32 = FakeDtype("float32", 4)
INT8 = FakeDtype("int8", 1)
UINT8 = FakeDtype("uint8", 1)

_addresses = itertools.count(1 << 20, 1 << 40)


@dataclass(frozen=True)
class FakeStorage:
    num_bytes: int
    address: int = field(default_factory=lambda: next(_addresses))

    def data_ptr(self) -> int:
        return self.address

    def nbytes(self) -> int:
        return self.num_bytes


@dataclass(frozen=True)
class FakeTensor:
    """A tensor without memory. Strides and the offset count elements, as in torch."""

    storage: FakeStorage
    shape: tuple[int, ...]
    strides: tuple[int, ...]
    offset: int = 0
    dtype: FakeDtype = BFLOAT16
    device: str = "npu:0"

    def untyped_storage(self) -> FakeStorage:
        return self.storage

    def data_ptr(self) -> int:
        return self.storage.address + self.offset * self.dtype.itemsize

    def storage_offset(self) -> int:
        return self.offset

    def element_size(self) -> int:
        return self.dtype.itemsize

    def stride(self) -> tuple[int, ...]:
        return self.strides


def tensor(
    *shape: int,
    dtype: FakeDtype = BFLOAT16,
    storage: FakeStorage | None = None,
    page_stride: int | None = None,
    order: tuple[int, ...] | None = None,
    offset: int = 0,
    device: str = "npu:0",
) -> FakeTensor:
    """A tensor. By default, it is dense and has its own storage.

    ``page_stride`` is the stride of axis 0. ``page_stride`` and ``offset`` count elements.
    ``order`` lists the axes, from the outermost in memory to the innermost.
    """
    strides = [0] * len(shape)
    step = 1
    for axis in reversed(order or range(len(shape))):
        strides[axis] = step
        step *= shape[axis]
    if page_stride is not None:
        strides[0] = page_stride
        step = page_stride * shape[0]
    storage = storage or FakeStorage((offset + step) * dtype.itemsize)
    return FakeTensor(storage, shape, tuple(strides), offset, dtype, device)


@dataclass(frozen=True, kw_only=True)
class AttentionSpec:
    block_size: int
    num_kv_heads: int = 1
    head_size: int = 8
    dtype: FakeDtype = BFLOAT16
    page_size_padded: int | None = None

    @property
    def real_page_size_bytes(self) -> int:
        return 2 * self.block_size * self.num_kv_heads * self.head_size * self.dtype.itemsize

    @property
    def page_size_bytes(self) -> int:
        return self.page_size_padded or self.real_page_size_bytes


@dataclass(frozen=True, kw_only=True)
class FullAttentionSpec(AttentionSpec):
    sliding_window: int | None = None


@dataclass(frozen=True, kw_only=True)
class MLAAttentionSpec(FullAttentionSpec):
    """vLLM's spec. ``block_size`` counts tokens."""

    compress_ratio: int = 1

    @property
    def real_page_size_bytes(self) -> int:
        rows = self.block_size // self.compress_ratio
        return rows * self.num_kv_heads * self.head_size * self.dtype.itemsize


@dataclass(frozen=True, kw_only=True)
class AscendMLAAttentionSpec(MLAAttentionSpec):
    """vLLM-Ascend's spec. ``block_size`` counts rows. ``real_page_size_bytes`` is inherited."""

    scale_dim: int = 0
    scale_dtype: FakeDtype = FLOAT16

    @property
    def page_size_bytes(self) -> int:
        row_bytes = (
            self.head_size * self.dtype.itemsize + self.scale_dim * self.scale_dtype.itemsize
        )
        return self.block_size * self.num_kv_heads * row_bytes


@dataclass(frozen=True, kw_only=True)
class DeclaredMLASpec(MLAAttentionSpec):
    """The spec of vLLM and vLLM-Ascend 0.30. ``block_size`` counts tokens. It also has the rows."""

    compress_ratio: int | None = None
    tokens_per_state: object = 1
    scale_dim: int = 0
    scale_dtype: FakeDtype = FLOAT16
    prefix_cacheable: bool = True
    page_rows: int | None = None

    @property
    def num_heads(self) -> int:
        return self.num_kv_heads

    @property
    def state_content_size_bytes(self) -> int:
        return self.head_size * self.dtype.itemsize

    @property
    def num_states(self) -> int:
        return self.block_size // self.tokens_per_state

    @property
    def real_page_size_bytes(self) -> int:
        rows = self.num_states if self.page_rows is None else self.page_rows
        scale_bytes = self.scale_dim * self.scale_dtype.itemsize
        return rows * self.num_kv_heads * (self.state_content_size_bytes + scale_bytes)


@dataclass(frozen=True, kw_only=True)
class RSWASpec(FullAttentionSpec):
    rswa_window: int = 16


@dataclass(frozen=True, kw_only=True)
class SlidingWindowSpec(AttentionSpec):
    sliding_window: int = 16


@dataclass(frozen=True, kw_only=True)
class SlidingWindowMLASpec(SlidingWindowSpec):
    compress_ratio: int = 1

    @property
    def real_page_size_bytes(self) -> int:
        return self.block_size * self.num_kv_heads * self.head_size * self.dtype.itemsize


@dataclass(frozen=True, kw_only=True)
class ChunkedLocalAttentionSpec(AttentionSpec):
    attention_chunk_size: int = 16


@dataclass(frozen=True, kw_only=True)
class CrossAttentionSpec(AttentionSpec):
    pass


@dataclass(frozen=True, kw_only=True)
class MambaSpec:
    block_size: int
    shapes: tuple[tuple[int, ...], ...]
    dtypes: tuple[FakeDtype, ...]
    page_size_padded: int | None = None

    @property
    def page_size_bytes(self) -> int:
        sizes = zip(self.shapes, self.dtypes, strict=True)
        return self.page_size_padded or sum(math.prod(s) * d.itemsize for s, d in sizes)


@dataclass(frozen=True)
class UniformTypeKVCacheSpecs:
    block_size: int
    kv_cache_specs: dict[str, object]


@dataclass(frozen=True)
class KVCacheGroupSpec:
    layer_names: list[str]
    kv_cache_spec: object
    role: str = "default"
    host_resident: bool = False
    enable_kv_transfer: bool = True


@dataclass(frozen=True)
class KVCacheConfig:
    num_blocks: int
    kv_cache_groups: list[KVCacheGroupSpec]


def config(num_blocks: int, *groups: tuple[object, ...] | dict[str, object]) -> KVCacheConfig:
    """A config. A group is ``(spec, *layer_names)``, or a bundle: a dict of specs by layer."""
    specs = []
    for group in groups:
        if isinstance(group, dict):
            block_size = next(iter(group.values())).block_size
            specs.append(KVCacheGroupSpec(list(group), UniformTypeKVCacheSpecs(block_size, group)))
        else:
            specs.append(KVCacheGroupSpec(list(group[1:]), group[0]))
    return KVCacheConfig(num_blocks, specs)


def cache_groups(kv_cache_config: Any) -> list[CacheGroup]:
    """The facts about each group of a config, of the worker's or the scheduler's side."""
    return [cache_group(specs) for specs in read_layer_specs(kv_cache_config) if specs]
