# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vllm-ascend-kvext project
"""Starts processes for work that needs its own, such as engines, or code with vllm-ascend."""

from __future__ import annotations

import multiprocessing
import os
import sys
from collections.abc import Mapping
from concurrent.futures import ProcessPoolExecutor

from common.report import ROOT

ASCEND_VARIABLE = "KVEXT_ASCEND_SOURCES"
TEST_FOLDERS = tuple(str(ROOT / "tests" / folder) for folder in ("", "ascend"))


def has_ascend() -> bool:
    """Whether there is a vllm-ascend. The folder is empty if no wheel fits this machine."""
    folder = os.environ.get(ASCEND_VARIABLE)
    return bool(folder) and os.path.isdir(os.path.join(folder, "vllm_ascend"))


def processes(
    number: int = 1, environ: Mapping[str, str] | None = None, is_ascend: bool = False
) -> ProcessPoolExecutor:
    """Fresh processes that run functions of modules below ``benchmarks/``.

    Args:
        number: The number of processes.
        environ: Variables to set in the processes, unless they are set in this process.
        is_ascend: Whether vllm-ascend is active in the processes, from the folder that
            `ASCEND_VARIABLE` names.
    """
    return ProcessPoolExecutor(
        number,
        mp_context=multiprocessing.get_context("spawn"),
        initializer=_prepare,
        initargs=({"VLLM_LOGGING_LEVEL": "ERROR", **(environ or {})}, is_ascend),
    )


def _prepare(environ: Mapping[str, str], is_ascend: bool) -> None:
    os.environ.update({name: os.environ.get(name, value) for name, value in environ.items()})
    sys.path += [folder for folder in TEST_FOLDERS if folder not in sys.path]
    if is_ascend:
        import ascend_sources

        folder = ascend_sources.sources()
        if folder is None:
            raise SystemExit(f"set {ASCEND_VARIABLE} for layouts of vllm-ascend")
        ascend_sources.activate(folder)
