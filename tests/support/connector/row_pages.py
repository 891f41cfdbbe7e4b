# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vllm-ascend-kvext project
"""Pages of a small attention backend. It has its own order of elements in a page.

Keys are transposed, and the second half of a page's tokens comes first. Values lie where the shape
says.
"""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import torch

NUM_PAGES = 24
BLOCK = 8
HEADS = 2
HEAD = 16


def registered(num_pages: int = NUM_PAGES, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    """shape: [num_pages, 2, heads, block, head_size]. Page 0 is the null page."""
    return torch.full((num_pages, 2, HEADS, BLOCK, HEAD), -7, dtype=dtype)


class SmallBackend:
    """Replaces `CpuBackend`."""

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
        pages = slots // BLOCK
        in_page = slots % BLOCK
        transposed = key_cache.view(len(key_cache), HEADS, HEAD, BLOCK)
        transposed[pages, :, :, (in_page + BLOCK // 2) % BLOCK] = keys
        value_cache[pages, :, in_page] = values


def attention(**attributes: Any) -> torch.nn.Module:
    """The attributes of vLLM's attention module that are read."""
    module = torch.nn.Module()
    sizes = {"head_size": HEAD, "num_kv_heads": HEADS, "sliding_window": None}
    for name, value in (sizes | attributes).items():
        setattr(module, name, value)
    module.get_attn_backend = lambda: SimpleNamespace(get_name=lambda: SmallBackend.name)
    return module


class RotaryEmbedding(torch.nn.Module):
    """A class of the same name as vLLM's, with the attributes that are read and compared."""

    __module__ = "vllm.model_executor.layers.rotary_embedding.base"

    def __init__(self, base: float = 10_000.0, num_positions: int = 512) -> None:
        super().__init__()
        self.base = base
        self.head_size = HEAD
        self.rotary_dim = HEAD
        self.is_neox_style = True
        angles = torch.arange(num_positions)[:, None] * self._compute_inv_freq(base)
        self.register_buffer("cos_sin_cache", torch.cat([angles.cos(), angles.sin()], -1))

    def _compute_inv_freq(self, base: float) -> torch.Tensor:
        return 1.0 / base ** (torch.arange(0, HEAD, 2, dtype=torch.float) / HEAD)

    def forward(
        self, positions: torch.Tensor, query: torch.Tensor, key: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """shape of ``key``: [num_tokens, num_heads, head_size]."""
        cos, sin = self.cos_sin_cache[positions].to(key.dtype)[:, None].chunk(2, -1)
        left, right = key.chunk(2, -1)
        return query, torch.cat([left * cos - right * sin, right * cos + left * sin], -1)


def small_model(*rotary: torch.nn.Module | None, **attributes: Any) -> torch.nn.Module:
    """A model whose layers have these rotary modules, and its layers' names."""
    model = torch.nn.Module()
    model.layers = torch.nn.ModuleList()
    for module in rotary:
        layer = torch.nn.Module()
        inner = torch.nn.Module()
        if module is not None:
            inner.rotary_emb = module
        inner.attn = attention(**attributes)
        layer.self_attn = inner
        model.layers.append(layer)
    return model


def attention_of(model: torch.nn.Module) -> dict[str, torch.nn.Module]:
    """Layers by name, as in vLLM's ``static_forward_context``."""
    return {
        f"model.layers.{index}.self_attn.attn": layer.self_attn.attn
        for index, layer in enumerate(model.layers)
    }
