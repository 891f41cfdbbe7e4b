# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vllm-ascend-kvext project
"""The rotary classes of vLLM-Ascend that are read like upstream's compute the same as upstream's.

The test reads their sources. With a stub of ``torch_npu``, these modules cannot be imported.
"""

from __future__ import annotations

import ast
import os
from pathlib import Path

import pytest

from vllm_ascend_kvext.segments.keys.rotary import ASCEND_READERS

_MAY_DEFINE = {"__init__", "forward_oot"}
"""The methods that a class may define. None of them computes angles."""


def class_of(name: str) -> ast.ClassDef:
    folder = os.environ.get("KVEXT_ASCEND_SOURCES")
    if folder is None:
        pytest.skip("KVEXT_ASCEND_SOURCES names no folder with vllm_ascend")
    module, _, class_name = name.rpartition(".")
    path = Path(folder, *module.split(".")).with_suffix(".py")
    (found,) = (
        node
        for node in ast.parse(path.read_text(encoding="utf-8")).body
        if isinstance(node, ast.ClassDef) and node.name == class_name
    )
    return found


@pytest.mark.parametrize("name", sorted(ASCEND_READERS))
def test_only_the_kernel_is_another(name: str) -> None:
    found = class_of(name)
    (base,) = (ast.unparse(each) for each in found.bases)
    assert name.endswith(f".Ascend{base}") or base == "YaRNScalingRotaryEmbedding"
    methods = {node.name: node for node in found.body if isinstance(node, ast.FunctionDef)}
    assert set(methods) == _MAY_DEFINE
    init = methods["__init__"]
    passed_on = [
        call
        for call in ast.walk(init)
        if isinstance(call, ast.Call) and ast.unparse(call.func) == "super().__init__"
    ]
    assert len(passed_on) == 1
    names = [argument.arg for argument in init.args.args[1:]]
    assert [ast.unparse(argument) for argument in passed_on[0].args] == names
