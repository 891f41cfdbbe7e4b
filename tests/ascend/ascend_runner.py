# SPDX-License-Identifier: Apache-2.0
"""KV caches as vllm-ascend's own model runner allocates and shapes them, on a CPU.

``worker/model_runner_v1.py`` needs a device to import. The methods that make KV caches do not: they
are taken out of its text, unchanged, and compiled into a runner that has what they read. Knows no
layout of ours. vllm-ascend must be active (see ``conftest.py``).
"""

from __future__ import annotations
import __future__

import ast
import math
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace

import torch
import vllm_ascend
from vllm.utils.torch_utils import get_dtype_size
from vllm.v1 import kv_cache_interface
from vllm.v1.kv_cache_interface import AttentionSpec, KVCacheConfig, MLAAttentionSpec
from vllm_ascend import utils
from vllm_ascend.core import kv_cache_interface as ascend_kv_cache_interface

_METHODS = (
    "_get_layer_kv_cache_specs",
    "_align_memory",
    "_align_up",
    "_allocate_int8_cache_tensor",
    "_allocate_sparse_c8_indexer_tensors",
    "_allocate_kv_cache_tensors",
    "_adjust_kv_layout",
    "_reshape_kv_cache_tensors",
)

LATENT_DIM, ROPE_DIM, INDEX_DIM = 512, 64, 128


def attention_backend(module: str) -> type:
    """The shapes of the first backend in ``vllm_ascend/attention/<module>.py``."""
    for node in ast.walk(ast.parse(_text(f"attention/{module}.py"))):
        if isinstance(node, ast.FunctionDef) and node.name == "get_kv_cache_shape":
            return _compiled([node], {})
    raise LookupError(f"{module}: no get_kv_cache_shape")


def kv_caches(
    config: KVCacheConfig,
    backend: type,
    *,
    has_connector: bool,
    is_compressed: bool = False,
    is_sparse: bool = False,
    device_type: str = "A3",
) -> dict[str, object]:
    """The tensors that the runner registers for a config.

    Args:
        config: Of the worker.
        backend: Gives the shapes.
        has_connector: With one, memory is aligned to 2 MiB, so that tensors begin within storages.
        is_compressed: DeepSeek-V4.
        is_sparse: DeepSeek sparse attention.
        device_type: A name of ``AscendDeviceType``.
    """
    namespace = {
        **vars(utils),
        **vars(kv_cache_interface),
        **vars(ascend_kv_cache_interface),
        "math": math,
        "get_dtype_size": get_dtype_size,
        "get_ascend_device_type": lambda: utils.AscendDeviceType[device_type],
        "enable_fa_quant": lambda *_: False,
    }
    made = _compiled(_runner_methods(), namespace)

    class Runner(made):
        device = "cpu"
        runner_only_attn_layers = frozenset()
        vllm_config = SimpleNamespace(kv_transfer_config=object() if has_connector else None)
        model_config = SimpleNamespace(hf_text_config=SimpleNamespace(index_head_dim=INDEX_DIM))
        attn_backend = backend
        use_compress = is_compressed
        use_sparse = is_sparse
        use_hybrid_blocks = False
        c8_k_cache_dtype = torch.int8
        c8_k_scale_cache_dtype = torch.float16

        def _get_attention_kv_cache_dims(self, _name: str, spec: AttentionSpec) -> tuple[int, int]:
            if isinstance(spec, MLAAttentionSpec):
                return LATENT_DIM, ROPE_DIM
            return spec.head_size, spec.head_size

        def _kv_cache_spec_attn_group_iterator(self) -> Iterator[SimpleNamespace]:
            for group in config.kv_cache_groups:
                yield SimpleNamespace(
                    backend=backend,
                    layer_names=group.layer_names,
                    kv_cache_spec=group.kv_cache_spec,
                )

    runner = Runner()
    return runner._reshape_kv_cache_tensors(config, runner._allocate_kv_cache_tensors(config))


def _runner_methods() -> list[ast.FunctionDef]:
    nodes = ast.walk(ast.parse(_text("worker/model_runner_v1.py")))
    return [node for node in nodes if isinstance(node, ast.FunctionDef) and node.name in _METHODS]


def _text(path: str) -> str:
    return (Path(vllm_ascend.__file__).parent / path).read_text()


def _compiled(functions: list[ast.FunctionDef], namespace: dict[str, object]) -> type:
    """A class that has these functions; their annotations are not looked up."""
    body = ast.ClassDef(
        name="Made", bases=[], keywords=[], body=functions, decorator_list=[], type_params=[]
    )
    module = ast.fix_missing_locations(ast.Module(body=[body], type_ignores=[]))
    flags = __future__.annotations.compiler_flag
    exec(compile(module, "vllm_ascend", "exec", flags=flags, dont_inherit=True), namespace)
    return namespace["Made"]
