# SPDX-License-Identifier: Apache-2.0
"""Pages of a small attention backend, which orders the elements of a page in a way of its own.

Keys are transposed, and the second half of the tokens of a page comes first; values lie as the
shape says.
"""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import torch

NUM_PAGES, BLOCK, HEADS, HEAD = 24, 8, 2, 16


def registered(num_pages: int = NUM_PAGES, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    """shape: [num_pages, 2, heads, block, head_size]; page 0 is the null page."""
    return torch.full((num_pages, 2, HEADS, BLOCK, HEAD), -7, dtype=dtype)


class SmallBackend:
    """A `PagedBackend`."""

    name = "SMALL_ATTN"

    def caches_of(self, layer_name: str, tensor: Any) -> tuple[torch.Tensor, torch.Tensor]:
        return tensor[:, 0], tensor[:, 1]

    def write_rows(
        self,
        keys: torch.Tensor,
        values: torch.Tensor,
        key_cache: torch.Tensor,
        value_cache: torch.Tensor,
        slots: torch.Tensor,
    ) -> None:
        pages, in_page = slots // BLOCK, slots % BLOCK
        transposed = key_cache.view(len(key_cache), HEADS, HEAD, BLOCK)
        transposed[pages, :, :, (in_page + BLOCK // 2) % BLOCK] = keys
        value_cache[pages, :, in_page] = values


def attention(**attributes: Any) -> torch.nn.Module:
    """As much of vLLM's attention module as is read."""
    module = torch.nn.Module()
    sizes = {"head_size": HEAD, "num_kv_heads": HEADS, "sliding_window": None}
    for name, value in (sizes | attributes).items():
        setattr(module, name, value)
    module.get_attn_backend = lambda: SimpleNamespace(get_name=lambda: SmallBackend.name)
    return module
