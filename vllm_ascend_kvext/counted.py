# SPDX-License-Identifier: Apache-2.0
"""Counters of an engine that become metrics: declared once, as annotated fields of a dataclass.

    hits: Annotated[int, Counted("Requests that hit.")] = 0

A `MetricTable` is read from such a class. It makes reports of its objects, adds reports up, and
registers the metrics with the classes of a stat logger. A report is flat, plain data that any
serializer takes: by key, what counters have gained since the last report, and what gauges say. A
counter that it leaves out has gained nothing.
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
    """What is said of a field. With a label, a field that is a dict has a value for each key."""

    documentation: str  # For Prometheus; empty if another field of the same metric has it.
    label: str = ""
    value: str = ""  # Of the label, where fields share a metric.
    name: str = ""  # Of the metric, where it is not that of the field behind a prefix.
    is_gauge: bool = False


@dataclass(frozen=True, slots=True)
class Metric:
    """One metric, with a value for each value of its label; see `Counted`.

    The name has neither prefix nor suffix. Without a label there are no label values.
    """

    name: str
    documentation: str
    label: str
    label_values: tuple[str, ...]
    is_gauge: bool

    @property
    def keys(self) -> tuple[str, ...]:
        """What its values are called in a report."""
        return tuple(f"{self.name}.{value}" for value in self.label_values) or (self.name,)


class MetricTable:
    """The metrics of a class of counters, and of its parts.

    A field whose type is such a class is a part; its note is what the names of the part's metrics
    begin with. No two parts share a metric. Dicts have all keys from the start.
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
            words = (note.value,) if factory is MISSING else tuple(map(_word, factory()))
            words *= bool(note.label)
            metric = Metric(name, note.documentation, note.label, words, note.is_gauge)
            self._readers.append((attrgetter(path + key), metric.keys))
            known = self._metrics.get(name)
            if known is not None:
                metric = replace(known, label_values=known.label_values + words)
            self._metrics[name] = metric

    def is_gauge(self, key: str) -> bool:
        """Whether a key of a report is that of a gauge."""
        return key in self._gauge_keys

    def values(self, counters: Any) -> list[Number]:
        """All values, in the order of their keys. Called once per step."""
        values: list[Number] = []
        for read, _ in self._readers:
            value = read(counters)
            if isinstance(value, dict):
                values += value.values()
            else:
                values.append(value)
        return values

    def report(self, values: Iterable[Number], reported: Iterable[Number] = ()) -> Report:
        """What counters have gained since some values were reported, and all gauges.

        Without these, everything, zeros included.
        """
        if not reported:
            return dict(zip(self._keys, values, strict=True))
        # Gauges are in every report: if one is lost on its way, the next makes up for it.
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

        Returns a function that adds a report of an engine. Keys of another release, of an engine on
        another machine, are left out.
        """
        updates: dict[int, dict[str, Callable[[Number], None]]] = {
            engine: {} for engine in labels_of_engines
        }
        for metric in self:
            named: dict[str, Any] = {
                "name": PREFIX + metric.name,
                "documentation": metric.documentation,
                "labelnames": [*labelnames, *([metric.label] if metric.label else [])],
            }
            if metric.is_gauge:
                parent = gauge_cls(**named, multiprocess_mode="mostrecent")
            else:
                parent = counter_cls(**named)
            for engine, labels in labels_of_engines.items():
                for key, value in zip(metric.keys, metric.label_values or (None,), strict=True):
                    # Prometheus shows it from the start.
                    child = parent.labels(*labels, *([value] if value else []))
                    updates[engine][key] = child.set if metric.is_gauge else child.inc

        def observe(report: Mapping[str, Number], engine: int) -> None:
            for key, value in report.items():
                if key in updates[engine]:
                    updates[engine][key](value)

        return observe


class Reporting:
    """What a class of counters inherits, and its ``metrics`` are set once it is there."""

    metrics: ClassVar[MetricTable]
    _reported: Sequence[Number] = ()

    def totals(self) -> Report:
        """Everything counted so far, zeros included: a copy."""
        return self.metrics.report(self.metrics.values(self))

    def take(self) -> Report:
        """What counters have gained since the last call, and all gauges; empty if nothing changed.

        Called once per scheduler step, in most of which nothing has.
        """
        values = self.metrics.values(self)
        reported = self._reported or [0] * len(values)
        self._reported = values
        return self.metrics.report(values, reported) if values != reported else {}


def zeros(keys: Iterable[Any]) -> dict[Any, Any]:
    """A counter for each of some keys."""
    return dict.fromkeys(keys, 0)


def _word(key: object) -> str:
    if not isinstance(key, enum.Enum):
        return str(key)
    return key.value if isinstance(key.value, str) else key.name.lower()
