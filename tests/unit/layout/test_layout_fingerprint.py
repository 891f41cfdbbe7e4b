# SPDX-License-Identifier: Apache-2.0
"""Equal where stored bytes can be exchanged, different where they cannot."""

from __future__ import annotations

import os
import subprocess
import sys
from dataclasses import dataclass, replace

import pytest

from vllm_ascend_kvext.groups.model import GroupKind
from vllm_ascend_kvext.layout.errors import LayoutError
from vllm_ascend_kvext.layout.fingerprint import layout_fingerprint
from vllm_ascend_kvext.layout.model import (
    KVLayout,
    LayoutGroup,
    Plane,
    RegisteredStorage,
    StatePolicy,
)
from vllm_ascend_kvext.layout.page_format import PageFormat, read_page_format

PLANE = Plane("model.layers.0.attn", 0, 0, 4096, 0, 256, "bfloat16", False)
GROUP = LayoutGroup(0, GroupKind.WINDOW, 16, 1, 128, 0, (PLANE,))
LAYOUT = KVLayout((RegisteredStorage(4096, 1 << 20),), (GROUP,), 100, 1)
MODEL = {"name": "deepseek", "revision": "a1", "quantization": None}
PARALLEL = {"tensor": 8, "tensor_rank": 3}
FORMAT = PageFormat(
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
    "scheduler group": with_group(scheduler_group=1),
    "more groups": replace(LAYOUT, groups=(GROUP, replace(GROUP, scheduler_group=1))),
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
        "device": fingerprint(page_format=replace(FORMAT, device_type="cpu")),
        "backend": fingerprint(page_format=replace(FORMAT, attention_backends=("ASCEND",))),
        "instructions": fingerprint(page_format=replace(FORMAT, instruction_set="amx")),
        "fp8": fingerprint(page_format=replace(FORMAT, cache_dtype="fp8_e4m3")),
        "other fp8": fingerprint(page_format=replace(FORMAT, cache_dtype="fp8_e5m2")),
        "convolution": fingerprint(page_format=replace(FORMAT, conv_state_layout="DS")),
        "tiles": fingerprint(page_format=replace(FORMAT, row_order="NZ")),
    }
    assert len(set(found.values())) == len(found), found


def test_order_of_mappings_does_not_count() -> None:
    backwards = {
        "model": dict(reversed(MODEL.items())),
        "parallel": dict(reversed(PARALLEL.items())),
    }
    assert fingerprint(**backwards) == fingerprint()


@dataclass(frozen=True)
class CacheConfig:
    cache_dtype: str


@dataclass(frozen=True)
class ModelConfig:
    dtype: str


@dataclass(frozen=True)
class VllmConfig:
    cache_config: CacheConfig
    model_config: ModelConfig = ModelConfig("torch.bfloat16")


def read(cache_dtype: str = "auto", environ: dict[str, str] | None = None) -> PageFormat:
    return read_page_format(
        VllmConfig(CacheConfig(cache_dtype)),
        device_type="cpu",
        attention_backends=["CPU_ATTN", "MAMBA", "CPU_ATTN"],
        instruction_set="amx",
        has_nz_pages=False,
        environ=environ or {},
    )


def test_a_page_format_says_number_format_and_state_layout() -> None:
    assert read() == PageFormat("cpu", ("CPU_ATTN", "MAMBA"), "amx", "bfloat16", "SD", "ND")
    assert read("fp8_e5m2").cache_dtype == "fp8_e5m2"
    in_ds = read(environ={"VLLM_SSM_CONV_STATE_LAYOUT": "DS"})
    assert in_ds == replace(read(), conv_state_layout="DS")


def test_a_fixed_layout_has_a_fixed_fingerprint() -> None:
    """In every process and version: stored KV must be found again. Else raise ``FORMAT``."""
    assert fingerprint() == EXPECTED


def test_another_process_finds_the_same() -> None:
    code = f"import sys; sys.path[:0] = {sys.path!r}\nimport {__name__} as it\n"
    code += "print(it.fingerprint())"
    found = subprocess.run(
        [sys.executable, "-c", code],
        env={**os.environ, "PYTHONHASHSEED": "7", "PYTHONPATH": os.path.dirname(__file__)},
        check=True,
        capture_output=True,
        text=True,
    )
    assert found.stdout.strip() == fingerprint()


@pytest.mark.parametrize("value", [{1: "a"}, {"a": object()}, {"a": float("nan")}, {"a": {2: 3}}])
def test_what_has_no_canonical_text_is_refused(value: dict) -> None:
    with pytest.raises(LayoutError, match="fingerprint"):
        fingerprint(model=value)


EXPECTED = "84a2610939edaadb2855ce7e5fac2becd59b9e1043270124d6cb19586545e1af"
