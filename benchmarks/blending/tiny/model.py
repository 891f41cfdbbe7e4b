# SPDX-License-Identifier: Apache-2.0
"""The models in plain torch: Llama's layers, with full attention, with windows, or with MLA.

Weights have the names that Hugging Face gives a Llama's, so that vLLM loads them. `forward` can
read given keys and values instead of those it computes, token by token: that is all that blending
needs. It knows nothing of segments.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, NamedTuple

import torch
from torch.nn import functional

from blending.tiny.task import BOS, EOS, VOCABULARY_TOKENS

Variant = Literal["full", "window", "mla"]
Weights = Mapping[str, torch.Tensor]

VARIANTS: tuple[Variant, ...] = ("full", "window", "mla")
SEEDS: Mapping[Variant, tuple[int, ...]] = {
    "full": (2, 3, 5),
    "window": (0, 1, 2),
    "mla": (2, 4, 5),
}
"""Of models that learn in time, see `train.py`."""

SERVED_VARIANTS: tuple[Variant, ...] = ("full", "window")
"""Those that vLLM serves on a CPU."""

WINDOW_TOKENS = 8
"""About half a document: a token's window mostly lies inside its document."""

NORM_EPSILON = 1e-5
ROPE_THETA = 10_000.0
MAX_MODEL_TOKENS = 512


@dataclass(frozen=True, slots=True)
class Shape:
    """Sizes of a model.

    Attributes:
        variant: How its layers attend.
        hidden: Elements of a hidden state.
        heads: Of attention; as many for keys as for queries.
        head_dim: Elements of a head; vLLM's CPU attention takes no fewer than 32.
        mlp: Inner elements of the MLP.
        layers: Number of layers.
        latent: Elements of an MLA layer's compressed rows.
        rope_dim: Elements of an MLA layer's rotated key, shared by the heads.
    """

    variant: Variant
    hidden: int = 64
    heads: int = 2
    head_dim: int = 32
    mlp: int = 64
    layers: int = 4
    latent: int = 32
    rope_dim: int = 16

    def window(self, layer: int) -> int | None:
        """Tokens that a layer reads, its own included; None: all. As in gpt-oss, in turns."""
        return WINDOW_TOKENS if self.variant == "window" and layer % 2 == 0 else None

    def parameters(self) -> dict[str, tuple[int, ...]]:
        """Name and shape of every weight."""
        inner = self.heads * self.head_dim
        found: dict[str, tuple[int, ...]] = {
            "model.embed_tokens.weight": (VOCABULARY_TOKENS, self.hidden),
            "model.norm.weight": (self.hidden,),
            "lm_head.weight": (VOCABULARY_TOKENS, self.hidden),
        }
        for layer in range(self.layers):
            attention, mlp = _attention(layer), f"model.layers.{layer}.mlp."
            if self.variant == "mla":
                queries = self.heads * (self.head_dim + self.rope_dim)
                found |= {
                    attention + "q_proj.weight": (queries, self.hidden),
                    attention + "kv_a_proj.weight": (self.latent + self.rope_dim, self.hidden),
                    attention + "kv_a_layernorm.weight": (self.latent,),
                    attention + "kv_b_proj.weight": (2 * inner, self.latent),
                }
            else:
                found |= {attention + f"{name}_proj.weight": (inner, self.hidden) for name in "qkv"}
            found |= {
                attention + "o_proj.weight": (self.hidden, inner),
                mlp + "gate_proj.weight": (self.mlp, self.hidden),
                mlp + "up_proj.weight": (self.mlp, self.hidden),
                mlp + "down_proj.weight": (self.hidden, self.mlp),
                f"model.layers.{layer}.input_layernorm.weight": (self.hidden,),
                f"model.layers.{layer}.post_attention_layernorm.weight": (self.hidden,),
            }
        return found


class Rows(NamedTuple):
    """What a layer caches of each token.

    Attributes:
        rotated: Keys with their position, shape: [batch, tokens, heads, head_dim]; of MLA, the
            rotated part alone, shape: [batch, tokens, 1, rope_dim].
        plain: Values, shape: [batch, tokens, heads, head_dim]; of MLA, the latent rows, shape:
            [batch, tokens, 1, latent].
    """

    rotated: torch.Tensor
    plain: torch.Tensor

    def moved(self, by_tokens: torch.Tensor) -> Rows:
        """At other positions. Shape of ``by_tokens``: [tokens]."""
        return Rows(rotate(self.rotated, by_tokens), self.plain)

    def chosen(self, others: Rows, is_others: torch.Tensor) -> Rows:
        """Those of ``others`` where ``is_others``, shape: [batch, tokens]."""
        mask = is_others[:, :, None, None]
        return Rows(*(torch.where(mask, b, a) for a, b in zip(self, others, strict=True)))


