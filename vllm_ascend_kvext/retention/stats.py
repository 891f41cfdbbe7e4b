# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vllm-ascend-kvext project
"""The counters that retention reports; see ``counted``.

The module does not know how a report travels.
"""

from __future__ import annotations

import enum
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import partial
from typing import Annotated

from vllm_ascend_kvext.counted import Counted, MetricTable, Number, Reporting, zeros


class LossCause(enum.Enum):
    """Why tokens that an earlier request had computed were computed once more."""

    NEVER_KEPT = "never_kept"
    """The blocks of the tokens' boundary were freed when the window moved on, or when the request
    ended."""

    EVICTED = "evicted"
    """The tokens' boundary was kept, but its blocks have been reallocated since."""

    GRANULARITY = "granularity"
    """The tokens lie between two positions at which the lookup can hit."""

    LOOK_AHEAD = "look_ahead"
    """An EAGLE/MTP group matched the tokens, and dropped them from the hit."""


@dataclass(slots=True)
class RetentionStats(Reporting):
    """The counters of one engine. Retention adds to the attributes. They never go down."""

    checkpoints: Annotated[int, Counted("Checkpoints in the prefix cache.", is_gauge=True)] = 0
    checkpoints_kept: Annotated[int, Counted("Checkpoints put into the prefix cache.")] = 0
    checkpoints_evicted: Annotated[
        int, Counted("Checkpoints lost to the reallocation of their blocks.")
    ] = 0
    junctions_pinned: Annotated[
        int, Counted("Boundaries kept because requests part ways there.")
    ] = 0
    junctions_hit: Annotated[
        int, Counted("Prefix-cache hits at boundaries that were kept for that reason.")
    ] = 0
    hints_pinned: Annotated[int, Counted("Boundaries kept because a request named them.")] = 0
    lost_tokens: Annotated[
        dict[LossCause, int],
        Counted(
            "Prompt tokens computed again although an earlier request had computed them, by cause.",
            "cause",
        ),
    ] = field(default_factory=partial(zeros, LossCause))


METRICS = RetentionStats.metrics = MetricTable(RetentionStats)


def describe(counts: Mapping[str, Number]) -> str:
    """One line for a log; empty if nothing happened."""
    if not any(value for key, value in counts.items() if not METRICS.is_gauge(key)):
        return ""
    lost = ", ".join(
        f"{cause.value.replace('_', ' ')} {counts.get(f'lost_tokens.{cause.value}', 0)}"
        for cause in LossCause
    )
    return (
        f"KV retention: {counts.get('checkpoints_kept', 0)} checkpoints kept, "
        f"{counts.get('checkpoints_evicted', 0)} evicted, "
        f"{counts.get('junctions_pinned', 0)} junctions pinned "
        f"({counts.get('junctions_hit', 0)} hit), {counts.get('hints_pinned', 0)} hints pinned, "
        f"lost tokens: {lost}"
    )
