# SPDX-License-Identifier: Apache-2.0
"""What the layout loads: neither vLLM nor torch."""

from __future__ import annotations

import pkgutil
import subprocess
import sys

import vllm_ascend_kvext.layout


def test_nothing_heavy_is_imported() -> None:
    names = [module.name for module in pkgutil.iter_modules(vllm_ascend_kvext.layout.__path__)]
    assert "build" in names
    imports = "".join(f"import vllm_ascend_kvext.layout.{name}\n" for name in names)
    code = f"import sys\nsys.path[:] = {sys.path!r}\n{imports}"
    code += "print({'torch', 'vllm', 'vllm_ascend'} & set(sys.modules))"
    found = subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, text=True)
    assert found.stdout.strip() == "set()"
