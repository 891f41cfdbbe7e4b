# SPDX-License-Identifier: Apache-2.0
"""What LMCache's connector has stored of a request, and how its server is asked for it.

The scheduler's side of LMCache 0.5.6's connector is read: its ``request_trackers`` know how far a
request has been stored, and its adapter makes the keys for all workers and has a client of every
server. A lookup locks what it finds, so that each is followed by the release of these locks and by
the end of its session.
"""

from __future__ import annotations

import itertools
import time
from collections.abc import Callable
from typing import Any

from vllm_ascend_kvext.lmcache.store_checks import Find, StoreChecks, Stored

ANSWER_LIMIT_S = 2.0
_POLL_S = 0.01

_PREFIX = "kvext-stored-"
"""Of the sessions in which is asked; LMCache's own bear the names of requests."""


def watch_stores(connector: Any, *, can_look_up: bool) -> StoreChecks | None:
    """Have looked up what requests have stored, once all their stores have ended.

    Args:
        connector: LMCache's, of the scheduler.
        can_look_up: Whether what is stored is found by a lookup of the same tokens; if not, all of
            it counts as unchecked. Of recurrent states LMCache stores those at the end of a step,
            so that a shorter hit does not mean that a store has failed.

    Returns:
        What was counted is there; None where the connector is of a worker, or does not say when
        stores have ended (``lmcache.mp.lazy_offload``).
    """
    adapter: Any = getattr(connector, "scheduler_adapter", None)
    if adapter is None or getattr(connector, "lazy_offload", False):
        return None
    checks = StoreChecks(find_with(adapter), ", ".join(adapter.req_clients))
    unfinished: dict[str, Stored] = {}
    finish, update, shut_down = (
        connector.request_finished,
        connector.update_connector_output,
        adapter.shutdown,
    )

    def request_finished(request: Any, block_ids: Any) -> Any:
        stored = _stored(connector.request_trackers.get(request.request_id))
        is_storing, parameters = finish(request, block_ids)
        if stored is not None and is_storing:
            unfinished[stored.request_id] = stored
        return is_storing, parameters

    def update_connector_output(output: Any) -> None:
        update(output)
        for request_id in output.finished_sending or ():
            stored = unfinished.pop(request_id, None)
            if stored is None:
                continue
            if can_look_up and adapter.is_healthy:
                checks.submit(stored)
            else:
                checks.add_unchecked(stored.num_tokens)

    def shut_down_with_checks() -> None:
        checks.stop()
        shut_down()

    connector.request_finished = request_finished
    connector.update_connector_output = update_connector_output
    adapter.shutdown = shut_down_with_checks
    return checks


def find_with(adapter: Any) -> Find:
    """A question that is put to all servers of LMCache's adapter of the scheduler."""
    numbers = itertools.count()

    def find(stored: Stored) -> int:
        session = f"{_PREFIX}{stored.request_id}-{next(numbers)}"

        def key(end_tokens: int) -> Any:
            return adapter._create_key(
                stored.token_ids,
                start=0,
                end=end_tokens,
                request_id=session,
                cache_salt=stored.cache_salt,
                request_configs=stored.request_configs,
            ).no_worker_id_version()

        return min(
            _find(client, session, key, stored.end_tokens, adapter)
            for client in adapter.req_clients.values()
        )

    return find


def _find(
    client: Any, session: str, key: Callable[[int], Any], end_tokens: int, adapter: Any
) -> int:
    limit_s = time.monotonic() + ANSWER_LIMIT_S

    def left_s() -> float:
        return max(0.0, limit_s - time.monotonic())

    client.lookup(key(end_tokens), adapter.tp_size).result(timeout=left_s())
    while True:
        num_chunks = client.query_prefetch_status(session).result(timeout=left_s())
        if num_chunks is not None:
            break
        if not left_s():
            raise TimeoutError
        time.sleep(_POLL_S)
    found_tokens = int(num_chunks) * int(adapter.lmcache_tokens_per_chunk)
    if found_tokens:
        # The server takes both by several threads: the session has to outlast the release.
        client.free_lookup_locks(key(found_tokens), adapter.tp_size).result(timeout=left_s())
    client.end_session(session)
    return found_tokens


def _stored(tracker: Any) -> Stored | None:
    """Of LMCache's tracker of a request that has stored something."""
    if tracker is None or tracker.num_stored_tokens <= tracker.num_lmcache_hit_tokens:
        return None
    return Stored(
        request_id=tracker.request_id,
        token_ids=tracker.get_token_ids()[: tracker.num_stored_tokens],
        begin_tokens=tracker.num_lmcache_hit_tokens,
        end_tokens=tracker.num_stored_tokens,
        cache_salt=tracker.cache_salt,
        request_configs=tracker.request_configs,
    )
