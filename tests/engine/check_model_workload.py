# SPDX-License-Identifier: Apache-2.0
"""Run ``check-model`` several times in one process, with faults.

    python check_model_workload.py REPORT PLANS

``PLANS`` is JSON: by name, ``arguments`` are those of the command and ``fault`` names a function
below.
"""

from __future__ import annotations

import json
import sys
import tempfile
import traceback
from collections.abc import Iterator
from contextlib import contextmanager, redirect_stdout
from pathlib import Path
from typing import Any


@contextmanager
def none() -> Iterator[None]:
    yield


@contextmanager
def loads_other_rows() -> Iterator[None]:
    """Load what is one token further on."""
    from vllm_ascend_kvext.connector.scheduler import load_jobs

    rows_to_load = load_jobs.rows_to_load

    def shifted(placed: Any) -> Any:
        rows = rows_to_load(placed)
        return rows._replace(first_row=max(0, rows.first_row - 1))

    load_jobs.rows_to_load = shifted
    yield
    load_jobs.rows_to_load = rows_to_load


@contextmanager
def leaves_holes() -> Iterator[None]:
    """Let what is before the reused tokens not be computed."""
    from vllm_ascend_kvext.patches.connector import scheduler

    add_rows = scheduler.add_rows
    scheduler.add_rows = lambda of, output, rows: add_rows(of, output, rows[:-1])
    yield
    scheduler.add_rows = add_rows


@contextmanager
def turns_keys_further() -> Iterator[None]:
    """Let keys be expected to be turned by twice the angles of the model."""
    from vllm_ascend_kvext.blending import key_check

    turn = key_check.turn
    key_check.turn = lambda keys, signature, shifts: turn(keys, signature, 2 * shifts)
    yield
    key_check.turn = turn


@contextmanager
def fails_loads() -> Iterator[None]:
    """Let no load of a segment succeed."""
    from vllm_ascend_kvext.blending.errors import SegmentError
    from vllm_ascend_kvext.blending.segment_mover import SegmentMover

    def fail(mover: Any, rows: Any, block_ids: Any) -> int:
        raise SegmentError("a load that fails")

    load = SegmentMover.load
    SegmentMover.load = fail
    yield
    SegmentMover.load = load


FAULTS = {
    fault.__name__: fault
    for fault in (none, loads_other_rows, leaves_holes, turns_keys_further, fails_loads)
}


def run(plan: dict[str, Any]) -> dict[str, Any]:
    """The exit status of the command, and what it has printed."""
    from vllm_ascend_kvext.__main__ import main
    from vllm_ascend_kvext.commands import check_model

    engines: list[Any] = []
    make_engine = check_model._engine

    def kept(*arguments: Any) -> Any:
        engines.append(make_engine(*arguments))
        return engines[-1]

    check_model._engine = kept
    with tempfile.TemporaryFile("w+") as printed:  # vLLM asks for the number of the file.
        try:
            with FAULTS[plan["fault"]](), redirect_stdout(printed):
                exit_status = main(["check-model", *plan["arguments"]])
        finally:
            check_model._engine = make_engine
            for llm in engines:
                llm.llm_engine.engine_core.shutdown()
        printed.seek(0)
        return {"exit_status": exit_status, "printed": printed.read()}


def main() -> None:
    report_path, plans_path = map(Path, sys.argv[1:3])
    reports: dict[str, Any] = {}
    for name, plan in json.loads(plans_path.read_text()).items():
        try:
            reports[name] = run(plan)
        except Exception:
            reports[name] = {"error": traceback.format_exc()}
    report_path.write_text(json.dumps(reports))


if __name__ == "__main__":
    main()
