# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vllm-ascend-kvext project
"""What the batched-DMA backends and the layout take for granted in upstream's sources."""

from __future__ import annotations

import ast
import os
from pathlib import Path

import pytest

from vllm_ascend_kvext.commands.fingerprint import installed_trees
from vllm_ascend_kvext.compat import VLLM


def vllm_module(*names: str) -> ast.Module:
    trees = [tree for tree in installed_trees() if tree.distribution == VLLM]
    if not trees:
        pytest.skip("vLLM is not installed")
    path = Path(trees[0].root, "vllm", *names).with_suffix(".py")
    return ast.parse(path.read_text(encoding="utf-8"))


def function_of(module: ast.AST, name: str) -> ast.FunctionDef:
    (found,) = (
        node for node in ast.walk(module) if isinstance(node, ast.FunctionDef) and node.name == name
    )
    return found


def test_the_operator_of_vllm_takes_pointers_sizes_and_the_order_of_reads() -> None:
    function = function_of(vllm_module("_custom_ops"), "swap_blocks_batch")
    names = [argument.arg for argument in function.args.args]
    assert names == ["src_ptrs", "dst_ptrs", "sizes", "is_src_access_order_any"]
    assert [ast.unparse(default) for default in function.args.defaults] == ["False"]
    calls = [ast.unparse(node) for node in ast.walk(function) if isinstance(node, ast.Call)]
    assert f"torch.ops._C_cache_ops.swap_blocks_batch({', '.join(names)})" in calls


def test_the_operator_of_vllm_ascend_takes_the_direction() -> None:
    folder = os.environ.get("KVEXT_ASCEND_SOURCES")
    if folder is None:
        pytest.skip("KVEXT_ASCEND_SOURCES names no folder with vllm_ascend")
    calls = [
        node
        for path in sorted(Path(folder, "vllm_ascend").rglob("*.py"))
        if "swap_blocks_batch" in (text := path.read_text(encoding="utf-8"))
        for node in ast.walk(ast.parse(text))
        if isinstance(node, ast.Call)
        and ast.unparse(node.func) == "torch.ops._C_ascend.swap_blocks_batch"
    ]
    assert calls and all(len(call.args) == 4 for call in calls)


def test_the_first_forward_sets_the_scales_of_all_pages() -> None:
    """This is why the layout refuses scales per token and head."""
    module = vllm_module("v1", "attention", "backends", "triton_attn")
    function = ast.unparse(function_of(module, "_ensure_scale_caches"))
    assert "self._k_scale_cache.fill_(1.0)" in function
    assert "self._v_scale_cache.fill_(1.0)" in function
