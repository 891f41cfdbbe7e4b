# SPDX-License-Identifier: Apache-2.0
"""``vllm/distributed/kv_transfer/kv_connector/factory.py``: what LMCache's connector is given.

It takes the name of its objects, and the tokens of its blocks, from the two configs that vLLM hands
it. Ours are copies that differ in these, made for it alone; LMCache's code stays as it is. vLLM
gets a class whose objects are made in this way, so that it does not matter who makes them: the
factory, or `MultiConnector`.
"""

from __future__ import annotations

import copy
import functools
import logging
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import closing
from typing import TYPE_CHECKING, Any

from vllm_ascend_kvext import compat
from vllm_ascend_kvext.lmcache import handshake
from vllm_ascend_kvext.lmcache.object_names import config_fingerprint, object_name, require_name
from vllm_ascend_kvext.lmcache.recovery import (
    refuse_other_chunks_of_scheduler,
    refuse_other_chunks_of_worker,
)
from vllm_ascend_kvext.lmcache.token_blocks import counted_in_tokens
from vllm_ascend_kvext.patches.lmcache import known_release
from vllm_ascend_kvext.patching.declaration import Patch
from vllm_ascend_kvext.settings import Switch, parse_lmcache_keys

if TYPE_CHECKING:
    from vllm.config import VllmConfig
    from vllm.distributed.kv_transfer.kv_connector.v1 import KVConnectorRole
    from vllm.v1.kv_cache_interface import KVCacheConfig

NAME = "LMCacheMPConnector"

logger = logging.getLogger("vllm.ascend_kvext.lmcache")


def get_connector_class(
    wrapped: Callable[..., Any], factory: type, *args: Any, **kwargs: Any
) -> Any:
    """The class of a connector; of LMCache's, also below `MultiConnector`, `_prepared_class`."""
    connector_class = wrapped(*args, **kwargs)
    if connector_class.__name__ != NAME or hasattr(connector_class, "_kvext_server_urls"):
        return connector_class
    return _prepared_class(connector_class)


@functools.cache  # vLLM compares classes.
def _prepared_class(connector_class: Any) -> Any:
    """LMCache's class, with objects that are made of copies of the configs."""

    class PreparedConnector(connector_class):  # type: ignore[misc]
        _kvext_tells_first_blocks = False
        _kvext_server_urls: tuple[str, ...] = ()

        def __init__(
            self, vllm_config: VllmConfig, role: KVConnectorRole, kv_cache_config: KVCacheConfig
        ) -> None:
            """Ask the servers first; raises `LMCacheError` if one does not fit."""
            if vllm_config.kv_transfer_config is None or not kv_cache_config.kv_cache_groups:
                super().__init__(vllm_config, role, kv_cache_config)
                return
            kv_cache_config = counted_in_tokens(kv_cache_config)
            name = _object_name(vllm_config, kv_cache_config)
            options = dict(vllm_config.kv_transfer_config.kv_connector_extra_config)
            is_worker = role.name == "WORKER"
            ask_servers(vllm_config, kv_cache_config, options, is_worker=is_worker)
            own_config = _with_name_and_options(vllm_config, name, options)
            super().__init__(own_config, role, kv_cache_config)
            if name != vllm_config.model_config.model:
                require_name(self, name)
            self._kvext_server_urls = handshake.server_urls(options)
            if not known_release.is_as_read():
                return
            if is_worker:
                refuse_other_chunks_of_worker(self.worker_adapter)
            else:
                refuse_other_chunks_of_scheduler(self.scheduler_adapter)
                self._kvext_tells_first_blocks = True

        def register_kv_caches(self, kv_caches: dict[str, Any]) -> None:
            """Raises `LMCacheError` if the server does not take the worker's pages in time."""
            try:
                super().register_kv_caches(kv_caches)
            except ConnectionError as error:
                raise handshake.refused_registration(
                    self._kvext_server_urls, str(known_release.version())
                ) from error

        def build_connector_meta(self, scheduler_output: Any) -> Any:
            if self._kvext_tells_first_blocks:
                tell_first_blocks(self.request_trackers, scheduler_output)
            return super().build_connector_meta(scheduler_output)

    # `MultiConnector` tells the reports of several connectors apart by the names of their classes.
    PreparedConnector.__name__ = PreparedConnector.__qualname__ = NAME
    return PreparedConnector


def tell_first_blocks(request_trackers: Mapping[str, Any], scheduler_output: Any) -> None:
    """Let LMCache's trackers know the blocks of every request that begins in a step.

    `MultiConnector` tells a connector of no blocks unless that one loads the request
    (``update_state_after_alloc``), and LMCache 0.5.6 counts on being told: it would take the blocks
    of the next step for those of the first tokens, and store them under these. What vLLM schedules
    has all blocks of a request that begins or goes on after a preemption. LMCache has not planned
    the step yet.
    """
    for request_id, group_block_ids in _beginning(scheduler_output):
        tracker = request_trackers.get(request_id)
        if tracker is not None and not any(tracker.num_allocated_blocks().values()):
            tracker.append_block_ids(tuple(map(list, group_block_ids)))


