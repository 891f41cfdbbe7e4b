# SPDX-License-Identifier: Apache-2.0
"""Who is made of copies of the configs, with which name, and what it does then.

The server is one that the connector starts, so that none is asked.
"""

from __future__ import annotations

import enum
from types import SimpleNamespace
from typing import Any
from unittest import mock

import pytest
from support.layout.fakes import FullAttentionSpec, KVCacheConfig, SlidingWindowSpec, config

from vllm_ascend_kvext.errors import LMCacheError
from vllm_ascend_kvext.patches.lmcache import factory, known_release
from vllm_ascend_kvext.patches.lmcache.factory import NAME, get_connector_class
from vllm_ascend_kvext.settings import LMCACHE_KEYS_VARIABLE

FULL, WINDOW = FullAttentionSpec(block_size=16), SlidingWindowSpec(block_size=16)
ONE_GROUP = config(9, (FULL, "a"))
TWO_GROUPS = config(9, (FULL, "a"), (WINDOW, "b"))


class Role(enum.Enum):
    SCHEDULER = 0
    WORKER = 1


def engine() -> Any:
    """vLLM's config, as far as it is read."""
    return SimpleNamespace(
        model_config=SimpleNamespace(model="model"),
        cache_config=SimpleNamespace(cache_dtype="auto"),
        device_config=SimpleNamespace(device_type="npu"),
        parallel_config=SimpleNamespace(tensor_parallel_size=1, pipeline_parallel_size=1),
        kv_transfer_config=SimpleNamespace(
            kv_connector_extra_config={"lmcache.mp.autostart": True}
        ),
    )


class LMCacheMPConnector:
    """LMCache's: it names its objects after the model."""

    def __init__(self, vllm_config: Any, role: Role, kv_cache_config: Any) -> None:
        self.config, self.kv_cache_config = vllm_config, kv_cache_config
        self.request_trackers = {"request": mock.Mock()}
        adapter = mock.Mock(model_name=vllm_config.model_config.model)
        setattr(self, f"{role.name.lower()}_adapter", adapter)

    def register_kv_caches(self, kv_caches: dict[str, Any]) -> None:
        raise ConnectionError

    def build_connector_meta(self, scheduler_output: Any) -> Any:
        return scheduler_output


@pytest.fixture(autouse=True)
def unknown_lmcache(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its objects are left alone."""
    monkeypatch.setattr(known_release, "is_as_read", lambda: False)


def made(groups: KVCacheConfig, role: Role = Role.SCHEDULER, own: Any = None) -> Any:
    """What vLLM makes of the class that it asks for."""
    return class_for(LMCacheMPConnector)(own or engine(), role, groups)


def class_for(connector: Any) -> Any:
    return get_connector_class(lambda config: connector, object, SimpleNamespace())


@pytest.mark.parametrize(
    ("keys", "groups", "has_layout"),
    [
        (None, ONE_GROUP, False),
        (None, TWO_GROUPS, True),
        ("1", ONE_GROUP, True),
        ("0", TWO_GROUPS, False),
    ],
)
def test_the_setting_and_the_groups_decide_who_names_the_layout(
    keys: str | None, groups: KVCacheConfig, has_layout: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv(LMCACHE_KEYS_VARIABLE, raising=False)
    if keys is not None:
        monkeypatch.setenv(LMCACHE_KEYS_VARIABLE, keys)
    monkeypatch.setattr(
        factory, "ask_servers", lambda *args, is_worker: args[2].update(asked_by_worker=is_worker)
    )
    own = engine()
    given = [
        class_for(LMCacheMPConnector)(vllm_config=own, role=role, kv_cache_config=groups).config
        for role in Role
    ]
    options = [config.kv_transfer_config.kv_connector_extra_config for config in given]
    assert [each["asked_by_worker"] for each in options] == [False, True]
    scheduler, worker = (config.model_config.model for config in given)
    assert scheduler == worker
    assert scheduler.startswith("model##kvext-") if has_layout else scheduler == "model"
    assert own == engine(), "the engine's own config stays as it is"
    assert given[0].parallel_config is own.parallel_config


def test_the_class_is_the_same_however_often_it_is_asked_for() -> None:
    """MultiConnector compares classes, and tells their reports apart by name."""
    found = class_for(LMCacheMPConnector)
    assert found is class_for(LMCacheMPConnector) is class_for(found)
    assert issubclass(found, LMCacheMPConnector)
    assert found.__name__ == NAME
    assert class_for(mock.Mock) is mock.Mock, "other connectors are those that they always were"


def test_engines_without_groups_get_what_they_always_got() -> None:
    own, groups = engine(), config(9)
    connector = made(groups, own=own)
    assert connector.config is own
    assert connector.kv_cache_config is groups
    assert connector.build_connector_meta("step") == "step"


def test_a_connector_that_ignores_its_name_is_refused_where_the_name_matters(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(factory, "_with_name_and_options", lambda config, name, options: config)
    with pytest.raises(LMCacheError, match="found 'model'"):
        made(TWO_GROUPS)
    assert made(ONE_GROUP)


def test_pages_that_the_server_does_not_take_are_told_as_what_they_are() -> None:
    with pytest.raises(LMCacheError, match=r"tcp://localhost:5555.*same release"):
        made(ONE_GROUP, Role.WORKER).register_kv_caches({})


@pytest.mark.parametrize("is_as_read", [True, False])
def test_lmcaches_objects_are_changed_only_if_they_are_those_that_were_read(
    is_as_read: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(known_release, "is_as_read", lambda: is_as_read)
    told = mock.Mock()
    monkeypatch.setattr(factory, "tell_first_blocks", told)
    scheduler, worker = (made(ONE_GROUP, role) for role in Role)
    assert scheduler.build_connector_meta("step") == "step"
    assert told.mock_calls == [mock.call(scheduler.request_trackers, "step")] * is_as_read
    for changed in (
        scheduler.scheduler_adapter._ensure_heartbeat_started,
        worker.worker_adapter._reregister_kv_caches_callback,
    ):
        assert isinstance(changed, mock.Mock) is not is_as_read
