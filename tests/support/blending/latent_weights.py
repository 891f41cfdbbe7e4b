# SPDX-License-Identifier: Apache-2.0
"""A tiny decoder with latents instead of keys and values (MLA), as DeepSeek-V2 has it: its weights.

Named as DeepSeek-V2's. No experts: they do not touch what is cached.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch

Weights = dict[str, torch.Tensor]

NORM_EPSILON = 1e-6
_SCALE = 0.2


@dataclass(frozen=True, slots=True)
class Yarn:
    """What scales the rotary embedding; a factor of 1 does not.

    Attributes:
        factor: By which slow pairs turn slower.
        original_tokens: The context before it was scaled.
        mscale: Of what rotated parts are multiplied with, above the line.
        mscale_all_dim: The same below the line, and of the scores.
    """

    factor: float = 1.0
    original_tokens: int = 64
    mscale: float = 1.0
    mscale_all_dim: float = 0.7
    beta_fast: float = 32.0
    beta_slow: float = 1.0

    def of_scores(self, mscale: float) -> float:
        """YaRN's correction of how sharp attention is."""
        return 0.1 * mscale * math.log(self.factor) + 1.0

    @property
    def attention_factor(self) -> float:
        """What rotated parts, also stored ones, are multiplied with."""
        return self.of_scores(self.mscale) / self.of_scores(self.mscale_all_dim)


@dataclass(frozen=True, slots=True)
class Sizes:
    """Elements and numbers of things. A row of the cache is ``rank + rope`` elements."""

    vocabulary: int = 160
    layers: int = 3
    hidden: int = 64
    inner: int = 96
    heads: int = 4
    nope: int = 16
    rope: int = 8
    value: int = 12
    rank: int = 24
    theta: float = 10_000.0
    yarn: Yarn = Yarn()

    @property
    def score_scale(self) -> float:
        """What scores are multiplied with before they become weights."""
        sharper = self.yarn.of_scores(self.yarn.mscale_all_dim) if self.yarn.factor > 1 else 1.0
        return (self.nope + self.rope) ** -0.5 * sharper**2


def random_weights(sizes: Sizes, seed: int = 0) -> Weights:
    """By name; dtype: float32, shape: [outputs, inputs]."""
    hidden, heads = sizes.hidden, sizes.heads
    of_layer = {
        "self_attn.q_proj": (heads * (sizes.nope + sizes.rope), hidden),
        "self_attn.kv_a_proj_with_mqa": (sizes.rank + sizes.rope, hidden),
        "self_attn.kv_a_layernorm": (sizes.rank,),
        "self_attn.kv_b_proj": (heads * (sizes.nope + sizes.value), sizes.rank),
        "self_attn.o_proj": (hidden, heads * sizes.value),
        "mlp.gate_proj": (sizes.inner, hidden),
        "mlp.up_proj": (sizes.inner, hidden),
        "mlp.down_proj": (hidden, sizes.inner),
        "input_layernorm": (hidden,),
        "post_attention_layernorm": (hidden,),
    }
    shapes = {
        f"model.layers.{layer}.{name}.weight": shape
        for layer in range(sizes.layers)
        for name, shape in of_layer.items()
    }
    shapes["model.embed_tokens.weight"] = shapes["lm_head.weight"] = (sizes.vocabulary, hidden)
    shapes["model.norm.weight"] = (hidden,)
    generator = torch.Generator().manual_seed(seed)
    return {
        # Norms multiply by about 1.
        name: torch.randn(shape, generator=generator) * _SCALE + (len(shape) == 1)
        for name, shape in shapes.items()
    }
