# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vllm-ascend-kvext project
"""The facts of a layout: storages, planes and groups.

The module knows neither how these facts are found nor how they are used. Its terms:

page
    The KV of one block id of one scheduler group.
plane
    One region of bytes that every page has.
row
    The smallest part of a page that can be addressed. Consecutive rows of a plane are adjacent.
group (transfer group)
    The planes of one scheduler group whose rows cover the same number of tokens.
"""

from __future__ import annotations

import enum
from dataclasses import dataclass

from vllm_ascend_kvext.groups.model import GroupKind

NULL_PAGE = 0
"""The id of vLLM's null block, which stands for tokens that no kernel reads any more."""


class StatePolicy(enum.Enum):
    """Whether the state groups of a model are stored."""

    EXACT = "exact"
    """States are stored. Tokens behind a loaded boundary are computed as without a load."""

    SKIP = "skip"
    """States are left out. This is lossy: tokens behind a loaded boundary are computed from
    whatever state the pages hold."""


class RowAddressing(enum.Enum):
    """Whether a page can be addressed below its full size."""

    TOKENS = "tokens"
    """A row holds what its tokens wrote, at the place that the tensor's shape says."""

    PAGES = "pages"
    """A page is one row, because kernels may order its bytes differently than the shape says."""


@dataclass(frozen=True, slots=True)
class RegisteredStorage:
    """One stretch of memory that holds registered tensors."""

    address: int
    num_bytes: int


@dataclass(frozen=True, slots=True)
class Plane:
    """One region of bytes in every page.

    Row ``r`` of page ``q`` lies at ``base_bytes + q * page_stride_bytes + region_offset_bytes +
    r * row_bytes`` of its storage.

    Attributes:
        storage: Index into the storages of the layout.
        dtype: The dtype of the registered tensor; several dtypes are joined with ``+``.
        is_packed: Whether only the kernels of this platform know the order of bytes in a row.
        axes: The order of the bytes in a row that is a whole page, as pairs of the number and the
            size of a tensor axis, by falling stride. Empty if the order is not known.
    """

    layer_name: str
    storage: int
    base_bytes: int
    page_stride_bytes: int
    region_offset_bytes: int
    row_bytes: int
    dtype: str
    is_packed: bool
    axes: tuple[tuple[int, int], ...] = ()


@dataclass(frozen=True, slots=True)
class LayoutGroup:
    """One transfer group.

    Attributes:
        kv_cache_group_id: Index of the KV cache group whose block ids it uses.
        tokens_per_page: Tokens per page, a multiple of ``tokens_per_row``.
        window_tokens: The sliding window, which includes the token that reads; 0 for no window.
        restart_tokens: Tokens at or behind a multiple of this number read nothing before the
            multiple (attention chunks; compressor states without overlap). 0 for groups without
            restarts.
        planes: The planes in the order of the config: layer by layer, view by view.
        holds_states: See ``CacheGroup``.
        compress_ratio: Tokens per entry of the cache. An entry exists once all its tokens are
            computed; until then the states of the compressor hold them. A row has one entry, or
            several if a page is one row.
        blocks_per_page: The kernel blocks of a page, if other bytes lie between them; else 1. The
            planes then say of a kernel block what they usually say of a page. Kernel block ``b`` of
            page ``q`` is number ``q * blocks_per_page + b``.
    """

    kv_cache_group_id: int
    kind: GroupKind
    tokens_per_page: int
    tokens_per_row: int
    window_tokens: int
    restart_tokens: int
    planes: tuple[Plane, ...]
    holds_states: bool = False
    compress_ratio: int = 1
    blocks_per_page: int = 1

    @property
    def rows_per_page(self) -> int:
        return self.tokens_per_page // self.tokens_per_row

    @property
    def rows_per_block(self) -> int:
        """The adjacent rows of a page: all of them, or those of a kernel block."""
        return self.rows_per_page // self.blocks_per_page

    @property
    def is_snapshot(self) -> bool:
        """Whether a page holds the state at its last token (Mamba), and not rows of tokens."""
        return self.kind is GroupKind.STATE


@dataclass(frozen=True, slots=True)
class KVLayout:
    """Everything that one worker has registered.

    Attributes:
        storages: The storages, in the order in which planes first use them.
        groups: The transfer groups, ordered by scheduler group, then by tokens per row.
        num_pages: All block ids are smaller; page 0 is the null page.
        num_scheduler_groups: The number of KV cache groups of the config.
    """

    storages: tuple[RegisteredStorage, ...]
    groups: tuple[LayoutGroup, ...]
    num_pages: int
    num_scheduler_groups: int

    @property
    def num_planes(self) -> int:
        return sum(len(group.planes) for group in self.groups)
