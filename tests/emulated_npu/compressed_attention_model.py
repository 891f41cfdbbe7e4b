# SPDX-License-Identifier: Apache-2.0
"""A small DeepSeek-V4 with random weights, named as in DeepSeek's checkpoints."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file

VOCABULARY_TOKENS = 512
SCALE = 0.2

CONFIG: Mapping[str, Any] = {
    "architectures": ["DeepseekV4ForCausalLM"],
    "model_type": "deepseek_v4",
    "vocab_size": VOCABULARY_TOKENS,
    # The compressor takes 1,024 and more. Heads of attention and indexer, their sizes and the
    # indexer's choice are those of the real models: the operators take no others.
    "hidden_size": 1024,
    "num_hidden_layers": 4,
    "compress_ratios": [0, 4, 128, 4],
    "num_attention_heads": 16,
    "num_key_value_heads": 1,
    "head_dim": 512,
    "qk_rope_head_dim": 64,
    "q_lora_rank": 128,
    "o_lora_rank": 64,
    "o_groups": 4,
    "index_n_heads": 64,
    "index_head_dim": 128,
    "index_topk": 512,
    "sliding_window": 128,
    "moe_intermediate_size": 128,
    "n_routed_experts": 8,
    "n_shared_experts": 1,
    "num_experts_per_tok": 2,
    "num_hash_layers": 1,
    "norm_topk_prob": True,
    "scoring_func": "sqrtsoftplus",
    "topk_method": "noaux_tc",
    "routed_scaling_factor": 1.5,
    "swiglu_limit": 10.0,
    "hc_mult": 4,
    "hc_sinkhorn_iters": 20,
    "hc_eps": 1e-6,
    "rms_norm_eps": 1e-6,
    "hidden_act": "silu",
    "rope_theta": 10000.0,
    "compress_rope_theta": 160000.0,
    "rope_scaling": {
        "type": "yarn",
        "rope_type": "yarn",
        "factor": 16,
        "original_max_position_embeddings": 2048,
        "beta_fast": 32,
        "beta_slow": 1,
    },
    "max_position_embeddings": 32768,
    "num_nextn_predict_layers": 0,
    "tie_word_embeddings": False,
    "bos_token_id": 0,
    "eos_token_id": 1,
    "torch_dtype": "float32",
}


class _Weights(dict[str, torch.Tensor]):
    def add(self, name: str, *shape: int, scale: float = SCALE) -> None:
        self[name] = torch.randn(*shape) * scale

    def add_about_one(self, name: str, size: int) -> None:
        self[name] = 1 + torch.randn(size) * SCALE

    def add_compressor(self, prefix: str, head_size: int, ratio: int) -> None:
        hidden, width = CONFIG["hidden_size"], head_size * (2 if ratio == 4 else 1)
        self.add(prefix + "ape", ratio, width)
        self.add(prefix + "wkv.weight", width, hidden)
        self.add(prefix + "wgate.weight", width, hidden, scale=SCALE / 4)  # no window of one token
        self.add_about_one(prefix + "norm.weight", head_size)

    def add_attention(self, prefix: str, ratio: int) -> None:
        hidden, rank, size = CONFIG["hidden_size"], CONFIG["q_lora_rank"], CONFIG["head_dim"]
        heads, groups = CONFIG["num_attention_heads"], CONFIG["o_groups"]
        out = groups * CONFIG["o_lora_rank"]
        self.add(prefix + "wq_a.weight", rank, hidden)
        self.add_about_one(prefix + "q_norm.weight", rank)
        self.add(prefix + "wq_b.weight", heads * size, rank)
        self.add(prefix + "wkv.weight", size, hidden)
        self.add_about_one(prefix + "kv_norm.weight", size)
        self.add(prefix + "wo_a.weight", out, heads * size // groups)
        self.add(prefix + "wo_b.weight", hidden, out)
        self.add(prefix + "attn_sink", heads)
        if ratio:
            self.add_compressor(prefix + "compressor.", size, ratio)
        if ratio == 4:
            index_heads, index_size = CONFIG["index_n_heads"], CONFIG["index_head_dim"]
            self.add_compressor(prefix + "indexer.compressor.", index_size, ratio)
            self.add(prefix + "indexer.wq_b.weight", index_heads * index_size, rank)
            self.add(prefix + "indexer.weights_proj.weight", index_heads, hidden)

    def add_experts(self, prefix: str, *, is_by_id: bool) -> None:
        hidden, inner = CONFIG["hidden_size"], CONFIG["moe_intermediate_size"]
        num_experts, num_chosen = CONFIG["n_routed_experts"], CONFIG["num_experts_per_tok"]
        self.add(prefix + "gate.weight", num_experts, hidden)
        if is_by_id:
            rows = [torch.randperm(num_experts)[:num_chosen] for _ in range(VOCABULARY_TOKENS)]
            self[prefix + "gate.tid2eid"] = torch.stack(rows).int()
        else:
            self.add(prefix + "gate.bias", num_experts)
        for expert in (*(f"experts.{number}" for number in range(num_experts)), "shared_experts"):
            self.add(f"{prefix}{expert}.w1.weight", inner, hidden)
            self.add(f"{prefix}{expert}.w2.weight", hidden, inner)
            self.add(f"{prefix}{expert}.w3.weight", inner, hidden)


def write_model(folder: Path) -> None:
    """Write config and weights; the same with every call."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(CONFIG))
    torch.manual_seed(0)
    weights, hidden, streams = _Weights(), CONFIG["hidden_size"], CONFIG["hc_mult"]
    weights.add("embed.weight", VOCABULARY_TOKENS, hidden)
    weights.add("head.weight", VOCABULARY_TOKENS, hidden)
    weights.add_about_one("norm.weight", hidden)
    # A smaller scale: these sum up over all streams, and what comes out goes through a sigmoid.
    weights.add("hc_head_fn", streams, streams * hidden, scale=SCALE / 8)
    weights.add("hc_head_base", streams)
    weights.add_about_one("hc_head_scale", 1)
    mixes = (2 + streams) * streams
    for number, ratio in enumerate(CONFIG["compress_ratios"]):
        layer = f"layers.{number}."
        for part in ("attn", "ffn"):
            weights.add_about_one(f"{layer}{part}_norm.weight", hidden)
            weights.add(f"{layer}hc_{part}_fn", mixes, streams * hidden, scale=SCALE / 8)
            weights.add(f"{layer}hc_{part}_base", mixes)
            weights.add_about_one(f"{layer}hc_{part}_scale", 3)
        weights.add_attention(layer + "attn.", ratio)
        weights.add_experts(layer + "ffn.", is_by_id=number < CONFIG["num_hash_layers"])
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
