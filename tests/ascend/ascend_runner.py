# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vllm-ascend-kvext project
"""KV caches as vllm-ascend's own model runner allocates and shapes them, on a CPU.

``worker/model_runner_v1.py`` needs a device to import, but its methods that make KV caches do not.
They are taken out of its text, unchanged, and compiled into a runner with the attributes that they
read. This module knows no layout of this package. vllm-ascend must be active (see ``conftest.py``).
"""

from __future__ import annotations
import __future__

import ast
import contextlib
import importlib
import math
from collections.abc import Iterable, Iterator
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy
import torch
import vllm_ascend
from vllm import envs
from vllm.v1.kv_cache_interface import AttentionSpec, KVCacheConfig, MLAAttentionSpec
from vllm_ascend import utils

_METHODS = (
    "_get_layer_kv_cache_specs",
    "_align_memory",
    "_align_up",
    "_allocate_int8_cache_tensor",
    "_allocate_sparse_c8_indexer_tensors",
    "_allocate_kv_cache_tensors",
    "_adjust_kv_layout",
    "_reshape_kv_cache_tensors",
    "_is_c8_mxfp_kv_cache",
    "_uses_page_strided_kv_layout",
)

LATENT_DIM, ROPE_DIM, INDEX_DIM = 512, 64, 128


def attention_backend(module: str) -> type:
    """The shapes of the first backend in ``vllm_ascend/attention/<module>.py``."""
    for node in ast.walk(ast.parse(_text(f"attention/{module}.py"))):
        if isinstance(node, ast.FunctionDef) and node.name == "get_kv_cache_shape":
            made = _compiled([node], {"envs_vllm": envs})
            made.is_sparse = staticmethod(lambda: False)
            return made
    raise LookupError(f"{module}: no get_kv_cache_shape")


def kv_caches(
    config: KVCacheConfig,
    backend: type,
    *,
    has_connector: bool,
    is_compressed: bool = False,
    is_sparse: bool = False,
    device_type: str = "A3",
    has_paged_attention: bool = False,
    has_states: bool = False,
) -> dict[str, object]:
    """The tensors that the runner registers for a config.

    Args:
        config: The worker's config.
        backend: Gives the shapes.
        has_connector: With one, memory is aligned to 2 MiB, so that tensors begin within storages.
        is_compressed: DeepSeek-V4.
        is_sparse: DeepSeek sparse attention.
        device_type: A name of ``AscendDeviceType``.
        has_paged_attention: Whether full attention has all pages of K, then all of V. Without,
            vLLM-Ascend 0.30 has both in each page.
        has_states: Whether there are layers with recurrent states besides.
    """
    methods = _runner_methods()
    namespace = {
        **_imported_by_the_runner(methods),
        "math": math,
        "np": numpy,
        "torch": torch,
        "get_ascend_device_type": lambda: utils.AscendDeviceType[device_type],
        "get_current_hardware_profile": lambda: _hardware_profile(device_type),
        "get_layers_from_vllm_config": lambda *_: {},
        "enable_fa_quant": lambda *_: False,
        "requires_contiguous_pa_kv_cache": lambda *_: has_paged_attention,
    }
    made = _compiled(methods, namespace)

    class Runner(made):
        device = "cpu"
        runner_only_attn_layers = frozenset()
        vllm_config = SimpleNamespace(
            kv_transfer_config=SimpleNamespace(kv_connector=None) if has_connector else None,
            cache_config=SimpleNamespace(
                cache_dtype="auto", get_resolved_kv_cache_layout=partial(_layout_of, config)
            ),
        )
        model_config = SimpleNamespace(
            hf_text_config=SimpleNamespace(index_head_dim=INDEX_DIM, model_type="")
        )
        ascend_config = SimpleNamespace(
            kvpp_config=SimpleNamespace(size=1), xlite_graph_config=SimpleNamespace(enabled=False)
        )
        attn_backend = backend
        use_compress = is_compressed
        use_sparse = is_sparse
        use_hybrid_blocks = has_states
        use_dcp = sparse_kv_offload_enabled = False
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


def _imported_by_the_runner(methods: Iterable[ast.AST]) -> dict[str, Any]:
    """The names that these functions use, from the runner's imports; none needs a device."""
    named = {node.id for each in methods for node in ast.walk(each) if isinstance(node, ast.Name)}
    found = {}
    for node in ast.walk(ast.parse(_text("worker/model_runner_v1.py"))):
        if not isinstance(node, ast.ImportFrom) or node.level or not node.module:
            continue
        for alias in node.names:
            name = alias.asname or alias.name
            if name in named:
                with contextlib.suppress(ImportError, AttributeError, NotImplementedError):
                    found[name] = getattr(importlib.import_module(node.module), alias.name)
    return found


def _hardware_profile(device_type: str) -> Any:
    hardware_profile = importlib.import_module("vllm_ascend.device.hardware_profile")
    return hardware_profile.get_hardware_profile(utils.AscendDeviceType[device_type])


def _layout_of(config: KVCacheConfig) -> Any:
    from vllm.v1.kv_cache_layout import KVCacheLayout

    return KVCacheLayout[config.kv_cache_layout]


def _text(path: str) -> str:
    return (Path(vllm_ascend.__file__).parent / path).read_text()


def _compiled(functions: list[ast.FunctionDef], namespace: dict[str, object]) -> type:
    """A class that has these functions. Their annotations are not evaluated."""
    body = ast.ClassDef(
        name="Made", bases=[], keywords=[], body=functions, decorator_list=[], type_params=[]
    )
    module = ast.fix_missing_locations(ast.Module(body=[body], type_ignores=[]))
    flags = __future__.annotations.compiler_flag
    exec(compile(module, "vllm_ascend", "exec", flags=flags, dont_inherit=True), namespace)
    return namespace["Made"]
