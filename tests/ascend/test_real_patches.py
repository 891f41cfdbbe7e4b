# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vllm-ascend-kvext project
"""The real vllm-ascend is in charge of this process, and the fixtures are its true layouts."""

from __future__ import annotations

import importlib
import json
import math
import os
import subprocess
import sys
from contextlib import nullcontext
from types import ModuleType

import ascend_geometry
import pytest
import vllm
import vllm.v1.core.block_pool as block_pool
import vllm.v1.core.kv_cache_manager as kv_cache_manager
import vllm.v1.core.single_type_kv_cache_manager as single_type
from ascend_geometry import BLOCK_SIZES, HIT_UNIT_TOKENS, SMALL_HIT_UNIT_TOKENS, BlockSizes
from support.layout.upstream_line import HAS_ONE_VIEW
from support.retention.checkpoints import adaptive_retention
from support.scheduler.block_manager import BlockManager

from vllm_ascend_kvext.compat import version_in
from vllm_ascend_kvext.groups.spec_attributes import compress_ratio_of
from vllm_ascend_kvext.patches import PATCHES
from vllm_ascend_kvext.patches.upstream import hit_unit_tokens, lookup_groups, tokens_per_block


def patch_ids(feature: str) -> set[str]:
    return {
        patch.id
        for patch in PATCHES
        if patch.feature == feature
        and any(version_in(vllm.__version__, versions) for versions in patch.vllm)
    }


def test_patches_of_vllm_ascend_took_effect():
    replaced = {
        "coordinator": kv_cache_manager.get_kv_cache_coordinator,
        "mamba": single_type.MambaManager,
    }
    if not HAS_ONE_VIEW:
        replaced["free_blocks"] = block_pool.BlockPool.free_blocks
    found = {name for name, value in replaced.items() if _is_from_vllm_ascend(value)}
    assert found == set(replaced)


def _is_from_vllm_ascend(value: object) -> bool:
    return value.__module__.startswith("vllm_ascend.")


@pytest.mark.parametrize("block_size", HIT_UNIT_TOKENS)
def test_planning_gives_six_groups(block_size):
    sizes: BlockSizes = BLOCK_SIZES[block_size]
    config = ascend_geometry.planned_config(block_size, num_blocks=77)

    assert config.num_blocks == 77
    ratios = (4, 128) if HAS_ONE_VIEW else (1, 1)  # tokens of a block, or rows
    assert [_shape(group.kv_cache_spec) for group in config.kv_cache_groups] == [
        ("AscendMLAAttentionSpec", sizes.mla * ratios[0], 4, None),
        ("AscendMLAAttentionSpec", sizes.mla * ratios[1], 128, None),
        ("AscendSlidingWindowMLASpec", sizes.window, 1, 128),
        ("AscendSlidingWindowMLASpec", sizes.window, 1, 128),
        ("AscendSlidingWindowMLASpec", sizes.c4_state, 1, 8),
        ("AscendSlidingWindowMLASpec", sizes.c128_state, 1, 128),
    ]
    assert [len(group.layer_names) for group in config.kv_cache_groups] == [42, 20, 22, 21, 42, 20]


def _shape(spec) -> tuple[str, int, int, int | None]:
    window_tokens = getattr(spec, "sliding_window", None)
    return type(spec).__name__, spec.block_size, compress_ratio_of(spec), window_tokens


@pytest.mark.parametrize("block_size", HIT_UNIT_TOKENS)
def test_coordinator_in_charge_of_the_true_layout(block_size):
    coordinator = BlockManager(ascend_geometry.planned_layout(block_size)).manager.coordinator
    assert type(coordinator).__name__ == "AscendHybridKVCacheCoordinator"
    assert hit_unit_tokens(coordinator) == HIT_UNIT_TOKENS[block_size]
    sizes = BLOCK_SIZES[block_size]
    assert [
        tokens_per_block(coordinator, manager) for manager in coordinator.single_type_managers
    ] == [
        sizes.mla * 4,
        sizes.mla * 128,
        *[sizes.window] * 2,
        sizes.c4_state,
        sizes.c128_state,
    ]
    assert [type(manager).__name__ for manager in coordinator.single_type_managers] == [
        *["FullAttentionManager" if HAS_ONE_VIEW else "CompressAttentionManager"] * 2,
        *["SlidingWindowManager"] * 4,
    ]


