# SPDX-License-Identifier: Apache-2.0
"""vLLM's V2 model runner on a CPU: Triton's interpreter runs its kernels (``TRITON_INTERPRET=1``).

vLLM takes Triton for missing where no driver of Triton is active.
"""

from __future__ import annotations

from types import SimpleNamespace
from unittest import mock


def have_triton() -> None:
    """Let vLLM, which is not imported yet, find one active driver; it is there for no longer."""
    from triton.backends import backends

    found = mock.patch.dict(backends, {"cpu": SimpleNamespace(driver=None)})
    # Of vLLM's distributions only one for a CPU may have this driver.
    with found, mock.patch("importlib.metadata.version", return_value="0+cpu"):
        from vllm import triton_utils
    if not triton_utils.HAS_TRITON:
        raise RuntimeError("expected vLLM to find Triton's interpreter, found that it does not")
