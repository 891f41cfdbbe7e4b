# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vllm-ascend-kvext project
"""A small Kimi-K3 with random weights: Kimi delta attention, latent attention, residuals, experts.

transformers does not know the model, so weights are written by the names of vLLM's loader. vLLM-
Ascend serves the text model. The draft layer is in a folder of its own, as vLLM knows it as a part
of the model with pictures only.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from support.states.state_models import EMBEDDING_SCALE, mostly_embedding, save

HIDDEN = 128
HEADS = 4
EXPERTS = 4
EXPERT_SIZE = 64
DENSE_SIZE = 256
RANK = 512
QUERY_RANK = 96
NOPE_SIZE = 128
ROPE_SIZE = 64
VALUE_SIZE = 128
STATE_HEADS = 4
STATE_SIZE = 64
CONVOLVED_TOKENS = 4
VOCABULARY_TOKENS = 512
NUM_LAYERS = 4
STATE_LAYERS = (0, 1, 2)
NUM_DENSE_LAYERS = 1

NUM_DRAFT_TOKENS = 2
"""Draft tokens per step. The second follows the first."""

SLOW = -8.0
"""The shift of the gates. A state forgets little from token to token, so that its loss is seen."""

CONFIG: dict[str, Any] = {
    "architectures": ["KimiLinearForCausalLM"],
    "model_type": "kimi_linear",
    "torch_dtype": "float32",
    "vocab_size": VOCABULARY_TOKENS,
    "hidden_size": HIDDEN,
    "intermediate_size": DENSE_SIZE,
    "num_hidden_layers": NUM_LAYERS,
    "num_attention_heads": HEADS,
    "hidden_act": "silu",
    "max_position_embeddings": 8192,
    "tie_word_embeddings": False,
    "q_lora_rank": QUERY_RANK,
    "kv_lora_rank": RANK,
    "qk_nope_head_dim": NOPE_SIZE,
    "qk_rope_head_dim": ROPE_SIZE,
    "v_head_dim": VALUE_SIZE,
    "mla_use_nope": True,
    "mla_use_output_gate": True,
    "num_experts": EXPERTS,
    "num_experts_per_token": 2,
    "moe_intermediate_size": EXPERT_SIZE,
    "num_shared_experts": 1,
    "first_k_dense_replace": NUM_DENSE_LAYERS,
    "attn_res_block_size": 2,
    "linear_attn_config": {
        "kda_layers": [layer + 1 for layer in STATE_LAYERS],  # counted from 1
        "full_attn_layers": [NUM_LAYERS],
        "num_heads": STATE_HEADS,
        "head_dim": STATE_SIZE,
        "short_conv_kernel_size": CONVOLVED_TOKENS,
        "use_full_rank_gate": True,
        "gate_lower_bound": -5.0,
    },
}


def write(folder: Path, has_drafts: bool = False) -> None:
    """Write the model to ``folder``, and its draft layer to ``folder / "draft"`` if it has one."""
    torch.manual_seed(0)
    weights = dict(_model())
    if has_drafts:
        weights["model.embed_tokens.weight"] *= EMBEDDING_SCALE
    text = CONFIG | {"num_nextn_predict_layers": int(has_drafts)}
    _write(folder, text, weights)
    if has_drafts:
        config = {"architectures": ["KimiK3ForConditionalGeneration"], "model_type": "kimi_k3"}
        draft = {name: tensor.clone() for name, tensor in _draft(weights)}
        (folder / "draft").mkdir()
        _write(folder / "draft", config | {"text_config": text, "torch_dtype": "float32"}, draft)


def drafts(folder: Path) -> dict[str, Any]:
    """Arguments of an engine that asks the model's draft layer."""
    return {
        "speculative_config": {
            "method": "mtp",
            "model": str(folder / "draft"),
            "num_speculative_tokens": NUM_DRAFT_TOKENS,
        }
    }


def _write(folder: Path, config: dict[str, Any], weights: dict[str, torch.Tensor]) -> None:
    (folder / "config.json").write_text(json.dumps(config))
    save(weights, folder / "model.safetensors")


def _random(*shape: int) -> torch.Tensor:
    return torch.randn(shape) * 0.2


def _norm(size: int) -> torch.Tensor:
    return 1 + torch.randn(size) * 0.05


def _model() -> Iterator[tuple[str, torch.Tensor]]:
    yield "model.embed_tokens.weight", _random(VOCABULARY_TOKENS, HIDDEN)
    for layer in range(NUM_LAYERS):
        prefix = f"model.layers.{layer}."
        yield from _layer(prefix, layer in STATE_LAYERS, layer >= NUM_DENSE_LAYERS)
        for name in ("self_attention_res", "mlp_res"):
            yield from _mixture(prefix + name)
    yield from _mixture("model.output_attn_res")
    yield "model.norm.weight", _norm(HIDDEN)
    yield "lm_head.weight", _random(VOCABULARY_TOKENS, HIDDEN)


