# SPDX-License-Identifier: Apache-2.0
"""Who is made of copies of the configs, and with which name: the patch of vLLM's factory.

The server is one that the connector starts, so that none is asked.
"""

from __future__ import annotations

import enum
from dataclasses import dataclass, field
from typing import Any

import pytest
from support.layout.fakes import FullAttentionSpec, KVCacheConfig, SlidingWindowSpec, config

from vllm_ascend_kvext.lmcache.errors import LMCacheError
from vllm_ascend_kvext.patches.lmcache import known_release
from vllm_ascend_kvext.patches.lmcache.factory import (
    NAME,
    get_connector_class,
)
from vllm_ascend_kvext.settings import LMCACHE_KEYS_VARIABLE

FULL, WINDOW = FullAttentionSpec(block_size=16), SlidingWindowSpec(block_size=16)
ONE_GROUP = config(9, (FULL, "a"))
TWO_GROUPS = config(9, (FULL, "a"), (WINDOW, "b"))


class Role(enum.Enum):
    SCHEDULER = 0
    WORKER = 1


@dataclass
class Part:
    """Any part of vLLM's config: its attributes are those that are read."""

    model: str = "model"
    cache_dtype: str = "auto"
    device_type: str = "npu"
    tensor_parallel_size: int = 1
    pipeline_parallel_size: int = 1
    kv_connector: str = NAME
    kv_connector_extra_config: dict[str, Any] = field(
        default_factory=lambda: {"lmcache.mp.autostart": True}
    )


@dataclass
class Config:
    kv_transfer_config: Part | None = field(default_factory=Part)
    model_config: Part = field(default_factory=Part)
    cache_config: Part = field(default_factory=Part)
    device_config: Part = field(default_factory=Part)
    parallel_config: Part = field(default_factory=Part)


@dataclass
class Adapter:
    model_name: str


@dataclass
class Connector:
    """LMCache's: it names its objects after the model."""

    config: Config
    role: Role
    kv_cache_config: KVCacheConfig

    @property
    def scheduler_adapter(self) -> Adapter:
        return Adapter(self.config.model_config.model)


class StubbornConnector(Connector):
    """It takes their name from elsewhere."""

    scheduler_adapter = Adapter("elsewhere")  # type: ignore[assignment]


class OtherConnector(Connector):
    """Not LMCache's."""


for connector in (Connector, StubbornConnector):
    connector.__name__ = NAME


@pytest.fixture(autouse=True)
def unknown_lmcache(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its objects are left alone."""
    monkeypatch.setattr(known_release, "is_as_read", lambda: False)


def class_for(connector: Any) -> Any:
    """What vLLM gets if it asks for a connector's class."""
    return get_connector_class(lambda config: connector, object, Part())


def name_with(
    groups: KVCacheConfig, keys: str | None, monkeypatch: pytest.MonkeyPatch
) -> tuple[str, str]:
    """Names that both sides of an engine get."""
    monkeypatch.delenv(LMCACHE_KEYS_VARIABLE, raising=False)
    if keys is not None:
        monkeypatch.setenv(LMCACHE_KEYS_VARIABLE, keys)
    scheduler, worker = (
        class_for(Connector)(Config(), role, groups).config.model_config.model for role in Role
    )
    return scheduler, worker


@pytest.mark.parametrize(
    ("keys", "groups", "has_layout"),
    [
        (None, ONE_GROUP, False),
        (None, TWO_GROUPS, True),
        ("auto", TWO_GROUPS, True),
        ("1", ONE_GROUP, True),
        ("1", TWO_GROUPS, True),
        ("0", ONE_GROUP, False),
        ("0", TWO_GROUPS, False),
    ],
)
def test_the_setting_and_the_groups_decide_who_names_the_layout(
    keys: str | None, groups: KVCacheConfig, has_layout: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    scheduler, worker = name_with(groups, keys, monkeypatch)
    assert scheduler == worker
    assert scheduler.startswith("model##kvext-") if has_layout else scheduler == "model"


def test_other_connectors_are_those_that_they_always_were() -> None:
    assert class_for(OtherConnector) is OtherConnector


def test_the_class_is_the_same_however_often_it_is_asked_for() -> None:
    """MultiConnector compares classes, and tells their reports apart by name."""
    found = class_for(Connector)
    assert found is class_for(Connector)
    assert found is class_for(found)
    assert issubclass(found, Connector)
    assert found.__name__ == NAME


def test_engines_without_groups_get_what_they_always_got() -> None:
    own, groups = Config(), config(9)
    made = class_for(Connector)(own, Role.SCHEDULER, groups)
    assert made.config is own
    assert made.kv_cache_config is groups


def test_a_connector_that_ignores_its_name_is_refused_where_the_name_matters() -> None:
    with pytest.raises(LMCacheError, match="found 'elsewhere'"):
        class_for(StubbornConnector)(Config(), Role.SCHEDULER, TWO_GROUPS)
    assert class_for(StubbornConnector)(Config(), Role.SCHEDULER, ONE_GROUP)


def test_arguments_may_be_named() -> None:
    made = class_for(Connector)(vllm_config=Config(), role=Role.WORKER, kv_cache_config=TWO_GROUPS)
    assert "##kvext-" in made.config.model_config.model


def test_of_several_servers_a_worker_asks_none() -> None:
    """It uses that of its own host; here nobody listens at either."""
    servers = {"lmcache.mp.server_urls": "tcp://127.0.0.1:1,tcp://127.0.0.1:2"}
    own = Config(Part(kv_connector_extra_config=servers))
    assert class_for(Connector)(own, Role.WORKER, ONE_GROUP)
    with pytest.raises(LMCacheError, match=r"127\.0\.0\.1:1"):
        class_for(Connector)(own, Role.SCHEDULER, ONE_GROUP)
