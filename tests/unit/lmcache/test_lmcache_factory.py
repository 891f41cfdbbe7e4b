# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vllm-ascend-kvext project
"""LMCache's connector is made with copies of the configs. Their name tells layouts apart."""

from __future__ import annotations

import enum
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

import pytest
from support.layout.fakes import FullAttentionSpec, KVCacheConfig, SlidingWindowSpec, config

from vllm_ascend_kvext import compat
from vllm_ascend_kvext.errors import LMCacheError
from vllm_ascend_kvext.patches.lmcache import factory
from vllm_ascend_kvext.patches.lmcache.factory import LMCACHE_RELEASE, NAME, get_connector_class

FULL, WINDOW = FullAttentionSpec(block_size=16), SlidingWindowSpec(block_size=16)
ONE_GROUP = config(9, (FULL, "a"))
TWO_GROUPS = config(9, (FULL, "a"), (WINDOW, "b"))


class Role(enum.Enum):
    SCHEDULER = 0
    WORKER = 1


def engine() -> Any:
    """The parts of vLLM's config that are read."""
    return SimpleNamespace(
        model_config=SimpleNamespace(model="model"),
        cache_config=SimpleNamespace(cache_dtype="auto"),
        device_config=SimpleNamespace(device_type="npu"),
        parallel_config=SimpleNamespace(tensor_parallel_size=1, pipeline_parallel_size=1),
        kv_transfer_config=SimpleNamespace(kv_connector_extra_config={"a": 1}),
    )


class LMCacheMPConnector:
    """LMCache's connector, which names its objects after the model."""

    def __init__(self, vllm_config: Any, role: Role, kv_cache_config: Any) -> None:
        self.config, self.kv_cache_config = vllm_config, kv_cache_config
        self.request_trackers = {"request": mock.Mock()}
        adapter = mock.Mock(model_name=self.own_name(vllm_config.model_config.model))
        setattr(self, f"{role.name.lower()}_adapter", adapter)

    def own_name(self, model_name: str) -> str:
        """With decode context parallelism, LMCache appends to the name."""
        return f"{model_name}##lmcache-dcp"

    def build_connector_meta(self, scheduler_output: Any) -> Any:
        return scheduler_output


class DeafConnector(LMCacheMPConnector):
    def own_name(self, model_name: str) -> str:
        return "model"


DeafConnector.__name__ = NAME


@pytest.fixture(autouse=True)
def installed(monkeypatch: pytest.MonkeyPatch) -> mock.Mock:
    """The version of LMCache that is found."""
    version = mock.Mock(return_value=LMCACHE_RELEASE)
    monkeypatch.setattr(
        compat,
        "installed_version",
        lambda package, distributions: version() if package == "lmcache" else None,
    )
    return version


def made(
    groups: KVCacheConfig,
    role: Role = Role.SCHEDULER,
    own: Any = None,
    connector: type = LMCacheMPConnector,
) -> Any:
    """The object that vLLM makes with the class that it asks for."""
    return class_for(connector)(own or engine(), role, groups)


def class_for(connector: Any) -> Any:
    return get_connector_class(lambda config: connector, object, SimpleNamespace())


@pytest.mark.parametrize("groups", [ONE_GROUP, TWO_GROUPS])
def test_both_sides_of_an_engine_have_one_name_that_says_the_layout(groups: KVCacheConfig) -> None:
    own = engine()
    given = [made(groups, role, own).config for role in Role]
    scheduler, worker = (config.model_config.model for config in given)
    assert scheduler == worker
    assert scheduler.startswith("model##kvext-")
    assert own == engine(), "the engine's own config has changed"
    assert given[0].parallel_config is own.parallel_config


def test_engines_of_other_groups_or_of_another_lmcache_have_other_names(
    installed: mock.Mock,
) -> None:
    names = {made(groups).config.model_config.model for groups in (ONE_GROUP, TWO_GROUPS)}
    installed.return_value = f"{LMCACHE_RELEASE}+local"
    names.add(made(TWO_GROUPS).config.model_config.model)
    assert len(names) == 3


def test_the_class_is_the_same_however_often_it_is_asked_for() -> None:
    """MultiConnector compares classes. It tells their reports apart by name."""
    found = class_for(LMCacheMPConnector)
    assert found is class_for(LMCacheMPConnector) is class_for(found)
    assert issubclass(found, LMCacheMPConnector)
    assert found.__name__ == NAME
    assert class_for(mock.Mock) is mock.Mock, "the class of another connector was replaced"


@pytest.mark.parametrize("role", Role)
def test_a_connector_that_ignores_its_name_is_refused(role: Role) -> None:
    assert made(TWO_GROUPS, role)
    with pytest.raises(LMCacheError, match=r"model##kvext-.*found 'model'.*DISABLE=lmcache"):
        made(TWO_GROUPS, role, connector=DeafConnector)


@pytest.mark.parametrize("version", ["0.5.5", "0.5.7", "0.5.6.dev1", "unknown", None])
def test_another_lmcache_is_refused_before_its_connector_is_made(
    version: str | None, installed: mock.Mock
) -> None:
    installed.return_value = version
    own = mock.Mock(side_effect=AssertionError)
    expected = (
        rf"expected LMCache {LMCACHE_RELEASE}, found LMCache {version}.*"
        rf"Install lmcache=={LMCACHE_RELEASE}.*DISABLE=lmcache"
    )
    with pytest.raises(LMCacheError, match=expected):
        made(ONE_GROUP, own=own)


def test_the_extra_of_this_package_installs_the_release_that_was_read() -> None:
    project = (Path(__file__).parents[3] / "pyproject.toml").read_text()
    assert f'\nlmcache = ["lmcache=={LMCACHE_RELEASE}"]\n' in project


def test_blocks_are_counted_in_tokens_before_anything_else(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(factory, "counted_in_tokens", lambda groups: (TWO_GROUPS, groups)[0])
    connector = made(ONE_GROUP)
    assert connector.kv_cache_config is TWO_GROUPS
    assert connector.config.model_config.model == made(TWO_GROUPS).config.model_config.model


def test_trackers_learn_the_first_blocks_before_lmcache_plans_a_step(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    calls: list[Any] = []
    monkeypatch.setattr(
        factory, "tell_first_blocks", lambda trackers, step: calls.append((trackers, step))
    )
    monkeypatch.setattr(
        LMCacheMPConnector, "build_connector_meta", lambda self, step: calls.append("planned")
    )
    connector = made(ONE_GROUP)
    connector.build_connector_meta("step")
    assert calls == [(connector.request_trackers, "step"), "planned"]
