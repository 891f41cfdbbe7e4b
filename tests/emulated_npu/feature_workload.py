# SPDX-License-Identifier: Apache-2.0
"""The workload of tests/engine, with blocks as vLLM-Ascend has them.

    python feature_workload.py REPORT PLANS

See ``connector_workload.py``.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1] / "engine"))

import connector_workload

BLOCK_TOKENS = 128
"""vLLM-Ascend takes no other for these models."""


def main() -> None:
    from torch_npu.custom_operators import block_copies

    connector_workload.BLOCK_TOKENS = BLOCK_TOKENS
    report, plans = map(Path, sys.argv[1:])
    reports = {}
    for name, plan in json.loads(plans.read_text()).items():
        block_copies.counts.clear()
        reports[name] = connector_workload.serve(plan)
        reports[name]["batched copies"] = dict(block_copies.counts)
    report.write_text(json.dumps(reports, default=bytes.hex))


if __name__ == "__main__":
    main()
