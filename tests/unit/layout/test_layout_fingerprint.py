# SPDX-License-Identifier: Apache-2.0
"""Equal where stored bytes can be exchanged, different where they cannot."""

from __future__ import annotations

from dataclasses import fields, replace

from vllm_ascend_kvext.groups.model import GroupKind
from vllm_ascend_kvext.layout.fingerprint import layout_fingerprint
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


def other(name: str, value: object) -> object:
    """Another value of a field."""
    if name in OTHERS:
        return OTHERS[name]
    return value + 1 if type(value) is int else not value


def changed(part: object) -> dict[str, object]:
    """Copies of a dataclass, each with another value of one field, by the field's name."""
    return {
        field.name: replace(part, **{field.name: other(field.name, getattr(part, field.name))})
        for field in fields(part)
    }


OTHERS = {
    "layer_name": "model.layers.1.attn",
    "dtype": "float16",
    "axes": ((1, 2), (2, 16)),
    "kind": GroupKind.STATE,
    "planes": (PLANE, PLANE),
    "storages": (RegisteredStorage(8192, 1 << 21),),
    "groups": (GROUP, replace(GROUP, kv_cache_group_id=1)),
}
OF_A_RESTART = {
    *("storage", "base_bytes", "page_stride_bytes", "region_offset_bytes"),
    *("storages", "num_pages", "num_scheduler_groups"),
}
"""Where pages lie, and how many there are. The groups say how many groups there are."""


def test_every_difference_in_bytes_counts_and_no_other() -> None:
    layouts = changed(LAYOUT)
    layouts |= {name: replace(LAYOUT, groups=(one,)) for name, one in changed(GROUP).items()}
    for name, plane in changed(PLANE).items():
        layouts[name] = replace(LAYOUT, groups=(replace(GROUP, planes=(plane,)),))
    found = {name: fingerprint(layout) for name, layout in layouts.items()}
    assert {name for name in found if found[name] == fingerprint()} == OF_A_RESTART
    mappings = {"model": MODEL, "parallel": PARALLEL, "page_format": FORMAT}
    for name, mapping in mappings.items():
        for key in mapping:
            found[key] = fingerprint(**{name: mapping | {key: "another"}})
    found |= {
        "states": fingerprint(states=StatePolicy.SKIP),
        "type": fingerprint(parallel={**PARALLEL, "tensor": "8"}),
    }
    counted = [found[name] for name in found.keys() - OF_A_RESTART]
    assert len({*counted, fingerprint()}) == len(counted) + 1, found


def test_order_of_mappings_does_not_count() -> None:
    backwards = {
        "model": dict(reversed(MODEL.items())),
        "parallel": dict(reversed(PARALLEL.items())),
    }
    assert fingerprint(**backwards) == fingerprint()


def test_a_fixed_layout_has_a_fixed_fingerprint() -> None:
    """In every process and version: stored KV must be found again. Else raise ``FORMAT``."""
    assert fingerprint() == EXPECTED


EXPECTED = "84a2610939edaadb2855ce7e5fac2becd59b9e1043270124d6cb19586545e1af"