def _beginning(scheduler_output: Any) -> Iterator[tuple[str, Sequence[Sequence[int]]]]:
    """Requests that begin or go on after a preemption, each with all its blocks by group."""
    for request in scheduler_output.scheduled_new_reqs:
        yield request.req_id, request.block_ids
    cached = scheduler_output.scheduled_cached_reqs
    if not cached.resumed_req_ids:
        return
    for request_id, group_block_ids in zip(cached.req_ids, cached.new_block_ids, strict=True):
        if request_id in cached.resumed_req_ids and group_block_ids is not None:
            yield request_id, group_block_ids


def ask_servers(
    config: VllmConfig, kv_cache_config: KVCacheConfig, options: dict[str, Any], *, is_worker: bool
) -> None:
    """Refuse servers that do not fit, and set what the user has left open.

    They are asked with LMCache's own client and its own reading of the specs.

    Args:
        kv_cache_config: Its groups count tokens.
        options: ``kv_connector_extra_config`` of the connector. It gets the transfer mode, and how
            long a worker waits when it starts, registers its pages and ends.

    Raises:
        LMCacheError: If a server is not there or does not fit.
    """
    if handshake.starts_its_server(options):
        return
    urls = handshake.server_urls(options)
    if is_worker:
        options.setdefault(handshake.TIMEOUT_KEY, handshake.REGISTRATION_LIMIT_S)
        if len(urls) > 1:
            return  # It uses that of its own host, and may not reach the others.
    has_mode = is_worker and config.device_config.device_type == "cpu"
    for url in urls:
        handshake.require_listening(url)
        try:
            import zmq
            from lmcache.integration.vllm.lmcache_mp_connector import get_group_tokens_per_block
            from lmcache.v1.multiprocess.transport.factory import RequestClientFactory
        except ImportError:
            return  # Another LMCache; its connector asks in its own way.
        group_tokens = get_group_tokens_per_block(config, kv_cache_config)
        with closing(RequestClientFactory.create(url, context=zmq.Context.instance())) as client:
            chunk_tokens = handshake.require_same_release(client, url, str(known_release.version()))
            handshake.require_whole_blocks(chunk_tokens, group_tokens, url)
            if not has_mode:
                continue
            wanted = options.get(
                handshake.TRANSFER_MODE_KEY, os.environ.get(handshake.TRANSFER_MODE_VARIABLE)
            )
            wanted = str(wanted or "auto").strip().lower()
            if mode := handshake.choose_transfer_mode(client, url, wanted):
                options[handshake.TRANSFER_MODE_KEY] = mode


def _with_name_and_options(config: VllmConfig, name: str, options: dict[str, Any]) -> Any:
    """A copy of vLLM's config for the connector alone; the engine's stays as it is."""
    new_config = copy.copy(config)
    new_config.model_config = copy.copy(config.model_config)
    new_config.model_config.model = name
    new_config.kv_transfer_config = copy.copy(config.kv_transfer_config)
    new_config.kv_transfer_config.kv_connector_extra_config = options
    return new_config


def _object_name(config: VllmConfig, kv_cache_config: KVCacheConfig) -> str:
    """With the layout for several groups, or where the user wants it."""
    model_name = config.model_config.model
    keys = parse_lmcache_keys(os.environ)
    has_layout = (
        len(kv_cache_config.kv_cache_groups) > 1 if keys is Switch.AUTO else keys is Switch.ON
    )
    if not has_layout:
        return model_name
    upstream = compat.detect(os.environ)
    fingerprint = config_fingerprint(
        config,
        kv_cache_config,
        versions={
            compat.VLLM: upstream.vllm,
            compat.VLLM_ASCEND: upstream.vllm_ascend,
            compat.LMCACHE: known_release.version(),
        },
        instruction_set=_instruction_set(config),
        environ=os.environ,
    )
    name = object_name(model_name, fingerprint)
    logger.info("LMCache's objects of this engine lie under %s.", name)
    return name


def _instruction_set(config: VllmConfig) -> str:
    """Kernels on a CPU order a page by it."""
    if config.device_config.device_type != "cpu":
        return ""
    import torch

    return str(torch.backends.cpu.get_cpu_capability())


_FACTORY = "vllm.distributed.kv_transfer.kv_connector.factory:KVConnectorFactory"

PATCHES = (
    Patch(
        id="KVX-501",
        target=f"{_FACTORY}.get_connector_class",
        feature="lmcache",
        wrapper=get_connector_class,
        why="LMCache keys objects by the model's name, and engines with other KV cache groups read "
        "each other's; it takes the rows of vLLM-Ascend's compressed blocks for tokens; and a "
        "server that is absent or set up otherwise is noticed after five minutes.",
        retire_when="LMCache's keys have the layout, and its connector asks its server what it "
        "serves",
        relies_on=(
            # Both sides get a config, and the scheduler's has the first spec of a bundle.
            "vllm.v1.core.kv_cache_utils:generate_scheduler_kv_cache_config",
            "vllm.distributed.kv_transfer.kv_transfer_state:ensure_kv_transfer_initialized",
            # Makes an object of the class that it asks for. `MultiConnector` does the same; it is
            # not read here, because its module imports prometheus_client before vLLM has set that
            # up.
            f"{_FACTORY}.create_connector",
        ),
        lmcache=known_release.RELIED_ON,
    ),
)
