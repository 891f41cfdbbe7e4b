# SPDX-License-Identifier: Apache-2.0
"""A process that runs cells: JSON lines in on stdin, one result per line out on stdout.

Whether vllm-ascend is active is decided here, once, before anything of vLLM is imported.
"""

from __future__ import annotations

import json
import os
import platform
import sys
import traceback
from pathlib import Path

os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")
ROOT = Path(__file__).parents[2]
sys.path[:0] = [str(ROOT / folder) for folder in ("benchmarks", "tests", "tests/ascend")]


def main() -> int:
    # Others print on stdout, too.
    answers = os.fdopen(os.dup(1), "w", encoding="utf-8", buffering=1)
    os.dup2(2, 1)
    if "--ascend" in sys.argv[1:]:
        import ascend_sources

        folder = ascend_sources.sources()
        if folder is None:
            raise SystemExit(f"set {ascend_sources.SOURCES_VARIABLE} for layouts of vllm-ascend")
        ascend_sources.activate(folder)
    import vllm

    from retention.cells import run_cell
    from retention.suite import Cell

    print(json.dumps({"vllm": vllm.__version__, "python": platform.python_version()}), file=answers)
    for line in sys.stdin:
        task = json.loads(line)
        try:
            result = run_cell(Cell(**task["cell"]), task["num_blocks"])
        except Exception:
            result = {"error": traceback.format_exc()}
        print(json.dumps(result), file=answers)
    return 0


if __name__ == "__main__":
    sys.exit(main())