@pytest.mark.parametrize("block_size", HIT_UNIT_TOKENS)
def test_without_prefix_caching_blocks_are_those_of_upstream(block_size):
    """vLLM then hashes by the scheduler's block, which is longer than others."""
    layout = ascend_geometry.planned_layout(block_size)
    hash_tokens = math.lcm(*(spec.block_size for spec in layout.specs))
    tables = []
    for installed in (nullcontext(), adaptive_retention()):
        with installed:
            world = BlockManager(layout, enable_caching=False, hash_block_size=hash_tokens)
            requests = [world.request(range(300 + number)) for number in range(3)]
            assert [world.prefill(request, 200) for request in requests] == [0, 0, 0]
            world.decode(requests[1], range(40))
            world.manager.free(requests[0])
            assert world.prefill(world.request(range(300)), 512) == 0
            found = [world.manager.get_blocks(request.request_id).blocks for request in requests]
            tables.append(
                [[[block.block_id for block in group] for group in table] for table in found]
            )
    assert tables[0] == tables[1] and any(tables[0][1])


def test_small_layout_has_the_shape_of_the_true_one():
    small = BlockManager(ascend_geometry.small_layout()).manager.coordinator
    true = BlockManager(ascend_geometry.planned_layout(128)).manager.coordinator
    assert type(small) is type(true)
    assert hit_unit_tokens(small) == SMALL_HIT_UNIT_TOKENS
    assert [group.group_ids for group in lookup_groups(small)] == [
        group.group_ids for group in lookup_groups(true)
    ]
    assert [type(manager) for manager in small.single_type_managers] == [
        type(manager) for manager in true.single_type_managers
    ]


@pytest.mark.parametrize("interval", [None, "0"])
def test_status_accepts_this_combination(interval: str | None):
    environ = {name: value for name, value in os.environ.items() if not name.startswith("VLLM_")}
    environ["PYTHONPATH"] = os.pathsep.join(sys.path)
    if interval is not None:
        environ["VLLM_PREFIX_CACHE_RETENTION_INTERVAL"] = interval
    completed = subprocess.run(
        [sys.executable, "-m", "vllm_ascend_kvext", "status", "--json"],
        env=environ,
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert completed.returncode == 0, completed.stdout + completed.stderr
    states = {patch["id"]: patch["state"] for patch in json.loads(completed.stdout)["patches"]}
    expected_state = "inert" if interval is None else "applied"
    assert {states.get(patch_id) for patch_id in patch_ids("retention")} == {expected_state}
    on_import = {patch.id for patch in PATCHES if patch.when_imported}
    at_once = patch_ids("connector") - on_import
    assert {states.get(patch_id) for patch_id in at_once} == {"applied"}
    later = patch_ids("connector") & on_import
    assert {states.get(patch_id) for patch_id in later} <= {"applied", "waiting"}
    assert "drifted" not in states.values()


@pytest.mark.skipif(HAS_ONE_VIEW, reason="vllm-ascend 0.30 has no such scheduler")
def test_dynamic_batch_cannot_be_constructed_as_vllm_does(monkeypatch: pytest.MonkeyPatch) -> None:
    """docs/tested_on_ascend.md says so."""
    monkeypatch.setitem(sys.modules, "pandas", ModuleType("pandas"))  # The module may be missing.
    module = importlib.import_module("vllm_ascend.core.scheduler_dynamic_batch")
    configs = ("vllm_config", "kv_cache_config", "structured_output_manager")
    with pytest.raises(TypeError, match="unexpected keyword argument 'hash_block_size'"):
        module.SchedulerDynamicBatch(**dict.fromkeys(configs), block_size=16, hash_block_size=16)
