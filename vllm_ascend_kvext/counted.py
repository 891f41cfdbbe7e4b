# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vllm-ascend-kvext project
"""Turns counters of an engine into metrics. A counter is declared once, as a field of a dataclass.

    hits: Annotated[int, Counted("Requests that hit.")] = 0

A `MetricTable` is made from such a class. It makes reports of objects of the class, adds reports
up, and registers the metrics with the classes of a stat logger. A report is flat, plain data that
any serializer takes. Its keys stand for counters and gauges. The value of a key is the gain of
the counter since the last report, or the value of the gauge. A counter without a key has gained
nothing.
"""

from __future__ import annotations

import enum
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import MISSING, dataclass, fields, is_dataclass, replace
from operator import attrgetter
from typing import Any, ClassVar, NamedTuple, cast

from vllm_ascend_kvext.declared import declared

Number = int | float
Report = dict[str, Number]

PREFIX = "vllm:kvext_"


class Counted(NamedTuple):
    """The declaration of a metric, as the note of a field.

    Attributes:
        documentation: The text for Prometheus; empty if another field of the same metric has it.
        label: The name of the label. A field that is a dict has one label value per key.
        value: The label value of this field, if several fields share the metric.
        name: The name of the metric; if empty, it is the prefix and the name of the field.
        is_gauge: Whether the metric is a gauge, and not a counter.
    """

    documentation: str
    label: str = ""
    value: str = ""
    name: str = ""
    is_gauge: bool = False


@dataclass(frozen=True, slots=True)
class Metric:
    """One metric, which has one value per label value; see `Counted`.

    Attributes:
        name: The name without the prefix and suffix that Prometheus shows.
        label_values: The values of the label; empty for a metric without a label.
    """

    name: str
    documentation: str
    label: str
    label_values: tuple[str, ...]
    is_gauge: bool

    @property
    def keys(self) -> tuple[str, ...]:
        """The keys of its values in a report."""
        return tuple(f"{self.name}.{value}" for value in self.label_values) or (self.name,)


class MetricTable:
    """The metrics of a class of counters, and of its parts.

    A field whose type is a class of counters is a part. The note of the field is the prefix of the
    names of the part's metrics. No two parts share a metric. A field that is a dict has all its
    keys from the start.
    """

    def __init__(self, cls: type, prefix: str = "") -> None:
        self._metrics: dict[str, Metric] = {}
        self._readers: list[tuple[Callable[[Any], Any], tuple[str, ...]]] = []
        self._add(cls, prefix, "")
        self._keys = [key for _, keys in self._readers for key in keys]
        self._gauge_keys = {key for metric in self if metric.is_gauge for key in metric.keys}

    def __iter__(self) -> Iterator[Metric]:
        return iter(self._metrics.values())

    def _add(self, cls: type, prefix: str, path: str) -> None:
        factories = {each.name: each.default_factory for each in fields(cls)}
        for key, kind, note, _ in declared(cls):
            if is_dataclass(kind):
                self._add(cast(type, kind), note, f"{path}{key}.")
                continue
            name = note.name or prefix + key
            factory: Any = factories[key]
            label_values: tuple[str, ...] = ()
            if note.label and factory is MISSING:
                label_values = (note.value,)
            elif note.label:
                label_values = tuple(map(_word, factory()))
            metric = Metric(name, note.documentation, note.label, label_values, note.is_gauge)
            self._readers.append((attrgetter(path + key), metric.keys))
            known = self._metrics.get(name)
            if known is not None:
                metric = replace(known, label_values=known.label_values + label_values)
            self._metrics[name] = metric

    def is_gauge(self, key: str) -> bool:
        """Whether a key of a report belongs to a gauge."""
        return key in self._gauge_keys

    def values(self, counters: Any) -> list[Number]:
        """All values, in the order of their keys. The scheduler calls this once per step."""
        values: list[Number] = []
        for read, _ in self._readers:
            value = read(counters)
            if isinstance(value, dict):
                values += value.values()
            else:
                values.append(value)
        return values

    def report(self, values: Iterable[Number], reported: Iterable[Number] = ()) -> Report:
        """Make a report.

        Args:
            values: The current values, in the order of their keys.
            reported: The values of the last report. The new report has the gains of counters since
                then, and all gauges. Without them it has all values, zeros included.
        """
        if not reported:
            return dict(zip(self._keys, values, strict=True))
        # Every report has all gauges. If a report is lost, the next report has the value again.
        return {
            key: value if key in self._gauge_keys else value - before
            for key, value, before in zip(self._keys, values, reported, strict=True)
            if value != before or key in self._gauge_keys
        }

    def merge(self, report: Report, later: Mapping[str, Number]) -> None:
        """Add a later report to an earlier one, in place."""
        for key, value in later.items():
            report[key] = value if key in self._gauge_keys else report.get(key, 0) + value

    def register(
        self,
        counter_cls: Any,
        gauge_cls: Any,
        labelnames: Sequence[str],
        labels_of_engines: Mapping[int, Sequence[object]],
    ) -> Callable[[Mapping[str, Number], int], None]:
        """Register the metrics with the classes of a stat logger, which may be Ray's.

        Returns:
            A function that adds the report of one engine. An engine on another machine may run
            another release; the function ignores keys that this release does not have.
        """
        updates: dict[int, dict[str, Callable[[Number], None]]] = {
            engine: {} for engine in labels_of_engines
        }
        for metric in self:
            named: dict[str, Any] = {
                "name": PREFIX + metric.name,
                "documentation": metric.documentation,
                "labelnames": [*labelnames, metric.label] if metric.label else [*labelnames],
            }
            if metric.is_gauge:
                parent = gauge_cls(**named, multiprocess_mode="mostrecent")
            else:
                parent = counter_cls(**named)
            for engine, labels in labels_of_engines.items():
                for key, value in zip(metric.keys, metric.label_values or (None,), strict=True):
                    # Prometheus shows a child that exists, even if nothing was counted.
                    child = parent.labels(*labels, value) if value else parent.labels(*labels)
                    updates[engine][key] = child.set if metric.is_gauge else child.inc

        def observe(report: Mapping[str, Number], engine: int) -> None:
            for key, value in report.items():
                if key in updates[engine]:
                    updates[engine][key](value)

        return observe


class Reporting:
    """The base of a class of counters. Its ``metrics`` are set once the class exists."""

    metrics: ClassVar[MetricTable]
    _reported: Sequence[Number] = ()

    def totals(self) -> Report:
        """All values so far, zeros included, as a copy."""
        return self.metrics.report(self.metrics.values(self))

    def take(self) -> Report:
        """The gains of counters since the last call, and all gauges; empty if nothing changed.

        The scheduler calls this once per step. In most steps nothing has changed.
        """
        values = self.metrics.values(self)
        reported = self._reported or [0] * len(values)
        self._reported = values
        return self.metrics.report(values, reported) if values != reported else {}


def zeros(keys: Iterable[Any]) -> dict[Any, Any]:
    """A dict with a counter for each key."""
    return dict.fromkeys(keys, 0)


def _word(key: object) -> str:
    if not isinstance(key, enum.Enum):
        return str(key)
    return key.value if isinstance(key.value, str) else key.name.lower()
