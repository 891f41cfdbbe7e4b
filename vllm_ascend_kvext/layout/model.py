# SPDX-License-Identifier: Apache-2.0
"""The facts of a layout: storages, planes, groups. Knows neither how they are found nor used.

Terms: a *page* holds the KV of one block id of one scheduler group; a *plane* is one region of
bytes in every page; a *row* is the smallest unit of a page that is addressed, and consecutive rows
of a plane are adjacent; a *group* (transfer group) is the planes of one scheduler group whose rows
cover equally many tokens.
"""

from __future__ import annotations

import enum
from dataclasses import dataclass

from vllm_ascend_kvext.groups.model import GroupKind

NULL_PAGE = 0
"""vLLM's null block: stands for tokens that nobody reads any more."""


class StatePolicy(enum.Enum):
    """What becomes of state groups."""

    EXACT = "exact"
    """Kept: what follows a loaded boundary is computed as if nothing had been loaded."""

    SKIP = "skip"
    """Left out. Lossy: what follows a boundary is computed from whatever the pages hold."""


class RowAddressing(enum.Enum):
    """Whether a page can be addressed below its full size."""

    TOKENS = "tokens"
    """A row holds what its tokens wrote, as the shape of the tensor says."""

    PAGES = "pages"
    """A page is one row: kernels may order its bytes otherwise than the shape says."""


@dataclass(frozen=True, slots=True)
class RegisteredStorage:
    """Memory that registered tensors lie in."""

    address: int
    num_bytes: int


@dataclass(frozen=True, slots=True)
class Plane:
    """One region of bytes in every page.

    Row ``r`` of page ``q`` lies at ``base_bytes + q * page_stride_bytes + region_offset_bytes +
    r * row_bytes`` of its storage.

    Attributes:
        storage: Index into the storages of the layout.
        dtype: Of the registered tensor; several are joined with ``+``.
        is_packed: Whether only the kernels of this platform know the order of bytes in a row.
        axes: Where a page is one row: number and size of the tensor's axes in it, by falling
            stride. They are the order of the bytes in the row. Empty where it is not known.
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
        tokens_per_page: A multiple of ``tokens_per_row``.
        window_tokens: Sliding window, with the token that reads; 0 where there is none.
        restart_tokens: Nothing before a multiple of this is read from there on (attention chunks;
            compressor states without overlap); 0 where there is no such multiple.
        planes: In the order of the config: layer by layer, view by view.
        holds_states: See ``CacheGroup``.
        compress_ratio: Tokens per entry of the cache: an entry exists once all of them are
            computed, and until then the states of its compressor hold them. A row has one entry
            or, where a page is one row, several.
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

    @property
    def rows_per_page(self) -> int:
        return self.tokens_per_page // self.tokens_per_row

    @property
    def is_snapshot(self) -> bool:
        """Whether a page is the state at the page's end, rather than rows of tokens (Mamba)."""
        return self.kind is GroupKind.STATE


@dataclass(frozen=True, slots=True)
class KVLayout:
    """Everything that one worker registered.

    Storages are in the order in which planes first use them, groups are ordered by scheduler group,
    then by tokens per row. Block ids are below ``num_pages``; page 0 is the null page.
    """

    storages: tuple[RegisteredStorage, ...]
    groups: tuple[LayoutGroup, ...]
    num_pages: int
    num_scheduler_groups: int

    @property
    def num_planes(self) -> int:
        return sum(len(group.planes) for group in self.groups)
