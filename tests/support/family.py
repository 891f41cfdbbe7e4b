# SPDX-License-Identifier: Apache-2.0
"""Whose block managers a test process has: vLLM's own, or those that vLLM-Ascend replaces them by.

vLLM-Ascend's patches stay for the whole life of a process, so that the family is chosen for all of
its tests: ``KVEXT_MANAGERS=ascend``, beside ``KVEXT_ASCEND_SOURCES``. Cases are the same; layouts
are those of the family (`support.scheduler.layouts`). Imports nothing of vLLM before `activate` is
called.
"""

from __future__ import annotations

import logging
import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

IS_ASCEND = os.environ.get("KVEXT_MANAGERS") == "ascend"


def activate() -> None:
    """Apply vLLM-Ascend's real platform patches to this process, as its own plugins do.

    Raises:
        ValueError: If the sources of vLLM-Ascend are missing, or are not those for this vLLM.
    """
    sys.path.append(str(Path(__file__).resolve().parents[1] / "ascend"))
    import ascend_sources

    folder = ascend_sources.sources()
    if folder is None:
        raise ValueError(f"KVEXT_MANAGERS=ascend: set {ascend_sources.SOURCES_VARIABLE}, too")
    ascend_sources.activate(folder)
    from vllm.v1.core.single_type_kv_cache_manager import register_all_kvcache_specs

    register_all_kvcache_specs(None)  # as an engine core does; it reads no configuration


@contextmanager
def no_free_list_diagnostics() -> Iterator[None]:
    """vLLM-Ascend drops double frees and the like with a warning; a test must not cause any."""
    messages: list[str] = []
    handler = logging.Handler(logging.WARNING)
    handler.emit = lambda record: messages.append(record.getMessage())  # type: ignore[method-assign]
    logger = logging.getLogger("vllm")  # vLLM-Ascend logs through vLLM's loggers
    logger.addHandler(handler)
    try:
        yield
    finally:
        logger.removeHandler(handler)
    assert not [message for message in messages if "SWA_BLOCK_DIAG" in message]
