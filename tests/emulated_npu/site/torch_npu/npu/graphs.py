# SPDX-License-Identifier: Apache-2.0
"""Graphs, which are refused."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any


class NPUGraph:
    def __init__(self, *arguments: Any, **named: Any) -> None:
        raise NotImplementedError("graphs are not emulated: use enforce_eager")


def _refuse(name: str) -> Callable[..., Any]:
    def refused(*arguments: Any, **named: Any) -> Any:
        raise NotImplementedError(f"torch.npu.{name}: graphs are not emulated, use enforce_eager")

    return refused


graph = _refuse("graph")
graph_task_group_begin = _refuse("graph_task_group_begin")
graph_task_group_end = _refuse("graph_task_group_end")
graph_task_update_begin = _refuse("graph_task_update_begin")
graph_task_update_end = _refuse("graph_task_update_end")


def is_current_stream_capturing() -> bool:
    return False
