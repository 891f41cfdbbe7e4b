# SPDX-License-Identifier: Apache-2.0
"""The name of an engine's objects: equal on both sides of an engine, other for another layout."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass, field, replace

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

from vllm_ascend_kvext.lmcache.errors import LMCacheError
from vllm_ascend_kvext.lmcache.object_names import config_fingerprint, object_name


@dataclass(frozen=True)
class Model:
    revision: str | None = None
    quantization: str | None = None


@dataclass(frozen=True)
class Parallel:
    tensor_parallel_size: int = 2
    pipeline_parallel_size: int = 1
    decode_context_parallel_size: int = 1
    prefill_context_parallel_size: int = 1
    rank: int = 0


@dataclass(frozen=True)
class Cache:
    cache_dtype: str = "auto"


@dataclass(frozen=True)
class Device:
    device_type: str = "npu"


@dataclass(frozen=True)
class Draft:
    model: str = "draft"


@dataclass(frozen=True)
class Engine:
    """vLLM's config, and the environment of its process."""

    model_config: Model = Model()
    parallel_config: Parallel = Parallel()
    cache_config: Cache = Cache()
    device_config: Device = Device()
    speculative_config: Draft | None = None
    instruction_set: str = ""
    environ: dict[str, str] = field(default_factory=dict)
    versions: dict[str, str] = field(default_factory=lambda: {"vllm": "0.23.0"})

    def fingerprint(self, groups: KVCacheConfig) -> str:
        return config_fingerprint(
            self,
            groups,
            versions=self.versions,
            instruction_set=self.instruction_set,
            environ=self.environ,
        )


FULL = FullAttentionSpec(block_size=16)
WINDOW = SlidingWindowSpec(block_size=16, sliding_window=64)
STATE = MambaSpec(block_size=16, shapes=((4,),), dtypes=(BFLOAT16,))
GROUPS = config(100, (FULL, "a", "b"), (WINDOW, "c", "d"))
REFERENCE = Engine().fingerprint(GROUPS)


def test_a_process_and_its_pages_do_not_matter() -> None:
    assert Engine().fingerprint(replace(GROUPS, num_blocks=7)) == REFERENCE
    assert Engine(parallel_config=Parallel(rank=1)).fingerprint(GROUPS) == REFERENCE
    assert len(REFERENCE) == 64


def test_both_sides_of_an_engine_agree_on_a_bundle_of_layers() -> None:
    """Which the scheduler has as the spec of its first layer."""
    wide = replace(FULL, head_size=32)
    worker = config(100, {"a": FULL, "b": wide}, (WINDOW, "c"))
    scheduler = config(100, (FULL, "a", "b"), (WINDOW, "c"))
    assert Engine().fingerprint(worker) == Engine().fingerprint(scheduler)


def test_all_stages_of_a_pipeline_agree() -> None:
    """Each has other layers in the same groups."""
    engine = Engine(parallel_config=Parallel(pipeline_parallel_size=2))
    first, second = config(9, (FULL, "a"), (WINDOW, "b")), config(9, (FULL, "c"), (WINDOW, "d"))
    assert engine.fingerprint(first) == engine.fingerprint(second)


def test_stages_agree_whose_first_layers_have_other_specs() -> None:
    """The scheduler is handed one spec of a group, and a worker those of its own layers."""
    engine = Engine(parallel_config=Parallel(pipeline_parallel_size=2))
    other = replace(FULL, num_kv_heads=2)
    assert engine.fingerprint(config(9, (FULL, "a"))) == engine.fingerprint(config(9, (other, "b")))
    smaller = replace(FULL, block_size=FULL.block_size // 2)
    assert engine.fingerprint(config(9, (FULL, "a"))) != engine.fingerprint(
        config(9, (smaller, "b"))
    )


@pytest.mark.parametrize(
    "other",
    [
        pytest.param(config(100, (FULL, "a", "b", "c", "d")), id="no hybrid manager"),
        pytest.param(config(100, (WINDOW, "c", "d"), (FULL, "a", "b")), id="order of groups"),
        pytest.param(config(100, (FULL, "a", "c"), (WINDOW, "b", "d")), id="other layers"),
        pytest.param(
            config(100, (replace(FULL, block_size=32), "a", "b"), (WINDOW, "c", "d")),
            id="block size",
        ),
        pytest.param(
            config(100, (replace(FULL, dtype=FLOAT32), "a", "b"), (WINDOW, "c", "d")), id="dtype"
        ),
        pytest.param(
            config(100, (replace(FULL, num_kv_heads=2), "a", "b"), (WINDOW, "c", "d")), id="heads"
        ),
        pytest.param(
            config(100, (FULL, "a", "b"), (replace(WINDOW, sliding_window=32), "c", "d")),
            id="window",
        ),
        pytest.param(
            config(100, (FULL, "a", "b"), (STATE, "c", "d")),
            id="states",
        ),
    ],
)
def test_other_groups_have_another_name(other: KVCacheConfig) -> None:
    assert Engine().fingerprint(other) != REFERENCE


@pytest.mark.parametrize(
    "other",
    [
        Engine(parallel_config=Parallel(tensor_parallel_size=4)),
        Engine(parallel_config=Parallel(pipeline_parallel_size=2)),
        Engine(parallel_config=Parallel(decode_context_parallel_size=2)),
        Engine(parallel_config=Parallel(prefill_context_parallel_size=2)),
        Engine(cache_config=Cache("fp8_e5m2")),
        Engine(model_config=Model(revision="1")),
        Engine(model_config=Model(quantization="ascend")),
        Engine(speculative_config=Draft()),
        Engine(device_config=Device("cpu")),
        Engine(instruction_set="AVX512"),
        Engine(versions={"vllm": "0.30.0"}),
        Engine(environ={"VLLM_SSM_CONV_STATE_LAYOUT": "DS"}),
        Engine(environ={"VLLM_PP_LAYER_PARTITION": "3,5"}),
    ],
    ids=str,
)
def test_another_engine_has_another_name(other: Engine) -> None:
    assert other.fingerprint(GROUPS) != REFERENCE


@pytest.mark.parametrize("cache_dtype", ["fp8", "fp8_ds_mla", "bfloat16"])
def test_what_only_a_worker_knows_of_the_dtype_does_not_part_the_sides(cache_dtype: str) -> None:
    """A worker's model may rename it; the specs have its consequences."""
    assert Engine(cache_config=Cache(cache_dtype)).fingerprint(GROUPS) == REFERENCE


def test_a_value_that_may_differ_between_processes_is_refused() -> None:
    @dataclasses.dataclass(frozen=True)
    class OddSpec:
        block_size: int
        kernel: object

    with pytest.raises(LMCacheError, match=r"KV cache group 0, kernel.*LMCACHE_KEYS=0"):
        Engine().fingerprint(config(1, (OddSpec(16, object()), "a")))


def test_the_name_begins_with_the_model() -> None:
    name = object_name("org/model", REFERENCE)
    assert name == f"org/model##kvext-{REFERENCE[:16]}"
