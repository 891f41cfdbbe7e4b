# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vllm-ascend-kvext project
"""Makes the real vllm-ascend importable without an NPU.

``KVEXT_ASCEND_SOURCES`` names a folder that holds an unpacked ``vllm_ascend/``. Imports nothing
of vLLM before `activate` is called.
"""

from __future__ import annotations

import importlib
import os
import sys
from pathlib import Path

from vllm_ascend_kvext.compat import detect, why_unsupported

SOURCES_VARIABLE = "KVEXT_ASCEND_SOURCES"
STUB = Path(__file__).parent / "stub"


def sources() -> Path | None:
    """The folder that holds ``vllm_ascend/``, or None if the variable is not set.

    Raises:
        ValueError: If the variable names a folder that cannot be used.
    """
    value = os.environ.get(SOURCES_VARIABLE)
    if not value:
        return None
    folder = Path(value).resolve()
    expected = f"{SOURCES_VARIABLE}={value}: expected a folder that holds the package vllm_ascend"
    if not (folder / "vllm_ascend" / "__init__.py").is_file():
        raise ValueError(f"{expected}, found none there; unpack a vllm-ascend wheel into it")
    if metadata := sorted(folder.glob("vllm_ascend-*.dist-info")):
        raise ValueError(
            f"{expected} alone, found {metadata[0].name} too: with it vLLM takes the NPU for its "
            "platform; remove it"
        )
    return folder


def activate(folder: Path) -> None:
    """Apply vllm-ascend's platform patches to this process, as its own plugins do.

    Raises:
        ValueError: If this vllm-ascend is not the one for the installed vLLM.
    """
    # Last, so that a real torch_npu wins over the stub.
    sys.path += [str(folder), str(STUB)]
    reason = why_unsupported(detect(os.environ))
    if reason:
        raise ValueError(f"{SOURCES_VARIABLE}={folder}: {reason}")
    importlib.import_module("vllm_ascend")._ensure_global_patch()
    # vllm-ascend's platform registers its spec classes when an NPU is in use.
    importlib.import_module("vllm_ascend.core.kv_cache_interface").register_ascend_kv_cache_specs()
