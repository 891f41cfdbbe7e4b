# SPDX-License-Identifier: Apache-2.0
"""The blending workload of tests/engine, with blocks as vLLM-Ascend has them.

    python blended_workload.py REPORT PLANS

See ``blending_workload.py``.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1] / "engine"))

import blending_workload

BLOCK_TOKENS = 128


def main() -> None:
    blending_workload.BLOCK_TOKENS = BLOCK_TOKENS
    report, plans = map(Path, sys.argv[1:])
    reports = {
        name: blending_workload.serve(name, plan)
        for name, plan in json.loads(plans.read_text()).items()
    }
    report.write_text(json.dumps(reports, default=bytes.hex))


if __name__ == "__main__":
    main()
