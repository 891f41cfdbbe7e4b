# SPDX-License-Identifier: Apache-2.0
"""Equal where stored bytes can be exchanged, different where they cannot."""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace

import pytest
from pytest_mock import MockerFixture

from vllm_ascend_kvext.groups.model import GroupKind
from vllm_ascend_kvext.layout.fingerprint import layout_fingerprint, worker_fingerprint
from vllm_ascend_kvext.layout.model import (
    KVLayout,
    LayoutGroup,
    Plane,
    RegisteredStorage,
    StatePolicy,
)

PLANE = Plane("model.layers.0.attn", 0, 0, 4096, 0, 256, "bfloat16", False)
GROUP = LayoutGroup(0, GroupKind.WINDOW, 16, 1, 128, 0, (PLANE,))
LAYOUT = KVLayout((RegisteredStorage(4096, 1 << 20),), (GROUP,), 100, 1)
MODEL = {"name": "deepseek", "revision": "a1", "quantization": None}
PARALLEL = {"tensor": 8, "tensor_rank": 3}
FORMAT = dict(
    device_type="npu",
    attention_backends=("ASCEND_MLA",),
    instruction_set="",
    cache_dtype="bfloat16",
    conv_state_layout="SD",
    row_order="ND",
)


def fingerprint(layout: KVLayout = LAYOUT, **overrides: object) -> str:
    arguments = {"model": MODEL, "parallel": PARALLEL, "page_format": FORMAT, **overrides}
    return layout_fingerprint(layout, **arguments)


def with_group(**changes: object) -> KVLayout:
    return replace(LAYOUT, groups=(replace(GROUP, **changes),))


def with_plane(**changes: object) -> KVLayout:
    return with_group(planes=(replace(PLANE, **changes),))


@pytest.mark.parametrize(
    "layout",
    [
        pytest.param(replace(LAYOUT, num_pages=7), id="pages"),
        pytest.param(replace(LAYOUT, storages=(RegisteredStorage(8192, 1 << 21),)), id="address"),
        pytest.param(with_plane(storage=1), id="storage"),
        pytest.param(with_plane(base_bytes=64), id="base"),
        pytest.param(with_plane(page_stride_bytes=8192), id="padding"),
        pytest.param(with_plane(region_offset_bytes=64), id="region"),
    ],
)
def test_what_a_restart_may_change_does_not_count(layout: KVLayout) -> None:
    assert fingerprint(layout) == fingerprint()


DIFFERENT = {
    "layer": with_plane(layer_name="model.layers.1.attn"),
    "row bytes": with_plane(row_bytes=128),
    "dtype": with_plane(dtype="float16"),
    "more planes": with_group(planes=(PLANE, PLANE)),
    "kind": with_group(kind=GroupKind.STATE),
    "states": with_group(holds_states=True),
    "tokens per page": with_group(tokens_per_page=32),
    "tokens per row": with_group(tokens_per_row=2),
    "window": with_group(window_tokens=64),
    "restart": with_group(restart_tokens=64),
    "scheduler group": with_group(kv_cache_group_id=1),
    "more groups": replace(LAYOUT, groups=(GROUP, replace(GROUP, kv_cache_group_id=1))),
}


def test_every_difference_in_bytes_counts() -> None:
    found = {name: fingerprint(layout) for name, layout in DIFFERENT.items()}
    found |= {
        "same": fingerprint(),
        "model": fingerprint(model={**MODEL, "revision": "a2"}),
        "rank": fingerprint(parallel={**PARALLEL, "tensor_rank": 4}),
        "size": fingerprint(parallel={**PARALLEL, "tensor": 4}),
        "policy": fingerprint(states=StatePolicy.SKIP),
        "type": fingerprint(parallel={**PARALLEL, "tensor": "8"}),
        "packed": fingerprint(with_plane(is_packed=True)),
        "replicated": fingerprint(with_plane(is_replicated=True)),
        "axes": fingerprint(with_plane(axes=((1, 2), (2, 16)))),
        "ratio": fingerprint(with_group(compress_ratio=4)),
        "device": fingerprint(page_format=dict(FORMAT, device_type="cpu")),
        "backend": fingerprint(page_format=dict(FORMAT, attention_backends=("ASCEND",))),
        "instructions": fingerprint(page_format=dict(FORMAT, instruction_set="amx")),
        "fp8": fingerprint(page_format=dict(FORMAT, cache_dtype="fp8_e4m3")),
        "other fp8": fingerprint(page_format=dict(FORMAT, cache_dtype="fp8_e5m2")),
        "convolution": fingerprint(page_format=dict(FORMAT, conv_state_layout="DS")),
        "tiles": fingerprint(page_format=dict(FORMAT, row_order="NZ")),
    }
    assert len(set(found.values())) == len(found), found


def test_order_of_mappings_does_not_count() -> None:
    backwards = {
        "model": dict(reversed(MODEL.items())),
        "parallel": dict(reversed(PARALLEL.items())),
    }
    assert fingerprint(**backwards) == fingerprint()


@pytest.mark.parametrize(
    ("cache_dtype", "environ", "changes"),
    [
        ("auto", {}, {}),
        ("fp8_e5m2", {}, {"cache_dtype": "fp8_e5m2"}),
        ("auto", {"VLLM_SSM_CONV_STATE_LAYOUT": "DS"}, {"conv_state_layout": "DS"}),
    ],
)
def test_a_page_format_says_number_format_and_state_layout(
    mocker: MockerFixture, cache_dtype: str, environ: dict[str, str], changes: dict[str, str]
) -> None:
    made = mocker.patch("vllm_ascend_kvext.layout.fingerprint.layout_fingerprint")
    layers = {
        name: SimpleNamespace(
            get_attn_backend=lambda name=name: SimpleNamespace(get_name=lambda: name)
        )
        for name in ("MAMBA", "CPU_ATTN", "NOT_REGISTERED")
    }
    worker_fingerprint(
        SimpleNamespace(
            cache_config=SimpleNamespace(cache_dtype=cache_dtype),
            model_config=SimpleNamespace(model="m", dtype="torch.bfloat16"),
            parallel_config=SimpleNamespace(tensor_parallel_size=1, rank=0),
            compilation_config=SimpleNamespace(static_forward_context=layers),
        ),
        LAYOUT,
        layer_names=["MAMBA", "CPU_ATTN", "without a layer"],
        has_nz_pages=True,
        device_type="cpu",
        instruction_set="amx",
        states=StatePolicy.EXACT,
        environ=environ,
    )
    assert made.call_args.kwargs["page_format"] == {
        "device_type": "cpu",
        "attention_backends": ["CPU_ATTN", "MAMBA"],
        "instruction_set": "amx",
        "cache_dtype": "bfloat16",
        "conv_state_layout": "SD",
        "row_order": "NZ",
        **changes,
    }


def test_a_fixed_layout_has_a_fixed_fingerprint() -> None:
    """In every process and version: stored KV must be found again. Else raise ``FORMAT``."""
    assert fingerprint() == EXPECTED


EXPECTED = "84a2610939edaadb2855ce7e5fac2becd59b9e1043270124d6cb19586545e1af"
