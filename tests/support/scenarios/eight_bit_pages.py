# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vllm-ascend-kvext project
"""Prompts that come back from host memory, and the bytes of their pages.

Attention may read keys that are not rounded for a prompt's first tokens, and rounded ones where it
resumes. So an answer that resumes is compared with one that resumes at the same token on the
device. An engine without a connector keeps its pages, and gets the same prompts.
"""

from __future__ import annotations

import random
from functools import cache
from importlib import import_module
from typing import Any

import torch

from support.scenarios import connector, scenario
from support.scenarios.engine import random_tokens, wrong_bytes
from support.upstream_version import IS_SINCE_0_30

damage = connector.damage
failures = connector.failures
holes = connector.holes
storm = connector.storm

PROMPTS_TOKENS = (300, 700, 520)


class Engine(connector.Engine):
    """An engine whose cached pages can be read. Its model may have float32 beside 8 bits."""

    def __init__(self, plan: dict[str, Any]) -> None:
        accept_float32()
        if plan.get("reads_rounded"):
            read_rounded_keys()
        if plan.get("is_exact"):
            compute_exactly()
        super().__init__(plan)

    def pages(self) -> dict[Any, list[bytes]]:
        """The bytes of each cached page, by the hash of its block: tensor after tensor."""
        blocks = self.scheduler.kv_cache_manager.block_pool.blocks
        cached = {
            block.block_hash: block.block_id for block in blocks if block.block_hash is not None
        }
        tensors = [tensor for of_layer in self.runner.kv_caches for tensor in of_layer]
        self.note("page types", sorted({str(tensor.dtype) for tensor in tensors}))
        layers = self.core.vllm_config.compilation_config.static_forward_context.values()
        self.note("has scales", any(hasattr(layer, "_c8_k_inv_scale") for layer in layers))
        return {
            key: [bytes(tensor[block].cpu().numpy()) for tensor in tensors]
            for key, block in cached.items()
        }

    def stored(self) -> list[Any]:
        """All entries of host memory."""
        return list(self.side.tier._entries.values()) if self.has_connector else []

    def forget(self) -> None:
        """Empty the device's cache, and spoil its pages, if they can come back."""
        if self.has_connector:
            self.spoil_pages()


@scenario
def sightings(engine: Engine) -> None:
    """Each prompt is new, is on the device, comes back, and comes back with wrong bytes."""
    rng = random.Random(11)
    prompts = [random_tokens(rng, length) for length in PROMPTS_TOKENS]
    _ask_each(engine, "first", prompts)
    computed = engine.pages()
    _ask_each(engine, "again", prompts)
    engine.forget()
    _ask_each(engine, "returned", prompts)
    returned = engine.pages()
    same = [key for key in computed if returned.get(key) == computed[key]]
    engine.note("pages", {"computed": len(computed), "returned as computed": len(same)})
    engine.forget()
    with wrong_bytes([engine.host_bytes(each) for each in engine.stored()]):
        _ask_each(engine, "zeroed", prompts)
    engine.forget()
    more = [random_tokens(rng, 200) for _ in prompts]
    _ask_each(engine, "next turn", [p + m for p, m in zip(prompts, more, strict=True)])
    if engine.has_connector:
        engine.reset(is_host_too=True)


@cache
def accept_float32() -> None:
    """Let vLLM-Ascend serve quantized models in float32, too. Otherwise rounding hides pages.

    Static layers get the scales that they have in bfloat16.
    """
    import vllm_ascend.ops  # noqa: F401 (Release 0.23 cannot import the next module first.)

    name = f"{'configs.' if IS_SINCE_0_30 else ''}modelslim_config"
    kind = import_module(f"vllm_ascend.quantization.{name}").AscendModelSlimConfig
    own = kind.get_supported_act_dtypes

    def with_float32(cls: type) -> list[Any]:
        return [*own(), torch.float32]

    kind.get_supported_act_dtypes = classmethod(with_float32)
    methods: Any = import_module("vllm_ascend.quantization.methods")
    static = methods.AscendW8A8LinearMethod
    params_of = static.get_perchannel_param

    def as_in_bfloat16(self: Any, output_size: int, params_dtype: torch.dtype) -> dict[str, Any]:
        params: dict[str, Any] = params_of(self, output_size, params_dtype)
        if params_dtype == torch.float32:
            params["deq_scale"] = params_of(self, output_size, torch.bfloat16)["deq_scale"]
        return params

    static.get_perchannel_param = as_in_bfloat16


@cache
def compute_exactly() -> None:
    """Let attention compute in float64, so that an answer depends on its tokens alone.

    Products of 8-bit integers are exact. Without this, attention's result in float32 depends on
    how many queries are computed together, and then one rounding to 8 bits falls the other way.
    """
    from torch_npu.operators import attention

    attention.PRECISION = torch.float64


@cache
def read_rounded_keys() -> None:
    """Let attention with C8 read its pages in every step, also for a prompt's first tokens.

    Then an answer does not depend on where it resumes.
    """
    from vllm_ascend.attention.attention_v1 import AscendC8AttentionBackendImpl

    attention: Any = AscendC8AttentionBackendImpl
    compute = attention._forward_c8_chunked_prefill

    def compute_from_pages(self: Any, query: Any, *args: Any) -> Any:
        *_, metadata, output, layer = args
        return compute(self, query, None, None, metadata, output, layer)

    attention._forward_c8_chunked_prefill = compute_from_pages
    attention._forward_c8_fused_infer_attention = compute_from_pages


def _ask_each(engine: Engine, label: str, prompts: list[list[int]]) -> None:
    for prompt in prompts:
        engine.ask(label, [prompt], 8)
