# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vllm-ascend-kvext project
"""A small configuration of each model family of the tutorials.

A model that also reads images or sound has its text part here, which has all its KV caches. Heads
have sizes that the device's operators take. Their number can be divided by every tensor-parallel
size of the lines, so that the configuration stage keeps these sizes.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

NUM_HEADS = 16
NUM_LAYERS = 4

COMMON: Mapping[str, Any] = {
    "vocab_size": 512,
    "hidden_size": 256,
    "intermediate_size": 256,
    "num_attention_heads": NUM_HEADS,
    "num_key_value_heads": NUM_HEADS,
    "head_dim": 64,
    "num_hidden_layers": NUM_LAYERS,
    "max_position_embeddings": 1 << 21,
    "rms_norm_eps": 1e-6,
    "hidden_act": "silu",
    "tie_word_embeddings": False,
    "bos_token_id": 0,
    "eos_token_id": 1,
    "rope_theta": 10000.0,
    "torch_dtype": "float32",
}
WIDE: Mapping[str, Any] = {"hidden_size": 64 * NUM_HEADS}
"""For models that know no size of a head, but what the hidden size gives each."""
WHOLE_HEADS: Mapping[str, Any] = {"partial_rotary_factor": 1.0}
"""For models that rotate a part of a head. vLLM-Ascend makes room for a whole head where the class
of the configuration keeps the part elsewhere, as transformers 5 does, and the step then fails."""
EXPERTS: Mapping[str, Any] = {
    "num_experts": 16,
    "num_local_experts": 16,
    "n_routed_experts": 16,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 64,
    "norm_topk_prob": True,
    "decoder_sparse_step": 1,
    "mlp_only_layers": [],
}
LATENT: Mapping[str, Any] = {
    "q_lora_rank": 96,
    "kv_lora_rank": 512,
    "qk_nope_head_dim": 128,
    "qk_rope_head_dim": 64,
    "v_head_dim": 128,
    "n_shared_experts": 1,
    "first_k_dense_replace": 1,
    "n_group": 4,
    "topk_group": 2,
    "routed_scaling_factor": 1.5,
    "topk_method": "noaux_tc",
    "scoring_func": "sigmoid",
    "num_nextn_predict_layers": 1,
}
INDEXER: Mapping[str, Any] = {"index_n_heads": 64, "index_head_dim": 128, "index_topk": 512}
GATED_DELTA: Mapping[str, Any] = {
    "linear_num_key_heads": NUM_HEADS,
    "linear_num_value_heads": 2 * NUM_HEADS,
    "linear_key_head_dim": 64,
    "linear_value_head_dim": 64,
    "linear_conv_kernel_dim": 4,
    "full_attention_interval": 4,
    "shared_expert_intermediate_size": 64,
    "partial_rotary_factor": 0.25,
}
KIMI_DELTA: Mapping[str, Any] = {
    # On each of up to 16 devices, a state has as many bytes as the latents of some blocks.
    "num_attention_heads": 64,
    "num_key_value_heads": 64,
    "linear_attn_config": {
        "head_dim": 128,
        "num_heads": 64,
        "short_conv_kernel_size": 4,
        "kda_layers": [1, 2, 3],
        "full_attn_layers": [4],
        "use_full_rank_gate": True,
        "gate_lower_bound": -5.0,
    },
    "attn_res_block_size": 2,
    "mla_use_output_gate": True,
    "num_experts_per_token": 2,
    "num_shared_experts": 1,
    "num_expert_group": 1,
    "topk_group": 1,
    "mla_use_nope": True,
}


class Family(NamedTuple):
    """A model family.

    Attributes:
        kind: What its layers keep, for people.
        config: The content of ``config.json``.
        is_text_part: Whether the models of the family also read something else.
    """

    kind: str
    config: Mapping[str, Any]
    is_text_part: bool = False


def _family(
    kind: str,
    architecture: str,
    model_type: str,
    *parts: Mapping[str, Any],
    is_text_part: bool = False,
    **more: Any,
) -> Family:
    config: dict[str, Any] = {"architectures": [architecture], "model_type": model_type, **COMMON}
    for part in parts:
        config |= part
    return Family(kind, config | more, is_text_part)


FULL = "keys and values"
MLA = "latents"
SPARSE_MLA = "latents, indexer keys"
GDN = "states (GDN), keys and values"
KDA = "states (KDA), latents"

_V4 = {
    **COMMON,
    **EXPERTS,
    "hidden_size": 1024,
    "num_key_value_heads": 1,
    "head_dim": 512,
    "compress_ratios": [0, 4, 128, 4, 0],
    "qk_rope_head_dim": 64,
    "q_lora_rank": 128,
    "o_lora_rank": 64,
    "o_groups": 16,
    "sliding_window": 128,
    "n_shared_experts": 1,
    "num_hash_layers": 1,
    "scoring_func": "sqrtsoftplus",
    "topk_method": "noaux_tc",
    "routed_scaling_factor": 1.5,
    "swiglu_limit": 10.0,
    "hc_mult": 4,
    "hc_sinkhorn_iters": 20,
    "hc_eps": 1e-6,
    "compress_rope_theta": 160000.0,
    "rope_scaling": {
        "type": "yarn",
        "rope_type": "yarn",
        "factor": 16,
        "original_max_position_embeddings": 65536,
        "beta_fast": 32,
        "beta_slow": 1,
    },
    "num_nextn_predict_layers": 1,
    **INDEXER,
}

_DENSE = _family(FULL, "Qwen3ForCausalLM", "qwen3")
_DENSE_TEXT = _DENSE._replace(is_text_part=True)
# Decode context parallelism is for models with fewer heads of keys than devices.
_MOE = _family(FULL, "Qwen3MoeForCausalLM", "qwen3_moe", EXPERTS, num_key_value_heads=4)
_MOE_TEXT = _MOE._replace(is_text_part=True)
_V3 = _family(MLA, "DeepseekV3ForCausalLM", "deepseek_v3", EXPERTS, LATENT)
_SPARSE = _family(SPARSE_MLA, "GlmMoeDsaForCausalLM", "glm_moe_dsa", EXPERTS, LATENT, INDEXER)
_V4_FAMILY = _family(
    "compressed latents, windows, compressor states", "DeepseekV4ForCausalLM", "deepseek_v4", _V4
)


def _qwen3_5(moe: str, *parts: Mapping[str, Any]) -> Family:
    """A model that also reads images. vLLM 0.23 has no architecture for its text part alone."""
    text = _family(
        GDN, "", f"qwen3_5{moe.lower()}_text", *parts, GATED_DELTA, mtp_num_hidden_layers=1
    ).config
    config = {
        "architectures": [f"Qwen3_5{moe.title().strip('_')}ForConditionalGeneration"],
        "model_type": f"qwen3_5{moe}",
        "text_config": {name: value for name, value in text.items() if name != "architectures"},
        "vision_config": {},
        "tie_word_embeddings": False,
    }
    return Family(GDN, config)


FAMILIES: Mapping[str, Family] = {
    "DeepSeek-R1, V3.1": _V3,
    "DeepSeek-V3.2": _family(
        SPARSE_MLA, "DeepseekV32ForCausalLM", "deepseek_v32", EXPERTS, LATENT, INDEXER
    ),
    "DeepSeek-V4": _V4_FAMILY,
    "DeepSeek-V4-Vision": _V4_FAMILY._replace(is_text_part=True),
    "DeepSeek-V4.1": Family(
        _V4_FAMILY.kind,
        {
            "architectures": ["DeepseekV41ForCausalLM"],
            "model_type": "deepseek_v41",
            "text_config": {**_V4, "model_type": "deepseek_v4", "engram_layer_ids": [1]},
            "vision_config": {},
        },
    ),
    "Dots3-Note": _family(
        SPARSE_MLA, "Dots3NoteForCausalLM", "dots3_note", EXPERTS, LATENT, INDEXER
    ),
    "Gemma 4": _family(
        "windows, keys and values",
        "Gemma4ForCausalLM",
        "gemma4_text",
        layer_types=["sliding_attention"] * 3 + ["full_attention"],
        sliding_window=512,
        hidden_size_per_layer_input=0,
        global_head_dim=64,
        is_text_part=True,
    ),
    "GLM-4.7": _family(
        FULL,
        "Glm4MoeForCausalLM",
        "glm4_moe",
        EXPERTS,
        {"n_shared_experts": 1, "first_k_dense_replace": 1, "n_group": 1, "topk_group": 1},
        num_nextn_predict_layers=1,
        routed_scaling_factor=1.0,
        use_qk_norm=True,
        attention_bias=True,
        **WHOLE_HEADS,
    ),
    "GLM-5": _SPARSE,
    "GLM-5.3-Flash": _family(
        "states (KDA), latents, indexer keys",
        "Glm5NextForCausalLM",
        "glm5_next_text",
        EXPERTS,
        LATENT,
        INDEXER,
        qk_rope_head_dim=0,
        n_group=1,
        topk_group=1,
        num_experts_per_token=2,
        linear_head_dim=64,
        linear_num_heads=NUM_HEADS,
        layer_types=["linear_attention"] * 3 + ["deepseek_sparse_attention"],
        mlp_layer_types=["dense"] + ["sparse"] * 3,
        is_text_part=True,
    ),
    "gpt-oss": _family(
        "windows, keys and values",
        "GptOssForCausalLM",
        "gpt_oss",
        EXPERTS,
        layer_types=["sliding_attention", "full_attention"] * 2,
        sliding_window=128,
    ),
    "Hunyuan-A13B": _family(
        FULL, "HunYuanMoEV1ForCausalLM", "hunyuan_v1_moe", EXPERTS, moe_topk=2, num_shared_expert=1
    ),
    "Hy3": _family(
        FULL,
        "HYV3ForCausalLM",
        "hy_v3",
        EXPERTS,
        first_k_dense_replace=1,
        num_shared_experts=1,
        num_nextn_predict_layers=1,
        router_scaling_factor=1.0,
    ),
    "Hy4": _family(SPARSE_MLA, "HYV4ForCausalLM", "hy_v4", EXPERTS, LATENT, INDEXER),
    "Kimi-K2": _V3._replace(is_text_part=True),
    "Kimi-K3": _family(
        KDA,
        "KimiLinearForCausalLM",
        "kimi_linear",
        EXPERTS,
        LATENT,
        KIMI_DELTA,
        q_lora_rank=None,
        is_text_part=True,
    ),
    "LLaVA-OneVision": _family(FULL, "Qwen2ForCausalLM", "qwen2", WIDE, is_text_part=True),
    "MiniMax-M2": _family(
        FULL,
        "MiniMaxM2ForCausalLM",
        "minimax_m2",
        EXPERTS,
        rotary_dim=32,
        scoring_func="sigmoid",
        use_routing_bias=True,
        use_qk_norm=True,
        qk_norm_type="per_layer",
    ),
    "MiniMax-M3": Family(
        "keys and values, indexer keys",
        {
            "architectures": ["MiniMaxM3SparseForCausalLM"],
            "model_type": "minimax_m3_vl",
            "text_config": {
                **COMMON,
                **EXPERTS,
                "head_dim": 128,
                "dense_intermediate_size": 256,
                "shared_intermediate_size": 64,
                "n_shared_experts": 1,
                "moe_layer_freq": [0, 1, 1, 1],
                "num_mtp_modules": 0,
            },
        },
        is_text_part=True,
    ),
    "Minitron": _family(
        FULL, "NemotronForCausalLM", "nemotron", WHOLE_HEADS, norm_eps=1e-5, hidden_act="relu2"
    ),
    "Mixtral": _family(FULL, "MixtralForCausalLM", "mixtral", EXPERTS),
    "PaddleOCR-VL": _family(FULL, "Ernie4_5ForCausalLM", "ernie4_5", WIDE, is_text_part=True),
    "Qwen2.5-Math-RM": _family("keys and values, pooling", "Qwen2ForRewardModel", "qwen2", WIDE),
    "Qwen2.5-VL": _family(FULL, "Qwen2ForCausalLM", "qwen2", WIDE, is_text_part=True),
    "Qwen3": _DENSE,
    "Qwen3-MoE": _MOE,
    "Qwen3, text part": _DENSE_TEXT,
    "Qwen3-MoE, text part": _MOE_TEXT,
    "Qwen3-Next": _family(
        GDN,
        "Qwen3NextForCausalLM",
        "qwen3_next",
        EXPERTS,
        GATED_DELTA,
        num_nextn_predict_layers=1,
    ),
    "Qwen3.5, 3.6, 3.8": _qwen3_5(""),
    "Qwen3.5-MoE, 3.6-MoE, 3.8-MoE": _qwen3_5("_moe", EXPERTS),
    "Qwen3.8-Flash-Next": _family(
        "states (GDN), sparse attention",
        "Qwen4ExpForCausalLM",
        "qwen4_exp_text",
        EXPERTS,
        GATED_DELTA,
        INDEXER,
        mtp_num_hidden_layers=1,
        is_text_part=True,
    ),
}

WITHOUT_KV = {
    "models/Cohere-Transcribe": "a model of speech with an encoder; the emulation has text only",
    "models/DeepSeekOCR2": "transformers has no configuration of its text part",
    "models/SigLIP2": "a model without KV cache",
}
"""The pages whose models have no small configuration, and why."""

_PAGES = (
    ("features/pd_disaggregation_mooncake_single_node", "Qwen2.5-VL"),
    ("features/pd_disaggregation_mooncake_multi_node", "DeepSeek-R1, V3.1"),
    ("features/dynamic_chunked_pipeline_parallel", "DeepSeek-R1, V3.1"),
    ("features/pd_colocated_mooncake_multi_instance", "Qwen3"),
    ("features/(long_sequence.*|ray)", "Qwen3-MoE"),
    ("features/suffix_speculative_decoding", "Qwen3"),
    ("models/DeepSeek-(R1|V3.1)", "DeepSeek-R1, V3.1"),
    ("models/DeepSeek-V3.2", "DeepSeek-V3.2"),
    ("models/DeepSeek-V4-Flash-Vision", "DeepSeek-V4-Vision"),
    ("models/DeepSeek-V4-(Flash|Pro)", "DeepSeek-V4"),
    ("models/DeepSeek-V4.1-Flash", "DeepSeek-V4.1"),
    ("models/Dots3-Note", "Dots3-Note"),
    ("models/Gemma4", "Gemma 4"),
    ("models/GLM4.x", "GLM-4.7"),
    ("models/GLM5.3-Flash", "GLM-5.3-Flash"),
    ("models/GLM5(.2|.3)?", "GLM-5"),
    ("models/gpt-oss-120b", "gpt-oss"),
    ("models/Hunyuan-A13B-Instruct", "Hunyuan-A13B"),
    ("models/Hy3-preview", "Hy3"),
    ("models/Hy4-preview", "Hy4"),
    ("models/InternVL3.5", "Qwen3-MoE, text part"),
    ("models/Kimi-K2.*", "Kimi-K2"),
    ("models/Kimi-K3", "Kimi-K3"),
    ("models/LLaVA-OneVision.*", "LLaVA-OneVision"),
    ("models/MiniMax-M2", "MiniMax-M2"),
    ("models/MiniMax-M3", "MiniMax-M3"),
    ("models/Minitron-8B-Base", "Minitron"),
    ("models/Mixtral.*", "Mixtral"),
    ("models/PaddleOCR-VL", "PaddleOCR-VL"),
    ("models/Qwen2.5-Math-RM-72B", "Qwen2.5-Math-RM"),
    ("models/Qwen3-(235B|30B|Coder-30B)-A.*", "Qwen3-MoE"),
    ("models/Qwen3-(VL-235B|VL-30B|Omni).*", "Qwen3-MoE, text part"),
    ("models/(Qwen-VL-Dense|Qwen3-ASR.*|Qwen3-VL-(Embedding|Reranker))", "Qwen3, text part"),
    ("models/Qwen3-(Dense|Embedding|Reranker)", "Qwen3"),
    ("models/Qwen3-Next", "Qwen3-Next"),
    ("models/Qwen3.8-Flash-Next", "Qwen3.8-Flash-Next"),
    (
        r"models/(Qwen3.5-397B-A17B|Qwen3.6-35B-A3B|Qwen3.8-2.4T-A95B)",
        "Qwen3.5-MoE, 3.6-MoE, 3.8-MoE",
    ),
    ("models/Qwen3.[58]-.*", "Qwen3.5, 3.6, 3.8"),
)

DRAFTS: Mapping[str, Mapping[str, Any]] = {
    "eagle3": {
        **COMMON,
        "architectures": ["LlamaForCausalLMEagle3"],
        "model_type": "llama",
        "num_hidden_layers": 1,
        "draft_vocab_size": 512,
        "eagle_aux_hidden_state_layer_ids": [0, 1, 2],
    },
    "dflash": {
        **COMMON,
        "architectures": ["DFlashDraftModel"],
        "model_type": "qwen3",
        "num_hidden_layers": 1,
        "block_size": 16,
        "dflash_config": {"target_layer_ids": [1, 2], "mask_token_id": 2},
    },
}
"""The configurations of draft models, by the method of the speculative config."""


def family_of(page: str) -> str:
    """The family of a page's models. Empty if there is no small configuration."""
    return next((family for pattern, family in _PAGES if re.fullmatch(pattern, page)), "")


def write_configs(folder: Path, stage: str) -> None:
    """Write ``config.json`` of all families and drafts, each to a folder below the given one.

    For the stage ``configuration``, a file of quantization says that every weight is a float. An
    engine with this file takes no weights of float32, so the stage ``engine`` has none.
    """
    named = {name: family.config for name, family in FAMILIES.items()} | dict(DRAFTS)
    for name, config in named.items():
        to = folder / slug(name)
        to.mkdir(parents=True, exist_ok=True)
        (to / "config.json").write_text(json.dumps(config))
        if stage == "configuration":
            kind = {"model_quant_type": "FLOAT"}
            (to / "quant_model_description.json").write_text(json.dumps(kind))


def slug(name: str) -> str:
    """The name of a family's folder."""
    return re.sub(r"[^a-z0-9]+", "-", name.lower()).strip("-")
