# SPDX-License-Identifier: Apache-2.0
"""What retention counts, and the form in which an engine reports it.

Knows neither who counts nor how a report travels; `METRICS` is all that a reader of reports needs.
"""

from __future__ import annotations

import enum
from collections.abc import Mapping
from dataclasses import dataclass, field

Counts = dict[str, int]
"""A report: what was counted since the last one, by key. Keys that it leaves out did not change."""


class LossCause(enum.Enum):
    """Why tokens that an earlier request had computed were computed once more."""

    NEVER_KEPT = "never_kept"
    """Their boundary's blocks were let go when the window moved on, or with their request."""

    EVICTED = "evicted"
    """Their boundary was kept, and its blocks have been reallocated since."""

    GRANULARITY = "granularity"
    """They lie between two positions at which the lookup can hit."""

    LOOK_AHEAD = "look_ahead"
    """An EAGLE/MTP group matched them and dropped them from the hit."""


@dataclass(frozen=True, slots=True)
class Metric:
    """One metric, or one for each cause of loss.

    Attributes:
        name: Without prefix, suffix and labels.
        documentation: For whoever reads it in Prometheus.
        is_gauge: Whether a report says how many there are, and not how many were added.
        has_causes: Whether it is counted by `LossCause`.
    """

    name: str
    documentation: str
    is_gauge: bool = False
    has_causes: bool = False

    def key(self, cause: LossCause | None = None) -> str:
        """What its count is called in a report."""
        return self.name if cause is None else f"{self.name}.{cause.value}"


METRICS = (
    Metric("checkpoints", "Checkpoints in the prefix cache.", is_gauge=True),
    Metric("checkpoints_kept", "Checkpoints put into the prefix cache."),
    Metric("checkpoints_evicted", "Checkpoints lost to the reallocation of their blocks."),
    Metric("junctions_pinned", "Boundaries kept because requests part ways there."),
    Metric("junctions_hit", "Prefix-cache hits at boundaries that were kept for that reason."),
    Metric("hints_pinned", "Boundaries kept because a request named them."),
    Metric(
        "lost_tokens",
        "Prompt tokens computed again although an earlier request had computed them, by cause.",
        has_causes=True,
    ),
)
_LOST_TOKENS = METRICS[-1]
_GAUGE_KEYS = frozenset(metric.key() for metric in METRICS if metric.is_gauge)
_KEYS = (
    *(metric.key() for metric in METRICS if not metric.has_causes),
    *(_LOST_TOKENS.key(cause) for cause in LossCause),
)


@dataclass(slots=True)
class RetentionStats:
    """The counters of one engine. Whoever counts adds to the attributes; they never go down.

    Attributes:
        checkpoints: How many are cached at this moment; the one number that may go down.
        lost_tokens: By cause; see `lose`.
    """

    checkpoints: int = 0
    checkpoints_kept: int = 0
    checkpoints_evicted: int = 0
    junctions_pinned: int = 0
    junctions_hit: int = 0
    hints_pinned: int = 0
    lost_tokens: dict[LossCause, int] = field(default_factory=lambda: dict.fromkeys(LossCause, 0))
    _reported: tuple[int, ...] = field(init=False, repr=False, default=(0,) * len(_KEYS))

    def lose(self, cause: LossCause, num_tokens: int) -> None:
        """Count tokens that have to be computed again."""
        self.lost_tokens[cause] += num_tokens

    def totals(self) -> Counts:
        """Everything counted so far, zeros included."""
        return dict(zip(_KEYS, self._values(), strict=True))

    def take(self) -> Counts | None:
        """Report what has changed since the last report; None if nothing has.

        Called once per scheduler step, in most of which nothing has.
        """
        reported, values = self._reported, self._values()
        if values == reported:
            return None
        self._reported = values
        return {
            key: value if key in _GAUGE_KEYS else value - before
            for key, value, before in zip(_KEYS, values, reported, strict=True)
            if value != before
        }

    def _values(self) -> tuple[int, ...]:
        return (
            self.checkpoints,
            self.checkpoints_kept,
            self.checkpoints_evicted,
            self.junctions_pinned,
            self.junctions_hit,
            self.hints_pinned,
            *self.lost_tokens.values(),
        )


def merge(counts: Counts, report: Mapping[str, int]) -> None:
    """Add a later report to an earlier one, in place."""
    for key, value in report.items():
        counts[key] = value if key in _GAUGE_KEYS else counts.get(key, 0) + value


def describe(counts: Mapping[str, int]) -> str:
    """One line for a log; empty if nothing happened."""
    if not any(value for key, value in counts.items() if key not in _GAUGE_KEYS):
        return ""
    lost = ", ".join(
        f"{cause.value.replace('_', ' ')} {counts.get(_LOST_TOKENS.key(cause), 0)}"
        for cause in LossCause
    )
    kept, evicted, pinned, hit, hints = (
        counts.get(name, 0)
        for name in (
            "checkpoints_kept",
            "checkpoints_evicted",
            "junctions_pinned",
            "junctions_hit",
            "hints_pinned",
        )
    )
    return (
        f"KV retention: {kept} checkpoints kept, {evicted} evicted, {pinned} junctions pinned "
        f"({hit} hit), {hints} hints pinned, lost tokens: {lost}"
    )
