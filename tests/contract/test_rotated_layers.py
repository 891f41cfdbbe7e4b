# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vllm-ascend-kvext project
"""Which models of the installed vLLM rotate the keys of only some layers. They are refused.

The tests read their sources. They look for calls of a rotary module under a condition.
"""

from __future__ import annotations

import ast
from collections.abc import Iterator

import pytest

from vllm_ascend_kvext.compat import package_folder
from vllm_ascend_kvext.segments.keys.attention_keys import SOMETIMES_ROTATED

_MODELS = "vllm.model_executor.models"

NO_MODULE_WHERE_NOT_ROTATED = {
    f"{_MODELS}.baichuan.BaiChuanAttention",
    f"{_MODELS}.cohere_compass.CohereCompassAttention",
    f"{_MODELS}.falcon.FalconAttention",
    f"{_MODELS}.granite.GraniteAttention",
    f"{_MODELS}.granitemoe.GraniteMoeAttention",
    f"{_MODELS}.granitemoehybrid.GraniteMoeHybridAttention",
    f"{_MODELS}.llama4.Llama4Attention",
    f"{_MODELS}.muse_glimmer.MuseGlimmerAttention",
    f"{_MODELS}.zamba2.Zamba2Attention",
    "vllm.model_executor.layers.mla.MultiHeadLatentAttentionWrapper",
}
"""The module is made under the same condition, or is None. If not made, it is not found."""

HARMLESS = {
    # These layers use the pages of another layer.
    f"{_MODELS}.gemma3n.Gemma3nAttention",
    f"{_MODELS}.gemma4.Gemma4Attention",
    # The model's attention modules are in a list, so no rotary module is beside them.
    f"{_MODELS}.iquest_loopcoder.LoopCoderAttention",
    # This layer has recurrent states.
    f"{_MODELS}.bailing_moe_linear.BailingMoELinearAttention",
    # A kernel rotates keys that the module does not rotate, from the module's own table.
    f"{_MODELS}.hy_v3.HYV3Attention",
    # This is an image encoder.
    f"{_MODELS}.keye.KeyeSiglipEncoder",
}

_OTHER_MODULES = ("model_executor/layers/mla.py",)


def conditional_rotations(node: ast.AST, owner: str, is_conditional: bool) -> Iterator[str]:
    """The classes that call a rotary module of their own under a condition."""
    if isinstance(node, ast.Call) and is_conditional and _is_rotation(node):
        yield owner
    for name, field in ast.iter_fields(node):
        below = is_conditional or (isinstance(node, (ast.If, ast.IfExp)) and name != "test")
        for child in field if isinstance(field, list) else [field]:
            if isinstance(child, ast.ClassDef):
                yield from conditional_rotations(child, child.name, False)
            elif isinstance(child, ast.FunctionDef):
                yield from conditional_rotations(child, owner, False)
            elif isinstance(child, ast.AST):
                yield from conditional_rotations(child, owner, below)


def _is_rotation(call: ast.Call) -> bool:
    return ast.unparse(call.func) == "self.rotary_emb"


def test_a_condition_is_seen() -> None:
    source = """
class Always:
    def forward(self): return self.rotary_emb(1)
class Sometimes:
    def forward(self):
        if self.sliding_window:
            q, k = self.rotary_emb(1)
class InOneLine:
    def forward(self): return self.rotary_emb(1) if self.sliding_window else 0
"""
    assert list(conditional_rotations(ast.parse(source), "", False)) == ["Sometimes", "InOneLine"]


def test_models_that_leave_some_layers_unrotated_are_known() -> None:
    folder = package_folder("vllm")
    if folder is None:
        pytest.skip("vLLM is not installed")
    found = set()
    paths = [*(folder / "model_executor/models").rglob("*.py"), *_OTHER_MODULES]
    for path in paths:
        path = folder / path
        module = ".".join(path.relative_to(folder.parent).with_suffix("").parts)
        tree = ast.parse(path.read_text(encoding="utf-8"))
        found |= {f"{module}.{owner}" for owner in conditional_rotations(tree, "", False)}
    assert len(found) > 10
    assert found <= SOMETIMES_ROTATED | NO_MODULE_WHERE_NOT_ROTATED | HARMLESS
    assert SOMETIMES_ROTATED & found, "this version has none of the known calls under a condition"