class Pass(NamedTuple):
    """What a forward computed.

    Attributes:
        logits: Shape: [batch, tokens, vocabulary]; None if it ended after some layer.
        rows: That each layer read.
        computed: The rows that each layer computed itself, read or not.
        scores: Of each layer, before the softmax, where a query may read, else -inf, shape:
            [batch, heads, queries, tokens].
    """

    logits: torch.Tensor | None
    rows: list[Rows]
    computed: list[Rows]
    scores: list[torch.Tensor]


def initial_weights(shape: Shape, seed: int) -> dict[str, torch.Tensor]:
    """Norms are ones, the rest is normal; what ends a residual branch is smaller."""
    generator = torch.Generator().manual_seed(seed)
    weights = {}
    for name, sizes in shape.parameters().items():
        if len(sizes) == 1:
            weights[name] = torch.ones(sizes)
            continue
        std = 0.5 / math.sqrt(sizes[1]) if "embed" not in name else 0.5
        if "o_proj" in name or "down_proj" in name:
            std /= math.sqrt(2 * shape.layers)
        weights[name] = torch.randn(sizes, generator=generator) * std
    return weights


def rotate(rows: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
    """RoPE with halves as pairs, as Llama has it.

    Args:
        rows: Shape: [batch, tokens, heads, elements].
        positions: Shape: [tokens]; differences of positions move what is rotated already.
    """
    half = rows.shape[-1] // 2
    powers = torch.arange(half, device=rows.device, dtype=torch.float32) / half
    angles = positions.to(torch.float32)[:, None] * ROPE_THETA**-powers
    cosine, sine = angles.cos()[:, None, :], angles.sin()[:, None, :]
    first, second = rows[..., :half], rows[..., half:]
    return torch.cat([first * cosine - second * sine, second * cosine + first * sine], dim=-1)


def forward(
    weights: Weights,
    shape: Shape,
    tokens: torch.Tensor,
    stored: Sequence[Rows] | None = None,
    is_fresh: torch.Tensor | None = None,
    *,
    last_layer: int | None = None,
    keeps_scores: bool = False,
) -> Pass:
    """Compute tokens at positions 0, 1, 2...

    With ``stored``, every layer reads the stored rows of tokens that are not fresh, and what it
    computes for the others. A fresh token's result is that of a forward over the fresh tokens
    alone with the stored rows in the cache.

    Args:
        weights: By name.
        shape: Of the model.
        tokens: Shape: [batch, tokens].
        stored: Rows of each layer, at the positions of this prompt.
        is_fresh: Bool, shape: [batch, tokens]; with ``stored`` only.
        last_layer: Where to end, without logits; its attention is computed, nothing behind.
        keeps_scores: Whether scores are returned.
    """
    num_tokens = tokens.shape[1]
    positions = torch.arange(num_tokens, device=tokens.device)
    hidden = weights["model.embed_tokens.weight"][tokens]
    passed = Pass(None, [], [], [])
    for layer in range(shape.layers):
        name = f"model.layers.{layer}."
        normed = _norm(hidden, weights[name + "input_layernorm.weight"])
        computed = _rows(weights, shape, layer, normed, positions)
        rows = computed
        if stored is not None and is_fresh is not None:
            rows = stored[layer].chosen(computed, is_fresh)
        passed.computed.append(computed)
        passed.rows.append(rows)
        attended, scores = _attend(weights, shape, layer, normed, rows, positions)
        if keeps_scores:
            passed.scores.append(scores)
        if layer == last_layer:
            return passed
        hidden = hidden + attended
        normed = _norm(hidden, weights[name + "post_attention_layernorm.weight"])
        gate = functional.silu(normed @ weights[name + "mlp.gate_proj.weight"].T)
        up = normed @ weights[name + "mlp.up_proj.weight"].T
        hidden = hidden + (gate * up) @ weights[name + "mlp.down_proj.weight"].T
    normed = _norm(hidden, weights["model.norm.weight"])
    return passed._replace(logits=normed @ weights["lm_head.weight"].T)


def _attention(layer: int) -> str:
    return f"model.layers.{layer}.self_attn."


def _norm(hidden: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    return functional.rms_norm(hidden, weight.shape, weight, NORM_EPSILON)


def _rows(
    weights: Weights, shape: Shape, layer: int, normed: torch.Tensor, positions: torch.Tensor
) -> Rows:
    """Of all tokens."""
    name = _attention(layer)
    if shape.variant == "mla":
        both = normed @ weights[name + "kv_a_proj.weight"].T
        latent = _norm(both[..., : shape.latent], weights[name + "kv_a_layernorm.weight"])
        return Rows(rotate(both[..., None, shape.latent :], positions), latent[:, :, None])
    by_head = (*normed.shape[:2], shape.heads, shape.head_dim)
    keys, values = (
        (normed @ weights[name + f"{part}_proj.weight"].T).view(by_head) for part in "kv"
    )
    return Rows(rotate(keys, positions), values)


def _attend(
    weights: Weights,
    shape: Shape,
    layer: int,
    normed: torch.Tensor,
    rows: Rows,
    positions: torch.Tensor,
) -> tuple[torch.Tensor, torch.Tensor]:
    """What a layer adds to the hidden state, and its scores."""
    name = _attention(layer)
    queries = normed @ weights[name + "q_proj.weight"].T
    queries = queries.view(*normed.shape[:2], shape.heads, -1)
    if shape.variant == "mla":
        turned = rotate(queries[..., shape.head_dim :], positions)
        queries = torch.cat([queries[..., : shape.head_dim], turned], dim=-1)
        both = rows.plain[:, :, 0] @ weights[name + "kv_b_proj.weight"].T
        keys, values = both.view(*normed.shape[:2], shape.heads, -1).chunk(2, dim=-1)
        keys = torch.cat([keys, rows.rotated.expand(-1, -1, shape.heads, -1)], dim=-1)
    else:
        queries = rotate(queries, positions)
        keys, values = rows
    scores = torch.einsum("bqhd,bkhd->bhqk", queries, keys) / math.sqrt(queries.shape[-1])
    distance = positions[:, None] - positions[None, :]
    window = shape.window(layer)
    is_read = (distance >= 0) & (distance < window) if window is not None else distance >= 0
    scores = scores.masked_fill(~is_read, -math.inf)
    attended = torch.einsum("bhqk,bkhd->bqhd", scores.softmax(dim=-1), values)
    return attended.flatten(2) @ weights[name + "o_proj.weight"].T, scores


def config(shape: Shape) -> dict[str, Any]:
    """What `config.json` says to vLLM and transformers.

    Raises:
        ValueError: vLLM does not serve the variant on a CPU.
    """
    if shape.variant not in SERVED_VARIANTS:
        raise ValueError(f"variant: expected one of {SERVED_VARIANTS}, found {shape.variant!r}")
    found = {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "vocab_size": VOCABULARY_TOKENS,
        "hidden_size": shape.hidden,
        "intermediate_size": shape.mlp,
        "num_hidden_layers": shape.layers,
        "num_attention_heads": shape.heads,
        "num_key_value_heads": shape.heads,
        "head_dim": shape.head_dim,
        "hidden_act": "silu",
        "max_position_embeddings": MAX_MODEL_TOKENS,
        "rms_norm_eps": NORM_EPSILON,
        "rope_theta": ROPE_THETA,
        "tie_word_embeddings": False,
        "bos_token_id": BOS,
        "eos_token_id": EOS,
        "torch_dtype": "float16",
    }
    windows = [shape.window(layer) for layer in range(shape.layers)]
    if any(windows):
        kinds = ["sliding_attention" if window else "full_attention" for window in windows]
        found |= {"layer_types": kinds, "sliding_window": WINDOW_TOKENS}
    return found


def weights_path(variant: Variant, seed: int) -> Path:
    """Of the shipped weights."""
    return Path(__file__).parent / "weights" / f"{variant}-{seed}.safetensors"


def load(variant: Variant, seed: int, folder: Path | None = None) -> dict[str, torch.Tensor]:
    """Trained weights in float32.

    Args:
        variant: Of the model.
        seed: That it was trained with.
        folder: Where `train.py` has written them; None: the shipped ones.
    """
    from safetensors.torch import load_file

    path = weights_path(variant, seed)
    found = load_file(path if folder is None else folder / path.name)
    return {name: weight.float() for name, weight in found.items()}


def write_folder(variant: Variant, seed: int, folder: Path) -> None:
    """A model folder that vLLM loads."""
    import shutil

    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config(Shape(variant)), indent=1) + "\n")
    shutil.copy(weights_path(variant, seed), folder / "model.safetensors")
