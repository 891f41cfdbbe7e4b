# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vllm-ascend-kvext project
"""Checks what a user has configured, as early as it can be known to be wrong.

    check_transfer_config  when vLLM has read its argument --kv-transfer-config
    check_arguments        when vLLM has read all arguments
    check_configuration    when vLLM has made its configuration, before it starts another process
    check_hosts            when the weights are loaded, before a worker takes its host memory

What only the pages of a model tell is checked by the two sides of the connector. The module reads
vLLM's configuration by attributes, and does not import vLLM.
"""

from __future__ import annotations

import platform
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple

from vllm_ascend_kvext.connector.common.host_memory import (
    MemoryBound,
    MemoryNeed,
    require_left,
    smallest_limit,
    tightest_bound,
)
from vllm_ascend_kvext.connector.common.option_values import CONFIG
from vllm_ascend_kvext.connector.common.options import ConnectorOptions
from vllm_ascend_kvext.connector.extension import read_configuration
from vllm_ascend_kvext.connector.worker.host_buffer import why_torch_pins
from vllm_ascend_kvext.connector.worker.worker_side import require_allowed, require_given
from vllm_ascend_kvext.errors import SettingsError
from vllm_ascend_kvext.layout.worker_config import require_one_layout, require_supported

_GIB = 1 << 30

NAME = "KvextConnector"
"""The ``kv_connector`` of a configuration."""

_LOCAL_BACKENDS = ("mp", "uni")
"""Values of ``distributed_executor_backend`` that start workers on the host of their engine."""


class HostReport(NamedTuple):
    """What a worker says of its host before it takes memory.

    Attributes:
        host: The name of the host.
        bound: The tightest bound of the worker's process; None if the host says nothing.
        is_rounded: Whether torch pins the worker's memory, which rounds it to a power of two.
    """

    host: str
    bound: MemoryBound | None
    is_rounded: bool = False

    @classmethod
    def of_this_process(cls, device_type: str) -> HostReport:
        """What this worker finds, after its device has been set."""
        is_rounded = why_torch_pins(device_type) is not None
        return cls(platform.node(), tightest_bound(), is_rounded)


def check_transfer_config(transfer_config: Any) -> None:
    """Refuse options that are wrong in every engine. Nothing is done without KvextConnector.

    Args:
        transfer_config: vLLM's ``KVTransferConfig``.

    Raises:
        SettingsError: See `read_configuration`.
    """
    for kv_role, extra_config in _kvext_connectors(transfer_config):
        read_configuration(kv_role, extra_config, 1)


def check_arguments(engine_args: Any) -> None:
    """Refuse sizes of parallelism that are not supported. Nothing is done without KvextConnector.

    The platform checks some of them when it makes the configuration. What it says is about engines
    with a connector for separate nodes.

    Args:
        engine_args: vLLM's ``EngineArgs``.

    Raises:
        LayoutError: If the engine uses pipeline or context parallelism.
    """
    # vLLM also takes a mapping, and makes its own object of it for the configuration.
    is_mapping = isinstance(engine_args.kv_transfer_config, Mapping)
    if not is_mapping and has_connector(engine_args):
        require_one_layout(engine_args)


def check_configuration(vllm_config: Any) -> None:
    """Refuse what cannot work with any number of pages. Nothing is done without KvextConnector.

    The bounds of memory are compared with their limits, whatever is in use: it may be free again
    when workers take their parts.

    Args:
        vllm_config: vLLM's ``VllmConfig``.

    Raises:
        LayoutError: If the engine is parallel in a way, or has a type of cache, that is not
            supported.
        SettingsError: If an option is wrong, or does not suit the model, the device or the host.
    """
    parallel = vllm_config.parallel_config
    for kv_role, extra_config in _kvext_connectors(vllm_config.kv_transfer_config):
        options, extension = read_configuration(kv_role, extra_config, parallel.world_size)
        if extension is not None:
            extension.read_model(vllm_config.model_config)
        require_allowed(vllm_config.device_config.device_type, options)
        require_supported(vllm_config)
        num_workers = _workers_of_this_host(parallel)
        if num_workers:
            require_given(options)
            # Whether an NPU can pin memory that torch has not allocated is known by its worker.
            is_rounded = vllm_config.device_config.device_type not in ("cpu", "npu")
            need = _need(vllm_config, options, num_workers, is_rounded=is_rounded)
            _require_within_limit(need, options)


