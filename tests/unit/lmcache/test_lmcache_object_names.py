# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vllm-ascend-kvext project
"""The name of an engine's objects is equal on both sides of an engine, and differs by layout."""

from __future__ import annotations

import dataclasses
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
from support.layout.fakes import (
    BFLOAT16,
    FLOAT32,
    FullAttentionSpec,
    KVCacheConfig,
    MambaSpec,
    SlidingWindowSpec,
    config,
)

from vllm_ascend_kvext.errors import LMCacheError
from vllm_ascend_kvext.lmcache.object_names import config_fingerprint, object_name

FULL = FullAttentionSpec(block_size=16)
WINDOW = SlidingWindowSpec(block_size=16, sliding_window=64)
STATE = MambaSpec(block_size=16, shapes=((4,),), dtypes=(BFLOAT16,))
GROUPS = config(100, (FULL, "a", "b"), (WINDOW, "c", "d"))


def engine(**changes: Any) -> Any:
    """The parts of vLLM's config that are read. Some values are changed: ``parallel__rank=1``."""
    config = {
        "model_config": {"revision": None, "quantization": None},
        "parallel_config": {"tensor_parallel_size": 2, "pipeline_parallel_size": 1},
        "cache_config": {"cache_dtype": "auto"},
        "device_config": {"device_type": "npu"},
    }
    for name, value in changes.items():
        part, _, key = name.partition("__")
        config.setdefault(f"{part}_config", {})[key] = value
    return SimpleNamespace(**{name: SimpleNamespace(**values) for name, values in config.items()})


def fingerprint(
    groups: KVCacheConfig = GROUPS, process: dict[str, Any] | None = None, **changes: Any
) -> str:
    given = {"versions": {"vllm": "0.23.0"}, "instruction_set": "", "environ": {}}
    return config_fingerprint(engine(**changes), groups, **given | (process or {}))


REFERENCE = fingerprint()


@pytest.mark.parametrize(
    "changes",
    [
        {"groups": replace(GROUPS, num_blocks=7)},
        {"parallel__rank": 1},
        # A worker's model may rename this dtype. The specs show its effects.
        *({"cache__cache_dtype": name} for name in ("fp8", "fp8_ds_mla", "bfloat16")),
    ],
)
def test_what_a_process_alone_knows_does_not_matter(changes: dict[str, Any]) -> None:
    assert fingerprint(**changes) == REFERENCE
    assert object_name("org/model", REFERENCE) == f"org/model##kvext-{REFERENCE[:16]}"


def test_both_sides_of_an_engine_agree_on_a_bundle_of_layers() -> None:
    """The scheduler sees this bundle as the spec of its first layer."""
    wide = replace(FULL, head_size=32)
    worker = config(100, {"a": FULL, "b": wide}, (WINDOW, "c"))
    scheduler = config(100, (FULL, "a", "b"), (WINDOW, "c"))
    assert fingerprint(worker) == fingerprint(scheduler)


def test_all_stages_of_a_pipeline_agree() -> None:
    """Each worker has other layers in the same groups. Their first layer may have another spec."""
    first, *same, other = (
        fingerprint(config(9, (spec, layer), (WINDOW, "w")), parallel__pipeline_parallel_size=2)
        for spec, layer in (
            *((FULL, "a"), (FULL, "c"), (replace(FULL, num_kv_heads=2), "c")),
            (replace(FULL, block_size=8), "c"),
        )
    )
    assert same == [first, first] and other != first


@pytest.mark.parametrize(
    "changes",
    [
        *(
            {"groups": config(100, *groups)}
            for groups in (
                [(FULL, "a", "b", "c", "d")],
                [(WINDOW, "c", "d"), (FULL, "a", "b")],
                [(FULL, "a", "c"), (WINDOW, "b", "d")],
                [(replace(FULL, block_size=32), "a", "b"), (WINDOW, "c", "d")],
                [(replace(FULL, dtype=FLOAT32), "a", "b"), (WINDOW, "c", "d")],
                [(replace(FULL, num_kv_heads=2), "a", "b"), (WINDOW, "c", "d")],
                [(FULL, "a", "b"), (replace(WINDOW, sliding_window=32), "c", "d")],
                [(FULL, "a", "b"), (STATE, "c", "d")],
            )
        ),
        {"parallel__tensor_parallel_size": 4},
        {"parallel__pipeline_parallel_size": 2},
        {"parallel__decode_context_parallel_size": 2},
        {"parallel__prefill_context_parallel_size": 2},
        {"cache__cache_dtype": "fp8_e5m2"},
        {"model__revision": "1"},
        {"model__quantization": "ascend"},
        {"model__dtype": "bfloat16"},
        {"speculative__model": "draft"},
        {"device__device_type": "cpu"},
        {"process": {"instruction_set": "AVX512"}},
        {"process": {"versions": {"vllm": "0.30.0"}}},
        {"process": {"environ": {"VLLM_SSM_CONV_STATE_LAYOUT": "DS"}}},
        {"process": {"environ": {"VLLM_PP_LAYER_PARTITION": "3,5"}}},
    ],
    ids=str,
)
def test_other_groups_engines_and_processes_have_another_name(changes: dict[str, Any]) -> None:
    assert fingerprint(**changes) != REFERENCE


def test_a_value_that_may_differ_between_processes_is_refused() -> None:
    @dataclasses.dataclass(frozen=True)
    class OddSpec:
        block_size: int
        kernel: object

    with pytest.raises(LMCacheError, match="found a object"):
        fingerprint(config(1, (OddSpec(16, object()), "a")))
