# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vllm-ascend-kvext project
"""The engine configurations that the harness can build, and how it builds them.

Everything is local. The model is a ``config.json`` in a temporary directory. A scheduler reads only
the maximum length from it.
"""

from __future__ import annotations

import enum
import functools
import json
import tempfile
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from vllm.config import (
    CacheConfig,
    DeviceConfig,
    KVEventsConfig,
    KVTransferConfig,
    LoRAConfig,
    ModelConfig,
    ParallelConfig,
    SchedulerConfig,
    SpeculativeConfig,
    VllmConfig,
)

from .layouts import Layout


class Drafter(enum.Enum):
    """Where draft tokens come from. Only EAGLE has its own KV."""

    NGRAM = "ngram"
    EAGLE = "eagle"


class ExternalLoad(enum.Enum):
    """How the KV connector loads the prompts whose KV it claims to have."""

    NEVER = "never"
    IN_STEP = "in_step"
    BETWEEN_STEPS = "between_steps"


@dataclass(frozen=True, slots=True, kw_only=True)
class FailingLoads:
    """How the loads of the KV connector fail.

    Attributes:
        seed: Decides which loads fail, and which of their blocks.
        share: The share of loads that fail.
        max_steps: The most steps that a load between steps takes in addition.
        names_requests: Whether the worker reports requests in its metadata, and no blocks.
        recomputes: Whether ``kv_load_failure_policy`` is ``recompute``. Otherwise it is ``fail``.
    """

    seed: int
    share: float = 0.5
    max_steps: int = 0
    names_requests: bool = False
    recomputes: bool = True


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineOptions:
    """One engine configuration. Names that vLLM has, too, mean the same as in vLLM.

    Attributes:
        num_blocks: The size of the block pool, including the null block.
        long_prefill_tokens: ``long_prefill_token_threshold``. 0 means none.
        reserve_full_prompt: Whether a request is only admitted if its whole prompt fits the pool.
        is_async: Whether to use ``AsyncScheduler``, with two steps in flight.
        interval_tokens: ``prefix_cache_retention_interval`` of the configuration, since vLLM 0.30.
            If None, the environment decides.
        external_load: How the KV connector behaves. If None, there is no connector.
        kv_role: The role of the KV connector.
        extends_local_hits: Whether the connector adds tokens to a local hit.
        failing_loads: How the connector's loads fail. If None, they never do.
        offloading: ``kv_connector_extra_config`` of a KvextConnector. If set, it replaces the
        scripted
            connector.
        num_workers: The tensor parallel size.
        match_unit_tokens: ``prefix_match_unit`` (vLLM 0.30). If None, hits end with whole blocks.
    """

    num_blocks: int
    max_num_seqs: int = 8
    max_num_batched_tokens: int = 64
    long_prefill_tokens: int = 0
    max_model_len: int = 1024
    reserve_full_prompt: bool = True
    by_priority: bool = False
    is_async: bool = False
    drafter: Drafter | None = None
    num_draft_tokens: int = 2
    interval_tokens: int | None = None
    external_load: ExternalLoad | None = None
    kv_role: str = "kv_both"
    extends_local_hits: bool = True
    failing_loads: FailingLoads | None = None
    offloading: Mapping[str, Any] | None = None
    num_workers: int = 1
    match_unit_tokens: int | None = None
    caching: bool = True
    events: bool = True


@functools.cache
def _model_config(architecture: str, max_model_len: int) -> ModelConfig:
    path = Path(tempfile.mkdtemp(prefix="kvext-model-"))
    config = {
        "architectures": [architecture],
        "model_type": "llama",
        "hidden_size": 64,
        "intermediate_size": 64,
        "num_hidden_layers": 1,
        "num_attention_heads": 1,
        "num_key_value_heads": 1,
        "vocab_size": 64,
        "max_position_embeddings": max_model_len,
    }
    (path / "config.json").write_text(json.dumps(config))
    return ModelConfig(
        model=str(path),
        skip_tokenizer_init=True,
        max_model_len=max_model_len,
        dtype="float32",
        enforce_eager=True,
    )


def _speculative_config(options: EngineOptions, target: ModelConfig) -> SpeculativeConfig | None:
    if options.drafter is None:
        return None
    common = {
        "num_speculative_tokens": options.num_draft_tokens,
        "target_model_config": target,
        "target_parallel_config": ParallelConfig(),
    }
    if options.drafter is Drafter.NGRAM:
        return SpeculativeConfig(method="ngram", prompt_lookup_max=3, **common)
    draft = _model_config("EagleLlamaForCausalLM", options.max_model_len)
    return SpeculativeConfig(method="eagle", model=draft.model, **common)


def build_vllm_config(layout: Layout, options: EngineOptions) -> VllmConfig:
    """A real ``VllmConfig`` for a layout, like the engine core's."""
    model_config = _model_config("LlamaForCausalLM", options.max_model_len)
    match_unit = (
        {"prefix_match_unit": options.match_unit_tokens} if options.match_unit_tokens else {}
    )
    config = VllmConfig(
        device_config=DeviceConfig("cpu"),
        model_config=model_config,
        cache_config=CacheConfig(
            block_size=layout.min_block_tokens,
            enable_prefix_caching=options.caching,
            mamba_cache_mode="align" if layout.has_mamba else "none",
            **match_unit,
        ),
        scheduler_config=SchedulerConfig(
            max_num_seqs=options.max_num_seqs,
            max_num_batched_tokens=options.max_num_batched_tokens,
            max_model_len=options.max_model_len,
            long_prefill_token_threshold=options.long_prefill_tokens,
            enable_chunked_prefill=True,
            scheduler_reserve_full_isl=options.reserve_full_prompt,
            is_encoder_decoder=False,
            policy="priority" if options.by_priority else "fcfs",
            disable_hybrid_kv_cache_manager=False,
        ),
        speculative_config=_speculative_config(options, model_config),
        kv_events_config=KVEventsConfig(enable_kv_cache_events=options.events, publisher="null"),
        lora_config=LoRAConfig(max_loras=2, max_lora_rank=8),
        kv_transfer_config=_kv_transfer_config(layout, options),
    )
    # The CPU platform overrides both values.
    config.scheduler_config.async_scheduling = options.is_async
    config.cache_config.enable_prefix_caching = options.caching
    config.cache_config.num_gpu_blocks = options.num_blocks
    config.parallel_config.tensor_parallel_size = options.num_workers
    config.parallel_config.world_size = options.num_workers
    return config


def _kv_transfer_config(layout: Layout, options: EngineOptions) -> KVTransferConfig | None:
    if options.offloading is not None:
        return KVTransferConfig(
            kv_connector="KvextConnector",
            kv_load_failure_policy="recompute",
            kv_role=options.kv_role,
            kv_connector_extra_config=dict(options.offloading),
        )
    if options.external_load is None:
        return None
    recomputes = options.failing_loads is None or options.failing_loads.recomputes
    return KVTransferConfig(
        kv_connector="ScriptedConnector",
        kv_load_failure_policy="recompute" if recomputes else "fail",
        kv_connector_module_path=f"{__package__}.connector",
        kv_role=options.kv_role,
        kv_connector_extra_config={
            "external_load": options.external_load.value,
            "extends_local_hits": options.extends_local_hits,
            "unit_tokens": layout.unit_tokens,
        },
    )
