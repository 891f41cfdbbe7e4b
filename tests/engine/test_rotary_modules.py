# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vllm-ascend-kvext project
"""Every rotary class of the installed vLLM: keys are moved as the class would, or refused."""

from __future__ import annotations

import importlib
import pkgutil
from collections.abc import Iterable, Iterator
from dataclasses import replace
from functools import partial
from importlib.util import find_spec

import pytest
import torch
from vllm.config import CompilationConfig, VllmConfig, set_current_vllm_config
from vllm.model_executor.layers import rotary_embedding
from vllm.model_executor.layers.rotary_embedding import get_rope
from vllm.model_executor.layers.rotary_embedding.base import RotaryEmbedding
from vllm.model_executor.layers.rotary_embedding.common import ApplyRotaryEmb
from vllm.model_executor.layers.rotary_embedding.linear_scaling_rope import (
    LinearScalingRotaryEmbedding,
)

from vllm_ascend_kvext.errors import BlendingError
from vllm_ascend_kvext.segments.keys import rotation_check
from vllm_ascend_kvext.segments.keys.rotary import (
    READERS,
    REFUSED,
    RotarySignature,
    read_rotary_signature,
)
from vllm_ascend_kvext.segments.keys.rotation_check import check_rotation, positions_to_compare
from vllm_ascend_kvext.transfer.schema import PairStyle

HEAD = 128
POSITIONS = 4096
DTYPES = [torch.float32, torch.bfloat16, torch.float16]

