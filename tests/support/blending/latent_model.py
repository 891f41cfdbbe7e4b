# SPDX-License-Identifier: Apache-2.0
"""A model with latents that computes over pages, as an engine's worker does.

Queries are brought to the latents, and not the latents to keys and values of heads: a row of a page
is all that is read of a token. float32. Rows that nobody has written are no numbers, so that to
read one spoils the answer.
"""

from __future__ import annotations

from collections.abc import Sequence
from enum import Enum

import torch

from support.blending.latent_weights import NORM_EPSILON, Sizes, Weights


class PageFormat(Enum):
    """How latents and what is rotated lie in the pages of a layer."""

    ONE_TENSOR = "one tensor"
    """vLLM's: rows of ``rank + rope`` elements. shape: [pages, block, rank + rope]."""

    TWO_TENSORS = "two tensors"
    """vLLM-Ascend's. shapes: [pages, block, 1, rank] and [pages, block, 1, rope]."""


class LatentPages:
    """Of all layers. A block table is the same for all of them."""

    def __init__(self, page_format: PageFormat, sizes: Sizes, num_pages: int, block: int) -> None:
        self.block_tokens = block
        self._widths = [sizes.rank, sizes.rope]
        if page_format is PageFormat.ONE_TENSOR:
            shapes = [(num_pages, block, sum(self._widths))]
        else:
            shapes = [(num_pages, block, 1, width) for width in self._widths]
        self.of_layers = [
            [torch.full(shape, torch.nan) for shape in shapes] for _ in range(sizes.layers)
        ]

    def write(
        self, layer: int, slots: torch.Tensor, latents: torch.Tensor, shared: torch.Tensor
    ) -> None:
        tensors = self.of_layers[layer]
        row = torch.cat([latents, shared], -1)
        parts = [row] if len(tensors) == 1 else row.split(self._widths, -1)
        for tensor, part in zip(tensors, parts, strict=True):
            tensor.view(-1, part.shape[-1])[slots] = part

    def read(self, layer: int, slots: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Latents, and what is rotated. shapes: [tokens, rank], [tokens, rope]."""
        rows = [tensor.view(-1, tensor.shape[-1])[slots] for tensor in self.of_layers[layer]]
        latents, shared = torch.cat(rows, -1).split(self._widths, -1)
        return latents, shared

    def forget(self, table: Sequence[int]) -> None:
        """Some pages hold nothing any more."""
        for tensors in self.of_layers:
            for tensor in tensors:
                tensor[list(table)] = torch.nan

    def slots(self, table: Sequence[int], positions: torch.Tensor) -> torch.Tensor:
        """Of some tokens of a request."""
        pages = torch.tensor(table)[positions // self.block_tokens]
        return pages * self.block_tokens + positions % self.block_tokens


class LatentModel:
    """One model, whose requests have block tables.

    Args:
        weights: Of it.
        sizes: Of it.
        rotary: vLLM's rotary module of such a model, as far as it is used.
        pages: Of the worker.
    """

    def __init__(
        self, weights: Weights, sizes: Sizes, rotary: torch.nn.Module, pages: LatentPages
    ) -> None:
        self._weights, self._sizes, self._rotary, self._pages = weights, sizes, rotary, pages

    def compute(
        self, token_ids: Sequence[int], positions: torch.Tensor, table: Sequence[int]
    ) -> torch.Tensor:
        """One step: some tokens of a request, which may have gaps between them.

        Args:
            token_ids: That are computed.
            positions: Of them, ascending. All before the last one is written, or is written here.
            table: Pages of the request.

        Returns:
            Log-probabilities. shape: [tokens, vocabulary].
        """
        hidden = self._weights["model.embed_tokens.weight"][list(token_ids)]
        for layer in range(self._sizes.layers):
            hidden = hidden + self._attend(layer, hidden, positions, table)
            name = f"model.layers.{layer}"
            normed = self._norm(f"{name}.post_attention_layernorm", hidden)
            gate = torch.nn.functional.silu(self._linear(f"{name}.mlp.gate_proj", normed))
            up = self._linear(f"{name}.mlp.up_proj", normed)
            hidden = hidden + self._linear(f"{name}.mlp.down_proj", gate * up)
        logits = self._linear("lm_head", self._norm("model.norm", hidden))
        return torch.log_softmax(logits, -1)

    def _attend(
        self, layer: int, hidden: torch.Tensor, positions: torch.Tensor, table: Sequence[int]
    ) -> torch.Tensor:
        sizes, name, pages = self._sizes, f"model.layers.{layer}.self_attn", self._pages
        normed = self._norm(f"model.layers.{layer}.input_layernorm", hidden)
        queries = self._linear(f"{name}.q_proj", normed).unflatten(-1, (sizes.heads, -1))
        of_latents, of_shared = queries.split([sizes.nope, sizes.rope], -1)
        latents, shared = self._linear(f"{name}.kv_a_proj_with_mqa", normed).split(
            [sizes.rank, sizes.rope], -1
        )
        latents = self._norm(f"{name}.kv_a_layernorm", latents)
        of_shared, turned = self._rotary(positions, of_shared, shared[:, None])
        pages.write(layer, pages.slots(table, positions), latents, turned[:, 0])

        up = self._weights[f"{name}.kv_b_proj.weight"].unflatten(0, (sizes.heads, -1))
        to_keys, to_values = up.split([sizes.nope, sizes.value], 1)
        of_latents = torch.einsum("thn,hnr->thr", of_latents, to_keys)
        seen = torch.arange(int(positions[-1]) + 1)
        latents, shared = pages.read(layer, pages.slots(table, seen))
        scores = torch.einsum("thr,sr->hts", of_latents, latents)
        scores += torch.einsum("thp,sp->hts", of_shared, shared)
        scores = (scores * sizes.score_scale).masked_fill(seen > positions[:, None], -torch.inf)
        read = torch.einsum("hts,sr->thr", scores.softmax(-1), latents)
        outputs = torch.einsum("thr,hvr->thv", read, to_values)
        return self._linear(f"{name}.o_proj", outputs.flatten(1))

    def _linear(self, name: str, inputs: torch.Tensor) -> torch.Tensor:
        return torch.nn.functional.linear(inputs, self._weights[f"{name}.weight"])

    def _norm(self, name: str, inputs: torch.Tensor) -> torch.Tensor:
        weight = self._weights[f"{name}.weight"]
        return torch.nn.functional.rms_norm(inputs, weight.shape, weight, NORM_EPSILON)


class DeepseekScalingRotaryEmbedding(torch.nn.Module):
    """vLLM's class of this name, as far as it is read, compared and called.

    Args:
        sizes: Of the model.
        frequencies: Radians per position, one per pair.
        num_positions: That the model knows.
    """

    __module__ = "vllm.model_executor.layers.rotary_embedding.deepseek_scaling_rope"

    def __init__(self, sizes: Sizes, frequencies: torch.Tensor, num_positions: int) -> None:
        super().__init__()
        self.head_size = self.rotary_dim = sizes.rope
        self.is_neox_style = False
        self.scaling_factor = sizes.yarn.factor
        self.mscale = sizes.yarn.attention_factor
        self._frequencies = frequencies.float()
        angles = torch.arange(num_positions)[:, None] * self._frequencies
        table = torch.cat([angles.cos(), angles.sin()], -1) * self.mscale
        self.register_buffer("cos_sin_cache", table)

    def _compute_inv_freq(self, scaling_factor: float) -> torch.Tensor:
        assert scaling_factor == self.scaling_factor
        return self._frequencies

    def forward(
        self, positions: torch.Tensor, query: torch.Tensor, key: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Neighbours are pairs. shapes: [tokens, heads, rope]."""
        cos, sin = self.cos_sin_cache[positions].to(key.dtype)[:, None].chunk(2, -1)

        def turned(parts: torch.Tensor) -> torch.Tensor:
            even, odd = parts[..., ::2], parts[..., 1::2]
            return torch.stack([even * cos - odd * sin, odd * cos + even * sin], -1).flatten(-2)

        return turned(query), turned(key)
