# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vllm-ascend-kvext project
"""Runs of ``check-model`` with faults. ``arguments`` of a plan are those of the command."""

from __future__ import annotations

import tempfile
from collections.abc import Callable
from contextlib import redirect_stdout
from typing import Any
from unittest import mock

from support.scenarios import scenario
from vllm_ascend_kvext.__main__ import main
from vllm_ascend_kvext.commands import check_model
from vllm_ascend_kvext.errors import SegmentError
from vllm_ascend_kvext.patches.connector import hole_steps
from vllm_ascend_kvext.segments.keys import key_check
from vllm_ascend_kvext.segments.scheduler import blended_loads
from vllm_ascend_kvext.segments.worker.segment_mover import SegmentMover

_rows_to_load, _add_rows, _turn = blended_loads.rows_to_load, hole_steps.add_rows, key_check.turn


class Engine:
    """The command, which makes an engine by itself."""

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
            tempfile.TemporaryFile("w+") as printed,  # vLLM asks for the file's number.
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


def _run_with(owner: Any, name: str, wrong: Callable[..., Any]) -> Callable[[Engine], None]:
    """Run the command while a function does something wrong."""

    @scenario
    def run(engine: Engine) -> None:
        with mock.patch.object(owner, name, wrong):
            engine.run()

    return run


def _one_token_further(placed: Any) -> Any:
    rows = _rows_to_load(placed)
    return rows._replace(first_row=rows.first_row + 1, end_tokens=rows.end_tokens - 1)


nothing = scenario(Engine.run)
loads_other_rows = _run_with(blended_loads, "rows_to_load", _one_token_further)
leaves_holes = _run_with(
    *(hole_steps, "add_rows"), lambda of, output, rows: _add_rows(of, output, rows[:-1])
)
turns_keys_further = _run_with(
    key_check, "turn", lambda keys, signature, shifts: _turn(keys, signature, 2 * shifts)
)
fails_loads = _run_with(SegmentMover, "load", mock.Mock(side_effect=SegmentError("it fails")))
