# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vllm-ascend-kvext project
"""``vllm/v1/metrics/stats.py``: the report of retention is sent with the scheduler's statistics.

The engine core usually is its own process. This process sends what msgspec finds in the fields of
``SchedulerStats``. A field that is None is not sent, and a reader skips fields that it does not
know. So a process without this patch reads the same as before.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import field, fields, make_dataclass
from typing import TYPE_CHECKING

from vllm_ascend_kvext.patching.declaration import Kind, Patch

if TYPE_CHECKING:
    from vllm.v1.metrics.stats import SchedulerStats

    from vllm_ascend_kvext.counted import Report

_REPORT = "kvext_retention"


def attach_report(stats: SchedulerStats, report: Report) -> None:
    setattr(stats, _REPORT, report)


def attached_report(stats: SchedulerStats | None) -> Report | None:
    return getattr(stats, _REPORT, None)


def add_field() -> Callable[[], None]:
    """Add a field for the report. msgspec reads the class when it builds its first decoder."""
    from vllm.v1.metrics.stats import SchedulerStats

    # The field cannot be an argument of ``__init__``, because that method exists already.
    donor = make_dataclass("_", [(_REPORT, dict[str, int] | None, field(default=None, init=False))])
    (report_field,) = fields(donor)
    SchedulerStats.__dataclass_fields__[_REPORT] = report_field
    SchedulerStats.__annotations__[_REPORT] = report_field.type
    setattr(SchedulerStats, _REPORT, None)

    def undo() -> None:
        if SchedulerStats.__dataclass_fields__.get(_REPORT) is not report_field:
            return
        del SchedulerStats.__dataclass_fields__[_REPORT]
        del SchedulerStats.__annotations__[_REPORT]
        delattr(SchedulerStats, _REPORT)

    return undo


PATCHES = (
    Patch(
        id="KVX-161",
        target="vllm.v1.metrics.stats:SchedulerStats.__dataclass_fields__",
        kind=Kind.HOOK,
        feature="retention",
        install=add_field,
        why="The counts of the engine core reach the process that serves /metrics only in fields "
        "of SchedulerStats, and no field is open to plugins.",
        retire_when="upstream lets a plugin add to SchedulerStats",
    ),
)
