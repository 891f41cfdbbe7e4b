# SPDX-License-Identifier: Apache-2.0
"""As much of vLLM's configuration as a worker of the connector reads."""

from __future__ import annotations

from dataclasses import dataclass, field

from vllm_ascend_kvext.connector.options import Selector
from vllm_ascend_kvext.layout.model import StatePolicy


@dataclass
class ParallelConfig:
    tensor_parallel_size: int = 1
    pipeline_parallel_size: int = 1
    decode_context_parallel_size: int = 1
    prefill_context_parallel_size: int = 1
    rank: int = 0


@dataclass
class ModelConfig:
    model: str = "some/model"
    revision: str | None = None
    quantization: str | None = None
    dtype: str = "torch.bfloat16"


@dataclass
class CacheConfig:
    cache_dtype: str = "auto"


class AttentionBackend:
    @staticmethod
    def get_name() -> str:
        return "SMALL_ATTN"


class AttentionLayer:
    @staticmethod
    def get_attn_backend() -> type[AttentionBackend]:
        return AttentionBackend


@dataclass
class CompilationConfig:
    static_forward_context: dict[str, AttentionLayer] = field(default_factory=dict)


@dataclass
class SpeculativeConfig:
    model: str


@dataclass
class VllmConfig:
    parallel_config: ParallelConfig = field(default_factory=ParallelConfig)
    model_config: ModelConfig = field(default_factory=ModelConfig)
    cache_config: CacheConfig = field(default_factory=CacheConfig)
    compilation_config: CompilationConfig = field(default_factory=CompilationConfig)
    speculative_config: SpeculativeConfig | None = None


@dataclass
class Options:
    host_memory_bytes_per_worker: int = 8 << 20
    copy_cpus: tuple[int, ...] | None = None
    copy_threads: int | None = 1
    state_policy: StatePolicy = StatePolicy.EXACT
    blending: bool = False
    blend_selector: Selector = Selector.HEADS
    blend_check_layer: int | None = None
