# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vllm-ascend-kvext project
"""Selects the block managers of a test process: vLLM's own, or those of vLLM-Ascend.

vLLM-Ascend's patches last for the whole life of a process. So one family is chosen for all tests of
a process, with ``KVEXT_MANAGERS=ascend`` and ``KVEXT_ASCEND_SOURCES``. The cases are the same, but
the layouts are those of the family (`support.scheduler.layouts`). Before `activate` is called, the
module imports nothing of vLLM.
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
    """Apply vLLM-Ascend's real platform patches to this process, like its own plugins do.

    Raises:
        ValueError: If the sources of vLLM-Ascend are missing, or do not fit this vLLM.
    """
    sys.path.append(str(Path(__file__).resolve().parents[1] / "ascend"))
    import ascend_sources

    folder = ascend_sources.sources()
    if folder is None:
        raise ValueError(f"KVEXT_MANAGERS=ascend: set {ascend_sources.SOURCES_VARIABLE}, too")
    ascend_sources.activate(folder)
    from vllm.v1.core.single_type_kv_cache_manager import register_all_kvcache_specs

    register_all_kvcache_specs(None)  # As in an engine core. It reads no config.


@contextmanager
def no_free_list_diagnostics() -> Iterator[None]:
    """Check that no block is freed twice. vLLM-Ascend only logs a warning then."""
    messages: list[str] = []
    handler = logging.Handler(logging.WARNING)
    handler.emit = lambda record: messages.append(record.getMessage())  # type: ignore[method-assign]
    logger = logging.getLogger("vllm")  # vLLM-Ascend logs through vLLM's loggers.
    logger.addHandler(handler)
    try:
        yield
    finally:
        logger.removeHandler(handler)
    assert not [message for message in messages if "SWA_BLOCK_DIAG" in message]
