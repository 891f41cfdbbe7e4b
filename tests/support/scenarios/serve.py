# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vllm-ascend-kvext project
"""Serve plans, one engine after the other, in this process, and write their reports.

    python serve.py REPORT PLANS

Both are JSON files. ``PLANS`` has plans by name (`processes.Plan`). ``REPORT`` gets the reports of
their engines by the same names. All engines have the same environment variables.
"""

from __future__ import annotations

import gc
import json
import os
import sys
import time
import traceback
from importlib import import_module
from pathlib import Path
from typing import Any

TESTS = str(Path(__file__).resolve().parents[2])


def serve(name: str, plan: dict[str, Any]) -> dict[str, Any]:
    """Serve one plan. If it fails, its report says why, and the other plans are still served."""
    from support.scenarios import scenario_of

    engine = None
    began_s = time.monotonic()
    try:
        module = import_module(f"support.scenarios.{plan['module']}")
        engine = module.Engine({"name": name, **plan})
        for scenario in plan["scenarios"]:
            scenario_of(module, scenario)(engine)
        return engine.report()
    except Exception:
        return {"error": traceback.format_exc(), "error_s": time.monotonic() - began_s}
    finally:
        if engine is not None:
            engine.shutdown()


def main() -> None:
    import vllm.v1.engine.llm_engine  # noqa: F401

    # Engines collect garbage when they start and stop. Imported modules are not garbage.
    gc.collect()
    gc.freeze()
    report, plans = map(Path, sys.argv[1:])
    reports = {name: serve(name, plan) for name, plan in json.loads(plans.read_text()).items()}
    report.write_text(json.dumps(reports, default=bytes.hex))


# The modules here have common names, so ``tests`` replaces this folder on the path. Spawned workers
# import this file, so they do this, too.
sys.path[:] = [*(path for path in sys.path if path != str(Path(__file__).parent)), TESTS]
if os.environ.get("KVEXT_RUNNER") == "v2":
    from support.scenarios.interpreted_triton import have_triton

    have_triton()

if __name__ == "__main__":
    main()
