# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vllm-ascend-kvext project
"""From a model's modules to how the keys of its layers turn, and what is refused."""

from __future__ import annotations

import gc
from typing import Any

import pytest

torch = pytest.importorskip("torch")

from support.connector.row_pages import (  # noqa: E402
    HEAD,
    HEADS,
    RotaryEmbedding,
    attention,
    attention_of,
    small_model,
)

from vllm_ascend_kvext import loaded_models  # noqa: E402
from vllm_ascend_kvext.errors import BlendingError  # noqa: E402
from vllm_ascend_kvext.segments.keys import attention_keys  # noqa: E402
from vllm_ascend_kvext.segments.keys.attention_keys import LayerKeys, read_layer_keys  # noqa: E402


def read(model: Any, modules: dict[str, Any] | None = None) -> dict[str, LayerKeys]:
    modules = attention_of(model) if modules is None else modules
    return read_layer_keys(model, modules, dict.fromkeys(modules, torch.float32))


def test_each_layer_has_the_rotation_of_the_module_beside_it() -> None:
    near, far = RotaryEmbedding(10_000.0), RotaryEmbedding(1_000_000.0)
    model = small_model(near, far, near)
    modules = dict(reversed(attention_of(model).items()))
    found = read(model, modules)
    assert list(found) == [f"model.layers.{i}.self_attn.attn" for i in range(3)], "in their order"
    first, second, third = found.values()
    assert first == third != second
    assert first.signature.frequencies == pytest.approx(
        [10_000.0 ** (-2 * i / HEAD) for i in range(HEAD // 2)]
    )
    assert second.signature.frequencies[1] == pytest.approx(1_000_000.0 ** (-2 / HEAD))
    assert first.num_heads == HEADS and first.has_values and first.window_tokens == 0


def test_a_module_is_compared_once(monkeypatch: pytest.MonkeyPatch) -> None:
    compared = []
    monkeypatch.setattr(
        attention_keys, "check_rotation", lambda module, signature: compared.append(module)
    )
    near, far = RotaryEmbedding(10_000.0), RotaryEmbedding(1_000_000.0)
    read(small_model(near, near, far, near))
    assert [id(module) for module in compared] == [id(near), id(far)]


def test_a_module_that_does_otherwise_is_refused() -> None:
    module = RotaryEmbedding()
    module.cos_sin_cache[1:] = module.cos_sin_cache[:-1].clone()
    with pytest.raises(BlendingError, match="expected the module's own within"):
        read(small_model(module))


def test_a_layer_without_pages_of_its_own_is_left_out() -> None:
    model = small_model(RotaryEmbedding(), None)
    model.layers[1].self_attn.attn.kv_sharing_target_layer_name = "model.layers.0.self_attn.attn"
    assert list(read(model)) == ["model.layers.0.self_attn.attn"]


def test_of_a_latent_the_part_behind_it_turns() -> None:
    rank = 40
    model = small_model(RotaryEmbedding(), kv_lora_rank=rank, qk_rope_head_dim=HEAD)
    (found,) = read(model).values()
    assert (found.num_heads, found.has_values) == (1, False)
    signature = found.signature
    assert (signature.head_elements, signature.offset_elements) == (rank + HEAD, rank)
    assert signature.rotary_elements == HEAD


_VLLM = "vllm.model_executor"


def named(module: str, name: str, *bases: type) -> type:
    """A class with the name of a vLLM class, and nothing more of it."""
    return type(name, bases or (torch.nn.Module,), {"__module__": module})


def model_with_two_rotations() -> Any:
    model = small_model(RotaryEmbedding())
    model.layers[0].self_attn.other = RotaryEmbedding()
    return model


def model_that_rotates_some_layers() -> Any:
    model = small_model(RotaryEmbedding())
    inner = model.layers[0].self_attn
    outer = named(f"{_VLLM}.models.exaone4", "Exaone4Attention")()
    outer.attn, outer.rotary_emb = inner.attn, inner.rotary_emb
    model.layers[0].self_attn = outer
    return model


@pytest.mark.parametrize(
    ("make_model", "message"),
    [
        (
            lambda: small_model(RotaryEmbedding(), None),
            r"layers.1.self_attn.attn: expected one rotary module beside the .*found none: keys of "
            "this layer are not rotated, or elsewhere. Serve this model without",
        ),
        (model_with_two_rotations, r"found RotaryEmbedding, RotaryEmbedding\. Serve"),
        (
            lambda: small_model(named("some.model", "Mine", RotaryEmbedding)()),
            r"Mine: expected one of .*, found a class whose",
        ),
        (
            lambda: small_model(
                named(f"{_VLLM}.layers.rotary_embedding.mrope", "MRotaryEmbedding")()
            ),
            "found that a token has several positions",
        ),
        (model_that_rotates_some_layers, "Exaone4Attention, which does not in some of them"),
    ],
    ids=["none", "two", "subclass", "does not turn", "some layers"],
)
def test_what_cannot_be_moved_is_refused_with_the_reason(make_model, message: str) -> None:
    with pytest.raises(BlendingError, match=message):
        read(make_model())


def test_one_module_under_two_names_is_one() -> None:
    model = small_model(RotaryEmbedding())
    model.layers[0].self_attn.other = model.layers[0].self_attn.rotary_emb
    assert len(read(model)) == 1


def test_a_layer_of_another_model_is_refused() -> None:
    model = small_model(RotaryEmbedding())
    with pytest.raises(BlendingError, match=r"draft\.attn: expected a part of Module, found"):
        read(model, attention_of(model) | {"draft.attn": attention()})


def test_the_model_of_a_layer_is_known_as_long_as_it_lives() -> None:
    loaded_models.forget_all()
    try:
        model, draft = small_model(RotaryEmbedding()), small_model(RotaryEmbedding())
        mine, theirs = model.layers[0].self_attn.attn, draft.layers[0].self_attn.attn
        assert loaded_models.model_with(mine) is None
        for loaded in (model, draft, model):
            loaded_models.remember(loaded)
        assert loaded_models.model_with(mine) is model
        assert loaded_models.model_with(theirs) is draft
        assert loaded_models.model_with(attention()) is None
        del draft, loaded
        gc.collect()
        assert loaded_models.model_with(theirs) is None
        assert loaded_models.model_with(mine) is model
    finally:
        loaded_models.forget_all()
