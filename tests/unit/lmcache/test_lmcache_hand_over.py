# SPDX-License-Identifier: Apache-2.0
"""The connector gets copies, is refused where it ignores its name, and ends soon."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import pytest

from vllm_ascend_kvext.lmcache.errors import LMCacheError
from vllm_ascend_kvext.lmcache.hand_over import (
    limit_farewell,
    require_name,
    with_name_and_options,
)


@dataclass
class Model:
    model: str = "model"
    dtype: str = "bfloat16"


@dataclass
class Transfer:
    kv_connector_extra_config: dict[str, Any] = field(default_factory=dict)
    kv_role: str = "kv_both"


@dataclass
class Config:
    model_config: Model = field(default_factory=Model)
    kv_transfer_config: Transfer = field(default_factory=Transfer)
    parallel_config: object = field(default_factory=object)


@dataclass
class Adapter:
    model_name: str = "model##kvext-1"
    _mq_timeout: float = 300.0
    waited_s: float | None = None

    def shutdown(self) -> None:
        self.waited_s = self._mq_timeout


@dataclass
class Scheduler:
    scheduler_adapter: Any


@dataclass
class Worker:
    worker_adapter: Any


def test_the_engines_config_stays_as_it_is() -> None:
    config = Config()
    copied = with_name_and_options(config, "other", {"key": 1})
    assert (config.model_config.model, config.kv_transfer_config) == ("model", Transfer())
    assert copied.model_config == Model("other")
    assert copied.kv_transfer_config == Transfer({"key": 1})
    assert copied.parallel_config is config.parallel_config


@pytest.mark.parametrize("side", [Scheduler, Worker])
def test_a_connector_has_to_take_the_name(side: type) -> None:
    require_name(side(Adapter()), "model##kvext-1")
    require_name(side(Adapter("model##kvext-1##lmcache-dcp")), "model##kvext-1")
    for other in (side(Adapter("model")), side(None), object()):
        with pytest.raises(LMCacheError, match=r"model##kvext-1.*LMCACHE_KEYS=0"):
            require_name(other, "model##kvext-1")


@pytest.mark.parametrize(("set_s", "waited_s"), [(300.0, 10.0), (5.0, 5.0)])
def test_a_worker_does_not_wait_long_for_a_farewell(set_s: float, waited_s: float) -> None:
    adapter = Adapter(_mq_timeout=set_s)
    limit_farewell(Worker(adapter))
    assert adapter._mq_timeout == set_s
    adapter.shutdown()
    assert adapter.waited_s == waited_s


@pytest.mark.parametrize("connector", [Scheduler(Adapter()), Worker(None), Worker(object())])
def test_a_side_without_a_worker_is_left_alone(connector: object) -> None:
    limit_farewell(connector)