def _mixture(prefix: str) -> Iterator[tuple[str, torch.Tensor]]:
    yield f"{prefix}_norm.weight", _norm(HIDDEN)
    yield f"{prefix}_proj.weight", _random(1, HIDDEN)


def _layer(prefix: str, has_state: bool, has_experts: bool) -> Iterator[tuple[str, torch.Tensor]]:
    for name in ("input_layernorm", "post_attention_layernorm"):
        yield f"{prefix}{name}.weight", _norm(HIDDEN)
    yield from (_state if has_state else _latent)(f"{prefix}self_attn.")
    if not has_experts:
        yield from _perceptron(f"{prefix}mlp.", DENSE_SIZE)
        return
    prefix += "block_sparse_moe."
    yield f"{prefix}gate.weight", _random(EXPERTS, HIDDEN)
    yield f"{prefix}gate.e_score_correction_bias", _random(EXPERTS)
    yield from _perceptron(f"{prefix}shared_experts.", EXPERT_SIZE)
    for expert in range(EXPERTS):
        for name in ("w1", "w3"):
            yield f"{prefix}experts.{expert}.{name}.weight", _random(EXPERT_SIZE, HIDDEN)
        yield f"{prefix}experts.{expert}.w2.weight", _random(HIDDEN, EXPERT_SIZE)


def _perceptron(prefix: str, size: int) -> Iterator[tuple[str, torch.Tensor]]:
    for name in ("gate_proj", "up_proj"):
        yield f"{prefix}{name}.weight", _random(size, HIDDEN)
    yield f"{prefix}down_proj.weight", _random(HIDDEN, size)


def _state(prefix: str) -> Iterator[tuple[str, torch.Tensor]]:
    """A layer with Kimi delta attention."""
    size = STATE_HEADS * STATE_SIZE
    for name in "qkvg":
        yield f"{prefix}{name}_proj.weight", _random(size, HIDDEN)
    for name in "qkv":
        yield f"{prefix}{name}_conv1d.weight", _random(size, 1, CONVOLVED_TOKENS)
    # vLLM-Ascend makes this parameter of the others. vLLM wants it in a checkpoint without
    # quantization nevertheless.
    yield f"{prefix}ascend_conv1d_weight", torch.zeros(CONVOLVED_TOKENS, 3 * size)
    yield f"{prefix}b_proj.weight", _random(STATE_HEADS, HIDDEN)
    yield f"{prefix}f_a_proj.weight", _random(STATE_SIZE, HIDDEN)
    yield f"{prefix}f_b_proj.weight", _random(size, STATE_SIZE) * 0.25
    yield f"{prefix}A_log", torch.zeros(STATE_HEADS)
    yield f"{prefix}dt_bias", torch.full((size,), SLOW)
    yield f"{prefix}o_norm.weight", _norm(STATE_SIZE)
    yield f"{prefix}o_proj.weight", _random(HIDDEN, size)


def _latent(prefix: str) -> Iterator[tuple[str, torch.Tensor]]:
    """A layer with latent attention."""
    yield f"{prefix}q_a_proj.weight", _random(QUERY_RANK, HIDDEN)
    yield f"{prefix}q_a_layernorm.weight", _norm(QUERY_RANK)
    yield f"{prefix}q_b_proj.weight", _random(HEADS * (NOPE_SIZE + ROPE_SIZE), QUERY_RANK)
    yield f"{prefix}kv_a_proj_with_mqa.weight", _random(RANK + ROPE_SIZE, HIDDEN)
    yield f"{prefix}kv_a_layernorm.weight", _norm(RANK)
    yield f"{prefix}kv_b_proj.weight", _random(HEADS * (NOPE_SIZE + VALUE_SIZE), RANK)
    yield f"{prefix}g_proj.weight", _random(HEADS * VALUE_SIZE, HIDDEN)
    yield f"{prefix}o_proj.weight", _random(HIDDEN, HEADS * VALUE_SIZE)


def _draft(weights: dict[str, torch.Tensor]) -> Iterator[tuple[str, torch.Tensor]]:
    """The draft layer, in which the last token's embedding counts most."""
    prefix = f"model.layers.{NUM_LAYERS}."
    yield from _layer(prefix, has_state=False, has_experts=True)
    for name in ("enorm", "hnorm"):
        yield f"{prefix}{name}.weight", torch.ones(HIDDEN)
    yield f"{prefix}eh_proj.weight", mostly_embedding(HIDDEN) * 40  # The layer adds about 17.
    yield f"{prefix}shared_head.norm.weight", weights["model.norm.weight"]
    yield f"{prefix}shared_head.head.weight", weights["lm_head.weight"]
    yield f"{prefix}embed_tokens.weight", weights["model.embed_tokens.weight"]
