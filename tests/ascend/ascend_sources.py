# SPDX-License-Identifier: Apache-2.0
"""Makes the real vllm-ascend importable without an NPU, here or in a subprocess.

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
    register_specs()


def register_specs() -> None:
    """vllm-ascend's platform registers its spec classes when an NPU is in use."""
    interface = importlib.import_module("vllm_ascend.core.kv_cache_interface")
    interface.register_ascend_kv_cache_specs()


def subprocess_environment(folder: Path, **variables: str) -> dict[str, str]:
    """The environment in which a Python process can import vllm-ascend and the stub."""
    kept = {name: value for name, value in os.environ.items() if not name.startswith("VLLM_")}
    python_path = os.pathsep.join([str(folder), str(STUB), *_inherited_python_path()])
    return kept | {"PYTHONPATH": python_path} | variables


def _inherited_python_path() -> list[str]:
    return [entry for entry in os.environ.get("PYTHONPATH", "").split(os.pathsep) if entry]
