# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vllm-ascend-kvext project
"""vLLM's V2 model runner on a CPU: Triton's interpreter runs its kernels (``TRITON_INTERPRET=1``).

If no driver of Triton is active, vLLM behaves as if Triton is missing.
"""

from __future__ import annotations

from types import SimpleNamespace
from unittest import mock


def have_triton() -> None:
    """Let vLLM find one active driver of Triton while it is imported."""
    from triton.backends import backends

    found = mock.patch.dict(backends, {"cpu": SimpleNamespace(driver=None)})
    # Only if it is a distribution for CPUs, vLLM accepts this driver.
    with found, mock.patch("importlib.metadata.version", return_value="0+cpu"):
        from vllm import triton_utils
    if not triton_utils.HAS_TRITON:
        raise RuntimeError("expected vLLM to find Triton's interpreter, found that it does not")
