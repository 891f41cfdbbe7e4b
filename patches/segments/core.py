# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vllm-ascend-kvext project
"""``vllm/v1/engine/core.py``: learning ends before a reset, and before a shutdown.

A reset of the prefix cache makes steps until transfers have ended, and is refused while requests
hold blocks. An engine that shuts down makes steps as long as there are requests. In both cases,
requests that learn segments count, and each step may begin further requests of this kind.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from vllm_ascend_kvext.patches.connector.scheduler import side_of
from vllm_ascend_kvext.patches.segments.learned_requests import cancel_learning
from vllm_ascend_kvext.patching.declaration import Patch
from vllm_ascend_kvext.segments.scheduler.segments_side import segments_of

if TYPE_CHECKING:
    from vllm.v1.core.sched.scheduler import Scheduler
    from vllm.v1.engine.core import EngineCore, EngineCoreProc

    from vllm_ascend_kvext.segments.scheduler.segment_learning import SegmentLearning


def hold_learning(
    wrapped: Callable[..., bool], core: EngineCore, *args: Any, **kwargs: Any
) -> bool:
    """Compute no segments during a reset of the prefix cache, and during steps made for it."""
    learning = _learning_of(core.scheduler)
    if learning is None:
        return wrapped(*args, **kwargs)
    cancel_learning(core.scheduler, learning)
    learning.is_held = True
    try:
        return wrapped(*args, **kwargs)
    finally:
        learning.is_held = False


def stop_learning_at_shutdown(wrapped: Callable[..., bool], core: EngineCoreProc) -> bool:
    """Compute no segments for host memory that ends with this process."""
    learning = _learning_of(core.scheduler)
    if learning is not None and not core.is_running():
        cancel_learning(core.scheduler, learning)
        learning.stop()
    return wrapped()


def _learning_of(scheduler: Scheduler) -> SegmentLearning | None:
    segments = segments_of(side_of(scheduler))
    return None if segments is None else segments.learning


PATCHES = (
    Patch(
        id="KVX-416",
        target="vllm.v1.engine.core:EngineCore.reset_prefix_cache",
        feature="connector",
        wrapper=hold_learning,
        why="The prefix cache cannot be reset while a request that learns a segment holds blocks, "
        "and the steps that end transfers before a reset (KVX-403) may begin such requests.",
        retire_when="KVX-403 is retired, and upstream tells its connector before a reset",
    ),
    Patch(
        id="KVX-408",
        target="vllm.v1.engine.core:EngineCoreProc._handle_shutdown",
        feature="connector",
        wrapper=stop_learning_at_shutdown,
        why="An engine that shuts down makes steps until no request is left, and each of them may "
        "begin requests that learn segments, for host memory that ends with the process.",
        retire_when="upstream tells its scheduler or its connector of a shutdown",
        relies_on=("vllm.v1.engine.core:EngineCoreProc.is_running",),
    ),
)
