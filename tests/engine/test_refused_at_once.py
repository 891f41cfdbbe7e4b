# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vllm-ascend-kvext project
"""vLLM's own configuration refuses wrong options of the connector before it loads weights."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

import pytest
from support.upstream_version import IS_SINCE_0_30
from vllm.config import KVTransferConfig, VllmConfig
from vllm.distributed import kv_transfer
from vllm.engine.arg_utils import AsyncEngineArgs
from vllm.utils.argparse_utils import FlexibleArgumentParser
from vllm.v1.executor.abstract import Executor
from vllm.v1.kv_cache_interface import KVCacheConfig, KVCacheTensor

from vllm_ascend_kvext import engine_configuration
from vllm_ascend_kvext.connector.common.host_memory import (
    HostMemoryError,
    MemoryBound,
    MemoryNeed,
)
from vllm_ascend_kvext.engine_configuration import HostReport
from vllm_ascend_kvext.errors import ConnectorError, LayoutError, SettingsError
from vllm_ascend_kvext.patches.connector.executor import report_host
from vllm_ascend_kvext.patches.connector.scheduler import _require_repairs
from vllm_ascend_kvext.settings import DISABLE_VARIABLE

pytestmark = pytest.mark.usefixtures("offloading_in_effect")

GIB = 1 << 30
WRONG = {"host_memory_gb": 8}
MESSAGE = "kv_connector_extra_config: unknown key 'host_memory_gb'"


@pytest.fixture(autouse=True)
def no_plugin(monkeypatch: pytest.MonkeyPatch) -> None:
    """The fixture `offloading_in_effect` does what the plugin would do, and takes it back."""
    monkeypatch.setenv("VLLM_PLUGINS", "")


def transfer(**options: Any) -> dict[str, Any]:
    return {
        "kv_connector": "KvextConnector",
        "kv_role": "kv_both",
        "kv_connector_extra_config": options,
    }


def below_multi(**options: Any) -> dict[str, Any]:
    other = {"kv_connector": "ExampleConnector", "kv_role": "kv_both"}
    return {
        "kv_connector": "MultiConnector",
        "kv_role": "kv_both",
        "kv_connector_extra_config": {"connectors": [other, transfer(**options)]},
    }


def parse(*arguments: str) -> AsyncEngineArgs:
    parser = AsyncEngineArgs.add_cli_args(FlexibleArgumentParser())
    return AsyncEngineArgs.from_cli_args(parser.parse_args(list(arguments)))


@pytest.mark.parametrize(
    "arguments",
    [
        ("--kv-transfer-config", json.dumps(transfer(**WRONG))),
        ("--kv-transfer-config", json.dumps(below_multi(**WRONG))),
        ("--tensor-parallel-size=2", "--kv-transfer-config", json.dumps(transfer(**WRONG))),
        (
            "--kv-transfer-config.kv_connector=KvextConnector",
            "--kv-transfer-config.kv_role=kv_both",
            "--kv-transfer-config.kv_connector_extra_config.host_memory_gb=8",
        ),
    ],
    ids=["alone", "below a MultiConnector", "two workers", "by parts"],
)
def test_a_wrong_option_is_a_usage_error(
    arguments: tuple[str, ...], capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as ended:
        parse("--model=unused", *arguments)
    assert ended.value.code == 2
    printed = capsys.readouterr().err
    assert "error: argument --kv-transfer-config" in printed
    assert printed.count(MESSAGE) == 1
    assert "Traceback" not in printed


def configuration(model: Path, transfer_config: Any, **arguments: Any) -> VllmConfig:
    values = {"max_model_len": 128, "enforce_eager": True, "skip_tokenizer_init": True}
    return AsyncEngineArgs(
        str(model), kv_transfer_config=transfer_config, **values | arguments
    ).create_engine_config()


def test_right_options_are_accepted(tiny_model: Path) -> None:
    for make in (transfer, below_multi):
        made = KVTransferConfig(**make(host_memory_gib=0.25))
        assert configuration(tiny_model, made).kv_transfer_config is not None


@pytest.mark.parametrize("make", [transfer, below_multi])
def test_options_that_were_wrong_before_the_plugin_came_are_refused(
    make: Any, tiny_model: Path
) -> None:
    made = KVTransferConfig(**make())
    # As if it had been made before: nothing has been checked.
    made.kv_connector_extra_config = make(**WRONG)["kv_connector_extra_config"]
    with pytest.raises(SettingsError, match=MESSAGE):
        configuration(tiny_model, made)


@pytest.mark.parametrize(
    ("arguments", "num_workers"),
    [({}, 1), ({"tensor_parallel_size": 2}, 2), ({"data_parallel_size": 2}, 2)],
    ids=["one worker", "two workers", "two engines"],
)
def test_memory_that_no_host_has_is_refused(
    arguments: dict[str, int], num_workers: int, tiny_model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    made = KVTransferConfig(**transfer(host_memory_gib=1))
    each_bytes = GIB // arguments.get("tensor_parallel_size", 1)
    need = MemoryNeed(each_bytes, num_workers, is_pinned=False)

    def limit(num_bytes: int) -> None:
        bound = MemoryBound("memory.max", num_bytes, 0)
        monkeypatch.setattr(engine_configuration, "smallest_limit", lambda: bound)

    limit(need.total_bytes)
    configuration(tiny_model, made, **arguments)
    limit(need.total_bytes - 1)
    with pytest.raises(SettingsError, match="host_memory_gib: expected no more than this host has"):
        configuration(tiny_model, made, **arguments)


def test_an_engine_whose_pages_cannot_be_laid_out_is_refused(tiny_model: Path) -> None:
    made = KVTransferConfig(**transfer(host_memory_gib=0.25))
    with pytest.raises(LayoutError, match="pipeline parallelism"):
        configuration(tiny_model, made, pipeline_parallel_size=2)


class Workers(Executor):
    """An executor of workers that only say what their hosts have left."""

    def __init__(self, vllm_config: VllmConfig, left_bytes: int) -> None:
        self.vllm_config = vllm_config
        self.left_bytes = left_bytes
        self.calls: list[str] = []

    def _init_executor(self) -> None: ...

    def check_health(self) -> None: ...

    def collective_rpc(self, method: Any, *args: Any, **kwargs: Any) -> Any:
        self.calls.append(method if isinstance(method, str) else method.__name__)
        if method is report_host:
            assert kwargs == {"args": ("cpu",)}
            bound = MemoryBound("memory.max", self.left_bytes, 0)
            with mock.patch.object(engine_configuration, "tightest_bound", lambda: bound):
                return [report_host(None, "cpu")] * self.vllm_config.parallel_config.world_size
        return []


PAGE_BYTES = 3 << 30


def pages() -> KVCacheConfig:
    """The pages of a worker, in three tensors."""
    if IS_SINCE_0_30:
        strides = {"layer_stride": 1, "block_stride": 1}
        tensors = [KVCacheTensor(size=PAGE_BYTES, layers=[name], **strides) for name in "abc"]
    else:
        tensors = [KVCacheTensor(size=PAGE_BYTES // 3, shared_by=[name]) for name in "abc"]
    return KVCacheConfig(num_blocks=1, kv_cache_tensors=tensors, kv_cache_groups=[])


@pytest.mark.parametrize("num_workers", [1, 2])
def test_workers_take_no_memory_where_all_parts_are_too_much(
    num_workers: int, tiny_model: Path
) -> None:
    made = KVTransferConfig(**transfer(host_memory_gib=1))
    config = configuration(tiny_model, made, tensor_parallel_size=num_workers)
    need = MemoryNeed(GIB // num_workers, num_workers, is_pinned=False, page_bytes=PAGE_BYTES)
    workers = Workers(config, need.total_bytes)
    workers.initialize_from_config([pages()] * num_workers)
    assert workers.calls[:2] == ["report_host", "initialize_from_config"]
    workers = Workers(config, need.total_bytes - 1)
    with pytest.raises(HostMemoryError, match=f"expected {need.total_bytes} bytes"):
        workers.initialize_from_config([pages()] * num_workers)
    assert workers.calls == ["report_host"]


def test_engines_without_the_connector_are_not_asked(tiny_model: Path) -> None:
    other = KVTransferConfig(kv_connector="ExampleConnector", kv_role="kv_both")
    for made in (None, other):
        workers = Workers(configuration(tiny_model, made), 0)
        workers.initialize_from_config([])
        assert workers.calls[0] == "initialize_from_config"


def test_a_worker_that_has_its_memory_needs_no_more(monkeypatch: pytest.MonkeyPatch) -> None:
    assert isinstance(report_host(None, "cpu"), HostReport)
    monkeypatch.setattr(kv_transfer, "has_kv_transfer_group", lambda: True)
    assert report_host(None, "cpu") is None


def test_keys_of_8_bits_are_refused_without_their_repair(monkeypatch: pytest.MonkeyPatch) -> None:
    """The scheduler's side asks before any step. The engine ends with its message."""

    def scheduler(has_c8: bool) -> Any:
        config = SimpleNamespace(
            speculative_config=None, quant_config=SimpleNamespace(enable_c8_quant=has_c8)
        )
        groups = SimpleNamespace(kv_cache_groups=[])
        return SimpleNamespace(vllm_config=config, kv_cache_config=groups)

    _require_repairs(scheduler(has_c8=True))
    monkeypatch.setenv(DISABLE_VARIABLE, "c8-beside-connectors")
    _require_repairs(scheduler(has_c8=False))
    with pytest.raises(ConnectorError, match="expected the repair c8-beside-connectors, found it"):
        _require_repairs(scheduler(has_c8=True))
