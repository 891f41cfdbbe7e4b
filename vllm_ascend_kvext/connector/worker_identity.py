# SPDX-License-Identifier: Apache-2.0
"""What a worker's pages are written by: the part of its fingerprint that no layout says.

Reads vLLM's configuration by its attributes; imports nothing of vLLM.
"""

from __future__ import annotations

import os
from collections.abc import Collection
from typing import Any

from vllm_ascend_kvext.connector.errors import ConnectorError
from vllm_ascend_kvext.layout.fingerprint import layout_fingerprint
from vllm_ascend_kvext.layout.model import KVLayout, StatePolicy
from vllm_ascend_kvext.layout.page_format import read_page_format
from vllm_ascend_kvext.layout.worker_config import WorkerConfig


def require_one_stage(vllm_config: Any) -> None:
    """Refuse pipeline parallelism: every stage would have groups and chunk sizes of its own.

    Raises:
        ConnectorError: With ``pipeline_parallel_size`` above 1.
    """
    num_stages = int(vllm_config.parallel_config.pipeline_parallel_size)
    if num_stages != 1:
        raise ConnectorError(
            f"pipeline parallelism: found pipeline_parallel_size {num_stages}, expected 1: the "
            "workers of different stages hold different layers, and the connector plans one "
            "layout for all of them; use tensor parallelism instead, or start without the connector"
        )


def worker_fingerprint(
    vllm_config: Any,
    layout: KVLayout,
    worker: WorkerConfig,
    *,
    layer_names: Collection[str],
    device_type: str,
    instruction_set: str,
    states: StatePolicy,
) -> str:
    """The fingerprint of a worker's layout, as 64 hexadecimal digits.

    Args:
        vllm_config: vLLM's ``VllmConfig``, as the worker has it.
        layout: Of its pages.
        worker: As its layout was built with.
        layer_names: As registered.
        device_type: Of the registered tensors.
        instruction_set: For which CPU kernels order a page; empty on devices.
        states: What becomes of state groups.
    """
    model = vllm_config.model_config
    speculative = getattr(vllm_config, "speculative_config", None)
    parallel = vllm_config.parallel_config
    tensor_parallel_size = int(parallel.tensor_parallel_size)
    return layout_fingerprint(
        layout,
        model={
            "name": str(model.model),
            "revision": _text_or_none(getattr(model, "revision", None)),
            "quantization": _text_or_none(getattr(model, "quantization", None)),
            # Its layers have pages too.
            "draft": _text_or_none(getattr(speculative, "model", None)),
        },
        parallel={
            "tensor_parallel_size": tensor_parallel_size,
            # With one stage the ranks of an engine are those of tensor parallelism. Data parallel
            # engines are equal.
            "tensor_parallel_rank": int(parallel.rank) % tensor_parallel_size,
            "pipeline_parallel_size": int(parallel.pipeline_parallel_size),
            "context_parallel_size": worker.context_parallel_size,
        },
        page_format=read_page_format(
            vllm_config,
            device_type=device_type,
            attention_backends=_attention_backends(vllm_config, layer_names),
            instruction_set=instruction_set,
            has_nz_pages=any(map(worker.has_nz_pages, layer_names)),
            environ=os.environ,
        ),
        states=states,
    )


def _attention_backends(vllm_config: Any, layer_names: Collection[str]) -> set[str]:
    """Of the registered layers; as ``get_current_attn_backends`` of vLLM's connectors finds them.

    A layer that vLLM does not list there is left out.
    """
    layers = vllm_config.compilation_config.static_forward_context
    return {
        str(layers[name].get_attn_backend().get_name()) for name in layer_names if name in layers
    }


def _text_or_none(value: object) -> str | None:
    return None if value is None else str(value)