def check_hosts(vllm_config: Any, reports: Sequence[HostReport | None], page_bytes: int) -> None:
    """Refuse an engine for whose workers together some host has too little memory left.

    Args:
        vllm_config: vLLM's ``VllmConfig``.
        reports: What the workers say; None from a worker that has its memory already.
        page_bytes: The KV cache of each worker, which it takes before its host memory.

    Raises:
        HostMemoryError: If a host has too little.
        SettingsError: If an option is wrong.
    """
    world_size = vllm_config.parallel_config.world_size
    num_workers = Counter(report.host for report in reports if report is not None)
    for kv_role, extra_config in _kvext_connectors(vllm_config.kv_transfer_config):
        options, _ = read_configuration(kv_role, extra_config, world_size)
        for report in reports:
            if report is not None and report.bound is not None:
                workers = num_workers[report.host]
                need = _need(
                    vllm_config, options, workers, page_bytes, is_rounded=report.is_rounded
                )
                remedy = fitting_memory(need, report.bound.left_bytes, world_size)
                require_left(need, report.bound, remedy)


def has_connector(vllm_config: Any) -> bool:
    """Whether an engine has KvextConnector, by itself or below a MultiConnector.

    Args:
        vllm_config: vLLM's ``VllmConfig`` or ``EngineArgs``.
    """
    return any(True for _ in _kvext_connectors(vllm_config.kv_transfer_config))


def _kvext_connectors(
    transfer_config: Any,
) -> Iterator[tuple[str | None, Mapping[str, Any] | None]]:
    """The role and the ``kv_connector_extra_config`` of each KvextConnector of an engine."""
    if transfer_config is None:
        return
    extra_config = transfer_config.kv_connector_extra_config
    if transfer_config.kv_connector == NAME:
        yield transfer_config.kv_role, extra_config
    if transfer_config.kv_connector == "MultiConnector":
        for child in extra_config.get("connectors") or ():
            if isinstance(child, Mapping) and child.get("kv_connector") == NAME:
                yield child.get("kv_role"), child.get("kv_connector_extra_config")


def _workers_of_this_host(parallel: Any) -> int:
    """The workers of all engines that this process starts on its host; 0 if that is not known."""
    if parallel.distributed_executor_backend not in _LOCAL_BACKENDS:
        return 0
    if parallel.data_parallel_backend not in _LOCAL_BACKENDS:
        return 0
    return int(parallel.local_world_size * parallel.data_parallel_size_local)


def _need(
    vllm_config: Any,
    options: ConnectorOptions,
    num_workers: int,
    page_bytes: int = 0,
    *,
    is_rounded: bool,
) -> MemoryNeed:
    has_pages = vllm_config.device_config.device_type == "cpu"
    buffer_bytes = options.host_memory_bytes_per_worker
    return MemoryNeed(buffer_bytes, num_workers, is_rounded, page_bytes if has_pages else 0)


def _require_within_limit(need: MemoryNeed, options: ConnectorOptions) -> None:
    bound = smallest_limit()
    if bound is not None and need.total_bytes > bound.limit_bytes:
        raise SettingsError(
            f"{CONFIG}: host_memory_gib: expected no more than this host has, found "
            f"{options.host_memory_gib:g}, which takes {need}: {bound}. "
            f"{fitting_memory(need, bound.left_bytes, options.world_size)} The model and its KV "
            "cache may need some of it, too."
        )


def fitting_memory(need: MemoryNeed, left_bytes: int, num_workers_of_engine: int) -> str:
    """The remedy where ``left_bytes`` are too few for ``need``.

    Args:
        num_workers_of_engine: ``host_memory_gib`` is the memory of so many workers.
    """
    fitting_bytes = need.largest_buffer_bytes(left_bytes) * num_workers_of_engine
    # Rounded down, so that the number in the message fits.
    fitting_gib = fitting_bytes * 100 // _GIB / 100
    if not fitting_gib:
        return "Give the host more memory, or leave the connector out."
    return f"Set host_memory_gib to at most {fitting_gib:g}, or give the host more memory."
