# SPDX-License-Identifier: Apache-2.0
"""Whether the installed LMCache is that which was read.

Compared when its connector is made, and not when patches are planned: most who have LMCache
installed do not use it, and names of objects, counted blocks and questions to the server prove
themselves, or refuse, with any release. What is changed in LMCache's objects does not.
"""

from __future__ import annotations

import contextlib
import functools
import logging

from vllm_ascend_kvext import compat
from vllm_ascend_kvext.errors import FingerprintError
from vllm_ascend_kvext.patching.fingerprint import fingerprint_source, forget_sources
from vllm_ascend_kvext.patching.store import FingerprintStore

_CONNECTOR = "lmcache.integration.vllm.lmcache_mp_connector:LMCacheMPConnector"
_TRACKER = "lmcache.integration.vllm.lmcache_mp_metadata"
_ADAPTER = "lmcache.integration.vllm.vllm_multi_process_adapter"
_GROUPS = "lmcache.integration.vllm.kv_cache_groups"

RELIED_ON = (
    # How it learns the blocks of a request.
    f"{_CONNECTOR}.update_state_after_alloc",
    f"{_CONNECTOR}.build_connector_meta",
    f"{_CONNECTOR}._process_new_requests",
    f"{_CONNECTOR}._process_cached_requests",
    f"{_TRACKER}:LMCacheMPRequestTracker.append_block_ids",
    f"{_TRACKER}:LMCacheMPRequestTracker.num_allocated_blocks",
    f"{_TRACKER}:LMCacheMPRequestMetadata.GetStoreMetadata",
    # How a server that is back is taken up again.
    f"{_ADAPTER}:HeartbeatThread._execute",
    f"{_ADAPTER}:LMCacheMPSchedulerAdapter._ensure_heartbeat_started",
    f"{_ADAPTER}:LMCacheMPWorkerAdapter._ensure_heartbeat_started",
    f"{_ADAPTER}:LMCacheMPWorkerAdapter._reregister_kv_caches_callback",
    # What is read of the specs.
    f"{_GROUPS}:get_tokens_per_block",
    f"{_GROUPS}:create_engine_group_infos_from_vllm",
)

logger = logging.getLogger("vllm.ascend_kvext.lmcache")


def version() -> str | None:
    """Of the installed LMCache; None where there is none."""
    return compat.installed_version("lmcache", distributions=(compat.LMCACHE,))


@functools.cache
def is_as_read() -> bool:
    """Whether all of LMCache that is relied on is what was read. If not, it is said once."""
    found_version, differing = version(), differences(FingerprintStore.load())
    if differing:
        logger.warning(
            "LMCacheMPConnector: expected LMCache 0.5.6, found %s, in which %s differ from "
            "what was read. Names of objects and what is asked before the start are not affected. "
            "Stores are wrong below MultiConnector, and a server that comes back with other chunks "
            "is used. Install LMCache 0.5.6.",
            found_version,
            ", ".join(differing),
        )
    return not differing


def differences(store: FingerprintStore) -> list[str]:
    """Functions of the installed LMCache that are not as stored."""
    folder = compat.package_folder("lmcache")
    if folder is None:
        return list(RELIED_ON)
    found_version, found = version() or "", {}
    for name in RELIED_ON:
        with contextlib.suppress(FingerprintError):
            found[name] = fingerprint_source(folder.parent, name)
    forget_sources()
    return [
        name
        for name in RELIED_ON
        if found.get(name) not in store.expected(compat.LMCACHE, found_version, name)
    ]
