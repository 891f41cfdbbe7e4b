# SPDX-License-Identifier: Apache-2.0
"""What a model with latents says of a blended prompt, in plain torch: no pages, no package.

As DeepSeek-V2 is written down: latents are expanded to the keys and values of every head. The
shared part of keys is kept as it was before it is rotated, and rotated once, to where it is read.
All of it in float64.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch

from support.blending.latent_weights import NORM_EPSILON, Sizes, Weights
from support.blending.reused import Reused


@dataclass(slots=True)
class _Rows:
    """Of one layer, by position; of a token that is not there, no number.

    Attributes:
        latents: shape: [tokens, rank].
        shared: The part of keys that is rotated, before it is. shape: [tokens, rope].
    """

    latents: torch.Tensor
    shared: torch.Tensor


class LatentOracle:
    """One model.

    Args:
        weights: Of it.
        sizes: Of it.
        sink_ids: Token ids that segments are computed behind.
    """

    def __init__(self, weights: Weights, sizes: Sizes, sink_ids: Sequence[int]) -> None:
        self._weights = {name: weight.double() for name, weight in weights.items()}
        self._sizes = sizes
        self._sink_ids = list(sink_ids)
        self._frequencies = frequencies(sizes)

    def log_probabilities(
        self, token_ids: Sequence[int], reused: Sequence[Reused] = ()
    ) -> torch.Tensor:
        """Of what follows each token that is computed.

        Args:
            token_ids: Of the prompt.
            reused: Disjoint; all else is computed.

        Returns:
            dtype: float64, shape: [tokens that are not reused, vocabulary].
        """
        rows = self._no_rows(len(token_ids))
        is_computed = torch.ones(len(token_ids), dtype=torch.bool)
        for each in reused:
            first, end = each.segment
            alone_ids = [*self._sink_ids, *token_ids[first:end]]
            alone = self._no_rows(len(alone_ids))
            self._compute(alone_ids, torch.arange(len(alone_ids)), alone)
            new = slice(each.first_tokens, each.end_tokens)
            behind_sink = len(self._sink_ids) - first
            old = slice(each.first_tokens + behind_sink, each.end_tokens + behind_sink)
            for of_prompt, of_segment in zip(rows, alone, strict=True):
                of_prompt.latents[new] = of_segment.latents[old]
                of_prompt.shared[new] = of_segment.shared[old]
            is_computed[new] = False
        positions = is_computed.nonzero().flatten()
        computed_ids = [token_ids[position] for position in positions.tolist()]
        return self._compute(computed_ids, positions, rows)

    def _no_rows(self, num_tokens: int) -> list[_Rows]:
        def nothing(elements: int) -> torch.Tensor:
            return torch.full((num_tokens, elements), torch.nan, dtype=torch.float64)

        sizes = self._sizes
        return [_Rows(nothing(sizes.rank), nothing(sizes.rope)) for _ in range(sizes.layers)]

    def _compute(
        self, token_ids: Sequence[int], positions: torch.Tensor, rows: Sequence[_Rows]
    ) -> torch.Tensor:
        """One pass, which adds to the rows."""
        hidden = self._weights["model.embed_tokens.weight"][list(token_ids)]
        for layer, of_layer in enumerate(rows):
            hidden = hidden + self._attend(layer, hidden, positions, of_layer)
            hidden = hidden + self._mlp(layer, hidden)
        logits = self._norm("model.norm", hidden) @ self._weights["lm_head.weight"].T
        return torch.log_softmax(logits, -1)

    def _attend(
        self, layer: int, hidden: torch.Tensor, positions: torch.Tensor, rows: _Rows
    ) -> torch.Tensor:
        sizes, name = self._sizes, f"model.layers.{layer}.self_attn"
        normed = self._norm(f"model.layers.{layer}.input_layernorm", hidden)
        queries = self._linear(f"{name}.q_proj", normed).unflatten(-1, (sizes.heads, -1))
        queries = torch.cat(
            [queries[..., : sizes.nope], self._turned(queries[..., sizes.nope :], positions)], -1
        )
        compressed = self._linear(f"{name}.kv_a_proj_with_mqa", normed)
        latents = self._norm(f"{name}.kv_a_layernorm", compressed[:, : sizes.rank])
        rows.latents[positions] = latents
        rows.shared[positions] = compressed[:, sizes.rank :]

        expanded = self._linear(f"{name}.kv_b_proj", rows.latents)
        keys, values = expanded.unflatten(-1, (sizes.heads, -1)).split(
            [sizes.nope, sizes.value], dim=-1
        )
        seen = torch.arange(len(rows.latents))
        shared = self._turned(rows.shared[:, None], seen).expand(-1, sizes.heads, -1)
        keys = torch.cat([keys, shared], -1)
        scores = torch.einsum("the,she->hts", queries, keys) * sizes.score_scale
        scores = scores.masked_fill(seen > positions[:, None], -torch.inf)
        outputs = torch.einsum("hts,shv->thv", scores.softmax(-1), values)
        return self._linear(f"{name}.o_proj", outputs.flatten(1))

    def _mlp(self, layer: int, hidden: torch.Tensor) -> torch.Tensor:
        name = f"model.layers.{layer}"
        normed = self._norm(f"{name}.post_attention_layernorm", hidden)
        gate = torch.nn.functional.silu(self._linear(f"{name}.mlp.gate_proj", normed))
        return self._linear(
            f"{name}.mlp.down_proj", gate * self._linear(f"{name}.mlp.up_proj", normed)
        )

    def _linear(self, name: str, inputs: torch.Tensor) -> torch.Tensor:
        return inputs @ self._weights[f"{name}.weight"].T

    def _norm(self, name: str, inputs: torch.Tensor) -> torch.Tensor:
        mean = inputs.square().mean(-1, keepdim=True)
        return inputs * torch.rsqrt(mean + NORM_EPSILON) * self._weights[f"{name}.weight"]

    def _turned(self, parts: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
        """Neighbours are a pair, a complex number. shape: [tokens, heads, rope]."""
        angles = (positions[:, None] * self._frequencies)[:, None]
        factor = torch.full_like(angles, self._sizes.yarn.attention_factor)
        pairs = torch.view_as_complex(parts.unflatten(-1, (-1, 2)).contiguous())
        return torch.view_as_real(pairs * torch.polar(factor, angles)).flatten(-2)


def frequencies(sizes: Sizes) -> torch.Tensor:
    """Radians per position, of each pair; YaRN slows down those that turn slowly. float64."""
    yarn, half = sizes.yarn, sizes.rope // 2
    fast = sizes.theta ** -(torch.arange(half, dtype=torch.float64) / half)

    def pair_of(turns: float) -> float:
        """Which pair turns so often in the original context."""
        return half * math.log(yarn.original_tokens / (turns * math.tau)) / math.log(sizes.theta)

    low = max(math.floor(pair_of(yarn.beta_fast)), 0)
    high = min(math.ceil(pair_of(yarn.beta_slow)), sizes.rope - 1)
    slowed = ((torch.arange(half) - low) / max(high - low, 0.001)).clamp(0, 1)
    return fast * (1 - slowed) + fast / yarn.factor * slowed
