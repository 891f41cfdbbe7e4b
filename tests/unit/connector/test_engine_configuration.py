# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vllm-ascend-kvext project
"""What is refused when vLLM makes its configuration, and before workers take host memory."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest

from vllm_ascend_kvext import engine_configuration
from vllm_ascend_kvext.connector.common.host_memory import (
    HostMemoryError,
    MemoryBound,
    MemoryNeed,
)
from vllm_ascend_kvext.connector.extension import read_configuration
from vllm_ascend_kvext.engine_configuration import (
    HostReport,
    check_arguments,
    check_configuration,
    check_hosts,
    check_transfer_config,
    has_connector,
)
from vllm_ascend_kvext.errors import LayoutError, SettingsError
from vllm_ascend_kvext.layout import worker_config

GIB = 1 << 30


def transfer(role: str | None = "kv_both", **options: Any) -> Any:
    return SimpleNamespace(
        kv_connector="KvextConnector", kv_role=role, kv_connector_extra_config=options
    )


def below_multi(*children: dict[str, Any]) -> Any:
    return SimpleNamespace(
        kv_connector="MultiConnector",
        kv_role="kv_both",
        kv_connector_extra_config={"connectors": list(children)},
    )


def child(role: str | None = "kv_both", **options: Any) -> dict[str, Any]:
    return {
        "kv_connector": "KvextConnector",
        "kv_role": role,
        "kv_connector_extra_config": options,
    }


def config(transfer_config: Any, device: str = "cpu", tp: int = 1, **parallel: Any) -> Any:
    """A configuration of an engine whose workers are all on one host."""
    values = {
        "world_size": tp,
        "local_world_size": tp,
        "tensor_parallel_size": tp,
        "data_parallel_size_local": 1,
        "data_parallel_backend": "mp",
        "distributed_executor_backend": "uni" if tp == 1 else "mp",
    }
    return SimpleNamespace(
        kv_transfer_config=transfer_config,
        parallel_config=SimpleNamespace(**values | parallel),
        device_config=SimpleNamespace(device_type=device),
        cache_config=SimpleNamespace(cache_dtype="auto"),
        model_config=None,
    )


@pytest.fixture
def limit(monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    """Sets the limit of the host, in bytes, and what is in use of it."""

    def set_limit(num_bytes: int, used_bytes: int = 0) -> None:
        bound = MemoryBound("memory.max", num_bytes, used_bytes)
        monkeypatch.setattr(engine_configuration, "smallest_limit", lambda: bound)

    set_limit(1 << 50)
    yield set_limit


def both_kinds(role: str | None = "kv_both", **options: Any) -> list[Any]:
    other = {"kv_connector": "NixlConnector", "kv_role": "kv_both"}
    return [transfer(role, **options), below_multi(other, child(role, **options))]


@pytest.mark.parametrize("which", [0, 1], ids=["alone", "below a MultiConnector"])
@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"host_memory_gb": 8}, "unknown key 'host_memory_gb'.* Did you mean host_memory_gib"),
        ({"host_memory_gib": 0}, "host_memory_gib: expected a number above 0"),
        ({"store_policy": "sometimes"}, "store_policy: expected one of"),
        ({"role": "kv_producer"}, "expected kv_role kv_both, found kv_producer"),
        ({"role": None}, "expected kv_role kv_both, found None"),
    ],
)
def test_a_wrong_option_is_refused_at_once(
    limit: Any, which: int, options: dict[str, Any], message: str
) -> None:
    transfer_config = both_kinds(**options)[which]
    with pytest.raises(SettingsError, match=message):
        check_transfer_config(transfer_config)
    with pytest.raises(SettingsError, match=message):
        check_configuration(config(transfer_config))


@pytest.mark.parametrize("which", [0, 1], ids=["alone", "below a MultiConnector"])
def test_right_options_are_accepted(limit: Any, which: int) -> None:
    transfer_config = both_kinds(host_memory_gib=1)[which]
    check_transfer_config(transfer_config)
    check_configuration(config(transfer_config))
    assert has_connector(config(transfer_config))


@pytest.mark.parametrize(
    "transfer_config",
    [
        None,
        SimpleNamespace(
            kv_connector="NixlConnector",
            kv_role="kv_producer",
            kv_connector_extra_config={"host_memory_gb": 1},
        ),
        below_multi({"kv_connector": "NixlConnector", "kv_connector_extra_config": {"a": 1}}),
        SimpleNamespace(
            kv_connector="MultiConnector", kv_role="kv_both", kv_connector_extra_config={}
        ),
        # vLLM itself refuses such a list.
        SimpleNamespace(
            kv_connector="MultiConnector",
            kv_role="kv_both",
            kv_connector_extra_config={"connectors": ["KvextConnector"]},
        ),
    ],
)
def test_other_connectors_are_left_alone(limit: Any, transfer_config: Any) -> None:
    limit(1)
    engine = config(transfer_config, "cuda", tp=2, pipeline_parallel_size=2)
    check_transfer_config(transfer_config)
    check_configuration(engine)
    check_hosts(engine, [HostReport("a", MemoryBound("memory.max", 0, 0))], 5)
    assert not has_connector(engine)


def test_what_does_not_suit_the_engine_is_refused(limit: Any) -> None:
    with pytest.raises(SettingsError, match=r"allow_cuda: expected true"):
        check_configuration(config(transfer(), "cuda"))
    check_configuration(config(transfer(allow_cuda=True), "cuda"))
    with pytest.raises(LayoutError, match="pipeline parallelism"):
        check_configuration(config(transfer(), tp=2, pipeline_parallel_size=2))
    with pytest.raises(LayoutError, match="context parallelism"):
        check_configuration(config(transfer(), decode_context_parallel_size=2))
    for cache_dtype in ("mxfp8", "turboquant_4bit_nc"):
        tiled = config(transfer())
        tiled.cache_config.cache_dtype = cache_dtype
        with pytest.raises(LayoutError, match=f"cache dtype: found {cache_dtype}"):
            check_configuration(tiled)
    dense = config(transfer())
    dense.cache_config.mamba_cache_mode = "all"
    with pytest.raises(LayoutError, match="mamba_cache_mode: found all, expected align"):
        check_configuration(dense)
    dense.cache_config.mamba_cache_mode = "align"
    check_configuration(dense)
    with pytest.raises(SettingsError, match="expected memory for 2 workers"):
        check_configuration(config(transfer(host_memory_gib=1e-8), tp=2))


def test_latents_in_memory_of_vllm_ascend_are_refused(limit: Any) -> None:
    engine = config(transfer())
    for given in ({"enabled": False}, {}, None):
        engine.additional_config = {"sparse_kv_offload_config": given}
        check_configuration(engine)
    engine.additional_config = object()  # Another platform may have anything here.
    check_configuration(engine)
    engine.additional_config = {"sparse_kv_offload_config": {"enabled": True}}
    with pytest.raises(LayoutError, match="additional_config: found sparse_kv_offload_config"):
        check_configuration(engine)


def latent(device: str = "cpu", backend: str | None = None, model_type: str = "deepseek_v3") -> Any:
    """An engine with latent attention that computes prompts as a whole, and caches no prefixes."""
    made = config(transfer(), device)
    hf_config = SimpleNamespace(model_type=model_type)
    made.model_config = SimpleNamespace(use_mla=True, hf_config=hf_config)
    made.scheduler_config = SimpleNamespace(enable_chunked_prefill=False)
    made.cache_config.enable_prefix_caching = False
    made.attention_config = SimpleNamespace(backend=backend and SimpleNamespace(name=backend))
    return made


NO_AMX = (
    r"attention: expected a prefill that reads .* found latent attention \(MLA\) on a CPU without "
    r"AMX, .* serve the model on a CPU with AMX, or leave KvextConnector out"
)
CHOSEN = (
    r"attention: expected a prefill that reads .* found that of the attention backend CPU_MLA, .* "
    r"leave --attention-backend out, .* AMX_MLA, or leave KvextConnector out"
)


@pytest.mark.parametrize(
    ("has_amx", "backend", "model_type", "message"),
    [
        (False, None, "deepseek_v3", NO_AMX),
        (False, "CPU_MLA", "deepseek_v3", NO_AMX),
        (False, "AMX_MLA", "deepseek_v3", NO_AMX),
        (False, None, "deepseek_v4", NO_AMX),
        (True, "CPU_MLA", "deepseek_v3", CHOSEN),
        # The user has turned off chunked prefill and prefix caching.
        (True, None, "deepseek_v3", None),
        (True, "AMX_MLA", "deepseek_v3", None),
        (True, "CPU_MLA", "deepseek_v4", None),
    ],
)
def test_latent_attention_on_a_cpu_has_to_read_what_is_cached(
    limit: Any,
    has_amx: bool,
    backend: str | None,
    model_type: str,
    message: str | None,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(worker_config, "_has_amx", lambda: has_amx)
    if message is None:
        check_configuration(latent("cpu", backend, model_type))
        return
    with pytest.raises(LayoutError, match=message) as error:
        check_configuration(latent("cpu", backend, model_type))
    assert ("without AMX" in str(error.value)) is not has_amx
    check_configuration(latent("npu", backend, model_type))
    for name in ("scheduler_config.enable_chunked_prefill", "cache_config.enable_prefix_caching"):
        made = latent("cpu", backend, model_type)
        part, _, flag = name.partition(".")
        setattr(getattr(made, part), flag, True)
        check_configuration(made)


@pytest.mark.parametrize(
    ("is_supported", "machine", "has_amx"),
    [(True, "x86_64", True), (False, "x86_64", False), (True, "aarch64", False)],
)
def test_amx_is_looked_up_as_vllm_does(
    is_supported: bool, machine: str, has_amx: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    cpu = SimpleNamespace(_is_amx_tile_supported=lambda: is_supported)
    monkeypatch.setitem(sys.modules, "torch", SimpleNamespace(cpu=cpu))
    monkeypatch.setattr(worker_config.platform, "machine", lambda: machine)
    assert worker_config._has_amx() is has_amx
    monkeypatch.setitem(sys.modules, "torch", SimpleNamespace(cpu=SimpleNamespace()))
    assert not worker_config._has_amx()
    monkeypatch.setitem(sys.modules, "torch", None)
    assert not worker_config._has_amx()


def test_an_extension_reads_the_model_at_once(limit: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    class Extension:
        def read_model(self, model_config: Any) -> None:
            assert model_config is None
            raise SettingsError("the model has no such token")

    options = read_configuration("kv_both", {}, 1)[0]
    monkeypatch.setattr(
        engine_configuration, "read_configuration", lambda *_: (options, Extension())
    )
    check_transfer_config(transfer())
    with pytest.raises(SettingsError, match="no such token"):
        check_configuration(config(transfer()))


def test_cpus_that_this_host_has_not_are_refused(limit: Any) -> None:
    given = min(os.sched_getaffinity(0))
    engine = config(transfer(copy_cpus=[given]))
    check_configuration(engine)
    engine = config(transfer(copy_cpus=[given, 90_000]))
    with pytest.raises(SettingsError, match=r"copy_cpus: .* found 90000 among them"):
        check_configuration(engine)
    engine.parallel_config.distributed_executor_backend = "ray"
    check_configuration(engine)


@pytest.mark.parametrize(
    ("tp", "engines", "device"),
    [(1, 1, "cpu"), (2, 1, "cpu"), (1, 3, "cpu"), (2, 4, "npu"), (1, 1, "npu"), (2, 2, "cuda")],
)
def test_all_workers_of_a_host_have_to_fit_its_limit(
    limit: Any, tp: int, engines: int, device: str
) -> None:
    """Whatever is in use: it may be free when workers take their parts.

    Only its worker knows whether an NPU can pin memory that torch has not allocated.
    """
    allow: dict[str, Any] = {"allow_cuda": True} if device == "cuda" else {}
    engine = config(
        transfer(host_memory_gib=3, **allow), device, tp, data_parallel_size_local=engines
    )
    need = MemoryNeed(3 * GIB // tp, tp * engines, device == "cuda")
    limit(need.total_bytes, used_bytes=need.total_bytes - 5)
    check_configuration(engine)
    limit(need.total_bytes - 1)
    with pytest.raises(SettingsError, match=r"host_memory_gib: expected .* found 3, ") as error:
        check_configuration(engine)
    message = str(error.value)
    assert f"memory.max allows {need.total_bytes - 1} bytes" in message
    assert str(need) in message
    assert str(need.total_bytes) in message
    assert ("torch pins" in message) == (device == "cuda")
    fitting_gib = float(message.partition("Set host_memory_gib to at most ")[2].split(",")[0])
    assert 1 <= fitting_gib < 3
    fitting = transfer(host_memory_gib=fitting_gib, **allow)
    check_configuration(config(fitting, device, tp, data_parallel_size_local=engines))


@pytest.mark.parametrize(
    "elsewhere",
    [
        {"distributed_executor_backend": "ray"},
        {"distributed_executor_backend": "external_launcher"},
        {"distributed_executor_backend": object},
        {"data_parallel_backend": "ray"},
        {"data_parallel_size_local": 0},
    ],
)
def test_a_host_without_workers_needs_no_memory(limit: Any, elsewhere: dict[str, Any]) -> None:
    limit(1)
    with pytest.raises(SettingsError):
        check_configuration(config(transfer()))
    check_configuration(config(transfer(), **elsewhere))


def report(host: str, left_bytes: int, is_rounded: bool = False) -> HostReport:
    return HostReport(host, MemoryBound("memory.max", left_bytes + 7, 7), is_rounded)


@pytest.mark.parametrize(
    ("device", "is_rounded"), [("cpu", False), ("npu", False), ("npu", True), ("cuda", True)]
)
@pytest.mark.parametrize("which", [0, 1], ids=["alone", "below a MultiConnector"])
def test_workers_of_one_host_are_counted_together(
    device: str, is_rounded: bool, which: int
) -> None:
    """Powers of two are counted where a worker says that torch has to pin its memory."""
    engine = config(both_kinds(host_memory_gib=3)[which], device, tp=2)
    left_bytes = MemoryNeed(3 * GIB // 2, 2, is_rounded).total_bytes
    check_hosts(engine, [report("a", left_bytes, is_rounded)] * 2, 0)
    reports = [report("a", each, is_rounded) for each in (left_bytes, left_bytes - 1)]
    with pytest.raises(HostMemoryError, match=rf"for 2 workers .* found {left_bytes - 1} bytes"):
        check_hosts(engine, reports, 0)


def test_a_worker_says_whether_its_device_pins_only_what_torch_allocates(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(engine_configuration, "why_torch_pins", {"cpu": None, "npu": "old"}.get)
    assert [HostReport.of_this_process(kind).is_rounded for kind in ("cpu", "npu")] == [False, True]


def test_each_host_is_counted_by_itself() -> None:
    engine = config(transfer(host_memory_gib=4), tp=4)
    two, one = (MemoryNeed(GIB, num, is_pinned=False).total_bytes for num in (2, 1))
    unknown = HostReport("c", None)
    check_hosts(engine, [report("a", two), report("a", two), report("b", one), unknown], 0)
    with pytest.raises(HostMemoryError, match="for 1 worker of this host"):
        check_hosts(engine, [report("a", two), report("a", two), report("b", one - 1)], 0)


def test_workers_that_have_their_memory_need_no_more() -> None:
    engine = config(transfer(host_memory_gib=4), tp=4)
    check_hosts(engine, [None, None, None, None], 0)
    check_hosts(engine, [None, report("a", MemoryNeed(GIB, 1, is_pinned=False).total_bytes)], 0)


def test_pages_in_host_memory_are_counted() -> None:
    """On another device, they lie in its own memory."""
    for device, page_bytes in (("cpu", GIB), ("npu", 0)):
        engine = config(transfer(host_memory_gib=4), device, tp=2)
        need = MemoryNeed(2 * GIB, 2, is_pinned=False, page_bytes=page_bytes)
        check_hosts(engine, [report("a", need.total_bytes)] * 2, GIB)
        with pytest.raises(HostMemoryError):
            check_hosts(engine, [report("a", need.total_bytes - 1)] * 2, GIB)


@pytest.mark.parametrize("which", [0, 1], ids=["alone", "below a MultiConnector"])
@pytest.mark.parametrize(
    ("size", "message"),
    [
        ("pipeline_parallel_size", "leave KvextConnector out of --kv-transfer-config"),
        ("decode_context_parallel_size", "; set both sizes to 1, or leave KvextConnector out"),
        ("prefill_context_parallel_size", "; set both sizes to 1, or leave KvextConnector out"),
    ],
)
def test_sizes_of_parallelism_are_refused_before_a_configuration_is_made(
    which: int, size: str, message: str
) -> None:
    """vLLM-Ascend asserts about some of them when it makes the configuration."""
    arguments = {"kv_transfer_config": both_kinds()[which], "pipeline_parallel_size": 1}
    check_arguments(SimpleNamespace(**arguments))
    with pytest.raises(LayoutError, match=message):
        check_arguments(SimpleNamespace(**arguments | {size: 2}))
    check_arguments(SimpleNamespace(**arguments | {size: 2, "kv_transfer_config": None}))
