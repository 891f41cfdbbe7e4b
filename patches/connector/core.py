# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vllm-ascend-kvext project
"""``vllm/v1/engine/core.py``: stores end before a reset.

A reset of the prefix cache is refused while blocks are in use, such as blocks that a store reads.
Only the next step notices the end of a store. An engine without requests may never make a step.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from vllm_ascend_kvext.patches.connector.scheduler import side_of
from vllm_ascend_kvext.patching.declaration import Patch

if TYPE_CHECKING:
    from vllm.v1.engine.core import EngineCore


MAX_DRAINING_S = 30.0
"""The longest time that steps are made for transfers before a reset."""


def drain_before_reset(
    wrapped: Callable[..., bool], core: EngineCore, *args: Any, **kwargs: Any
) -> bool:
    """Make steps until no transfer is under way, if that loses no output of a request."""
    side = side_of(core.scheduler)
    if side is None:
        return wrapped(*args, **kwargs)
    side.release_pages()
    deadline_s = time.monotonic() + MAX_DRAINING_S
    while side.has_transfers and not _has_outputs_to_come(core) and time.monotonic() < deadline_s:
        _step(core)
    return wrapped(*args, **kwargs)


def _has_outputs_to_come(core: EngineCore) -> bool:
    # While the scheduler is paused, upstream counts no requests, even if a step is in flight.
    if _sending_step(core) is None:
        # An aborted request that loads stays in `requests` until a step reports the end of its
        # load.
        return any(not request.is_finished() for request in core.scheduler.requests.values())
    return core.scheduler.has_unfinished_requests()


def _sending_step(core: EngineCore) -> Callable[[], object] | None:
    """The step of an engine in its own process, which sends outputs; None for other engines."""
    return getattr(core, "_process_engine_step", None)


def _step(core: EngineCore) -> None:
    step = _sending_step(core)
    if step is not None:
        step()
    else:
        _, is_executed = core.step_fn()
        core.post_step(is_executed)


PATCHES = (
    Patch(
        id="KVX-403",
        target="vllm.v1.engine.core:EngineCore.reset_prefix_cache",
        feature="connector",
        wrapper=drain_before_reset,
        why="The prefix cache cannot be reset while a store reads a block, and without requests "
        "no step notices that it has ended.",
        retire_when="upstream waits for its connector before a reset",
    ),
)
