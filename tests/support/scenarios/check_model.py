# SPDX-License-Identifier: Apache-2.0
"""Runs of ``check-model``, each with what goes wrong. ``arguments`` of a plan are the command's."""

from __future__ import annotations

import tempfile
from contextlib import redirect_stdout
from typing import Any
from unittest import mock

from support.scenarios import scenario
from vllm_ascend_kvext.__main__ import main
from vllm_ascend_kvext.blending import key_check
from vllm_ascend_kvext.blending.errors import SegmentError
from vllm_ascend_kvext.blending.segment_mover import SegmentMover
from vllm_ascend_kvext.commands import check_model
from vllm_ascend_kvext.connector.scheduler import load_jobs
from vllm_ascend_kvext.patches.connector import scheduler

_rows_to_load, _add_rows, _turn = load_jobs.rows_to_load, scheduler.add_rows, key_check.turn


class Engine:
    """The command, which makes an engine itself."""

    def __init__(self, plan: dict[str, Any]) -> None:
        self._arguments = ["check-model", plan["model"], *plan["arguments"]]
        self._report: dict[str, Any] = {}
        self._engines: list[Any] = []

    def run(self) -> None:
        make = check_model._engine

        def make_and_keep(*arguments: Any) -> Any:
            self._engines.append(make(*arguments))
            return self._engines[-1]

        with (
            tempfile.TemporaryFile("w+") as printed,  # vLLM asks for the number of the file.
            mock.patch.object(check_model, "_engine", make_and_keep),
        ):
            with redirect_stdout(printed):
                exit_status = main(self._arguments)
            printed.seek(0)
            self._report = {"exit_status": exit_status, "printed": printed.read()}

    def report(self) -> dict[str, Any]:
        return self._report

    def shutdown(self) -> None:
        for llm in self._engines:
            llm.llm_engine.engine_core.shutdown()


@scenario
def nothing(engine: Engine) -> None:
    engine.run()


@scenario
def loads_other_rows(engine: Engine) -> None:
    """Load what is one token further on."""

    def shifted(placed: Any) -> Any:
        rows = _rows_to_load(placed)
        return rows._replace(first_row=max(0, rows.first_row - 1))

    with mock.patch.object(load_jobs, "rows_to_load", shifted):
        engine.run()


@scenario
def leaves_holes(engine: Engine) -> None:
    """Let what is before the reused tokens not be computed."""

    def all_but_one(of: Any, output: Any, rows: Any) -> Any:
        return _add_rows(of, output, rows[:-1])

    with mock.patch.object(scheduler, "add_rows", all_but_one):
        engine.run()


@scenario
def turns_keys_further(engine: Engine) -> None:
    """Let keys be expected to be turned by twice the angles of the model."""

    def further(keys: Any, signature: Any, shifts: Any) -> Any:
        return _turn(keys, signature, 2 * shifts)

    with mock.patch.object(key_check, "turn", further):
        engine.run()


@scenario
def fails_loads(engine: Engine) -> None:
    """Let no load of a segment succeed."""
    with mock.patch.object(SegmentMover, "load", side_effect=SegmentError("a load that fails")):
        engine.run()