YARN = {"factor": 4.0, "original_max_position_embeddings": POSITIONS // 4}
ROPES = {
    "base": {"rope_theta": 10_000.0},
    "base, Gemma 3's local layers": {"rope_theta": 10_000.0, "rope_type": "default"},
    "partial": {"rope_theta": 10_000.0, "partial_rotary_factor": 0.5},
    "partial, by width": {"rope_theta": 10_000.0, "rope_dim": 32},
    "linear, Gemma 3's global layers": {
        "rope_type": "linear",
        "rope_theta": 1_000_000.0,
        "factor": 8.0,
    },
    "Llama 3": {
        "rope_type": "llama3",
        "rope_theta": 500_000.0,
        "factor": 8.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 1024,
    },
    "NTK": {"rope_type": "ntk", "rope_theta": 10_000.0, "factor": 4.0},
    "NTK, mixed": {"rope_type": "ntk", "rope_theta": 10_000.0, "factor": 4.0, "mixed_b": 0.6},
    "YaRN": {"rope_type": "yarn", "rope_theta": 10_000.0, **YARN},
    "YaRN, gpt-oss": {
        "rope_type": "yarn",
        "rope_theta": 150_000.0,
        "factor": 32.0,
        "original_max_position_embeddings": 128,
        "beta_fast": 32.0,
        "beta_slow": 1.0,
        "truncate": False,
    },
    "YaRN, attention factor": {"rope_type": "yarn", **YARN, "attn_factor": 1.4},
    "DeepSeek": {"rope_type": "deepseek_yarn", **YARN, "mscale": 1.0, "mscale_all_dim": 1.0},
    "DeepSeek, attention factor": {"rope_type": "deepseek_yarn", **YARN, "mscale": 0.707},
    "Gemma 4": {"rope_type": "proportional", "rope_theta": 1e6, "partial_rotary_factor": 0.25},
    "Gemma 4, whole": {"rope_type": "proportional", "rope_theta": 1e6},
}
if find_spec(f"{rotary_embedding.__name__}.telechat3_scaling_rope"):  # vLLM 0.30 lacks it.
    ROPES["TeleChat 3"] = {"rope_type": "telechat3-yarn", **YARN}


@pytest.fixture(autouse=True, params=["none", "all"])
def current_config(request: pytest.FixtureRequest) -> Iterator[None]:
    """The config from which vLLM's modules choose plain torch or vLLM's own ops."""
    compilation = CompilationConfig(custom_ops=[request.param])
    with set_current_vllm_config(VllmConfig(compilation_config=compilation)):
        rotary_embedding._ROPE_DICT.clear()
        yield
    rotary_embedding._ROPE_DICT.clear()


def rope(
    name: str, dtype: torch.dtype = torch.float32, is_neox_style: bool = True
) -> RotaryEmbedding:
    return get_rope(HEAD, POSITIONS, is_neox_style, dict(ROPES[name]), dtype)


def classes_of_vllm() -> dict[str, type]:
    """Every module of torch that the package defines, by its full name."""
    found = {}
    for info in pkgutil.iter_modules(rotary_embedding.__path__):
        module = importlib.import_module(f"{rotary_embedding.__name__}.{info.name}")
        for item in vars(module).values():
            is_module = isinstance(item, type) and issubclass(item, torch.nn.Module)
            if is_module and item.__module__ == module.__name__:
                found[f"{item.__module__}.{item.__qualname__}"] = item
    return found


NOT_EMBEDDINGS = {f"{ApplyRotaryEmb.__module__}.{ApplyRotaryEmb.__qualname__}"}
"""A module that rotates by given angles."""


def installed(names: Iterable[str]) -> set[str]:
    """The names of the classes that this vLLM has. Each release has some classes of its own."""
    return {name for name in names if find_spec(name.rpartition(".")[0])}


def test_every_class_is_read_or_refused() -> None:
    assert set(classes_of_vllm()) == installed(READERS) | installed(REFUSED) | NOT_EMBEDDINGS
    assert not set(READERS) & set(REFUSED)


def test_every_class_that_is_read_is_checked_below() -> None:
    checked = {type(rope(name)) for name in ROPES}
    assert {f"{cls.__module__}.{cls.__qualname__}" for cls in checked} == installed(READERS)


@pytest.mark.parametrize("name", sorted(installed(REFUSED)))
def test_the_other_classes_are_refused_with_the_reason(name: str) -> None:
    cls = classes_of_vllm()[name]
    # Some classes cannot be built without an accelerator, but the class alone decides.
    with pytest.raises(BlendingError) as caught:
        read_rotary_signature(cls.__new__(cls), torch.bfloat16)
    assert str(caught.value).startswith(
        f"{name}: expected an embedding that turns keys by one angle"
    )
    assert f"found that {REFUSED[name]}. Serve this model without segments." in str(caught.value)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("is_neox_style", [True, False])
@pytest.mark.parametrize("name", ROPES)
def test_keys_are_moved_as_the_module_would(name: str, is_neox_style: bool, dtype) -> None:
    module = rope(name, dtype, is_neox_style)
    signature = read_rotary_signature(module, dtype)
    assert signature.pair_style == (PairStyle.HALVES if is_neox_style else PairStyle.NEIGHBOURS)
    check_rotation(module, signature)


@pytest.mark.parametrize("dtype", DTYPES[:2], ids=str)
def test_the_rotated_part_of_a_latent_is_moved(dtype: torch.dtype) -> None:
    """The module knows only 64 elements of an MLA row. They lie behind 512 others."""
    module = get_rope(64, POSITIONS, False, dict(ROPES["DeepSeek, attention factor"]), dtype)
    signature = read_rotary_signature(module, dtype, head_elements=576, offset_elements=512)
    assert signature.rotary_elements == 64
    check_rotation(module, signature)


def wrong_signatures(module: RotaryEmbedding, dtype: torch.dtype) -> list[RotarySignature]:
    """The frequencies that a wrong reader would return."""
    right = read_rotary_signature(module, dtype)
    num_pairs = len(right.frequencies)
    not_scaled = tuple(10_000.0 ** (-i / num_pairs) for i in range(num_pairs))
    return [
        replace(right, frequencies=(0.0,) * num_pairs),
        replace(right, pair_style=PairStyle(1 - right.pair_style)),
        replace(right, frequencies=not_scaled),
        replace(right, frequencies=right.frequencies[: num_pairs // 2]),
        replace(right, frequencies=right.frequencies[::-1]),
    ]


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("name", ["Llama 3", "YaRN", "linear, Gemma 3's global layers", "Gemma 4"])
def test_a_wrong_signature_is_found(name: str, dtype: torch.dtype) -> None:
    module = rope(name, dtype)
    for wrong in wrong_signatures(module, dtype):
        with pytest.raises(BlendingError, match="expected"):
            check_rotation(module, wrong)


def _off_by_one(module, right, rows, signature, dtype, shifts):
    return right(rows, signature, dtype, [shift + 1 for shift in shifts])


def _factor_again(module, right, rows, signature, *others):
    """Stored keys have the attention factor. A difference between positions has none."""
    moved = right(rows, signature, *others)
    moved[..., : signature.rotary_elements] *= module.mscale
    return moved


def _one_other(module, right, *others):
    moved = right(*others)
    moved[-1, -1, -1, -1] += 1
    return moved


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(
    ("wrong", "name", "message"),
    [
        (_off_by_one, "base", "moved from position 0 to 1, pair "),
        (_factor_again, "YaRN", "expected the module's own within"),
        (_factor_again, "YaRN, attention factor", "expected the module's own within"),
        (_factor_again, "DeepSeek, attention factor", "expected the module's own within"),
        (_one_other, "partial", "elements outside the rotated part"),
    ],
)
def test_keys_that_are_moved_wrongly_are_found(monkeypatch, wrong, name, message, dtype) -> None:
    module = rope(name, dtype)
    monkeypatch.setattr(rotation_check, "_moved", partial(wrong, module, rotation_check._moved))
    with pytest.raises(BlendingError, match=message):
        check_rotation(module, read_rotary_signature(module, dtype))


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_the_module_is_left_as_it_was(dtype: torch.dtype) -> None:
    """Bfloat16 keys make vLLM round the module's table, and vLLM does not restore it."""
    module = rope("base", dtype)
    table, bits = module.cos_sin_cache, module.cos_sin_cache.clone()
    for row in DTYPES:
        check_rotation(module, read_rotary_signature(module, row))
    assert module.cos_sin_cache is table
    assert torch.equal(module.cos_sin_cache, bits)


@pytest.mark.parametrize("num_positions", [2, 3, 10, 1000, 131_072, 1_048_576])
def test_modules_of_any_length_are_checked(num_positions: int) -> None:
    moves = positions_to_compare(num_positions)
    assert moves and all(old != new for old, new in moves)
    assert {position for move in moves for position in move} <= set(range(num_positions))
    module = get_rope(16, num_positions, True, {"rope_theta": 10_000.0}, torch.bfloat16)
    check_rotation(module, read_rotary_signature(module, torch.bfloat16))


@pytest.mark.parametrize("num_positions", [0, 1])
def test_a_module_without_positions_is_refused(num_positions: int) -> None:
    with pytest.raises(BlendingError, match=f"expected at least 2, found {num_positions}"):
        positions_to_compare(num_positions)


def test_several_scaling_factors_are_refused() -> None:
    module = LinearScalingRotaryEmbedding(64, 64, 128, 10_000.0, True, [1.0, 4.0], torch.float32)
    with pytest.raises(BlendingError, match=r"expected one scaling factor, found \[1.0, 4.0\]"):
        read_rotary_signature(module, torch.float32)


@pytest.mark.parametrize("dtype", [torch.int8, torch.uint8, torch.float8_e4m3fn, torch.float64])
def test_keys_of_other_types_are_refused(dtype: torch.dtype) -> None:
    found = str(dtype).removeprefix("torch.")
    with pytest.raises(BlendingError, match=f"float32, bfloat16 or float16, found {found}: quanti"):
        read_rotary_signature(rope("base"), dtype)


def test_a_module_whose_frequencies_do_not_fit_is_refused(monkeypatch) -> None:
    module = rope("partial")
    monkeypatch.setattr(module, "rotary_dim", module.rotary_dim + 2)
    monkeypatch.setattr(type(module), "_compute_inv_freq", lambda self, base: torch.ones(3))
    with pytest.raises(BlendingError, match="rotated elements of 128, found 3 frequencies"):
        read_rotary_signature(module, torch.float32)
