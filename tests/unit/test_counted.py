# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vllm-ascend-kvext project
"""All tables of metrics: each count is reported once, and adds up where reports are read."""

from __future__ import annotations

import json
import pickle
from collections.abc import Callable
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from vllm_ascend_kvext.connector.common import counters as connector
from vllm_ascend_kvext.counted import MetricTable
from vllm_ascend_kvext.declared import declared
from vllm_ascend_kvext.retention import stats as retention

Event = Callable[[Any, int], None]

TABLES = {
    "connector": (connector.METRICS, connector.ConnectorCounters),
    "retention": (retention.METRICS, retention.RetentionStats),
}


def events_of(cls: type, path: tuple[str, ...] = ()) -> list[Event]:
    """Events. Each counts in one field of a class or of its parts. Gauges have events, too."""

    def owner_of(counters: Any) -> Any:
        for part in path:
            counters = getattr(counters, part)
        return counters

    def count(key: str, choice: Any) -> Event:
        def event(counters: Any, amount: int) -> None:
            owner = owner_of(counters)
            value = getattr(owner, key)
            if choice is None:
                setattr(owner, key, value + amount)
            else:
                value[choice] += amount

        return event

    found: list[Event] = []
    for key, kind, note, _ in declared(cls):
        if isinstance(note, str):
            found += events_of(kind, (*path, key))
        else:
            value = getattr(cls(), key)
            choices = list(value) if isinstance(value, dict) else [None]
            found += [count(key, choice) for choice in choices]
    return found


@pytest.fixture(params=TABLES)
def table(request: pytest.FixtureRequest) -> tuple[MetricTable, type, list[Event]]:
    metrics, cls = TABLES[request.param]
    return metrics, cls, events_of(cls)


def test_each_count_has_a_key_of_its_own(table: Any) -> None:
    metrics, cls, events = table
    keys = [key for metric in metrics for key in metric.keys]
    changed = []
    for event in events:
        counters = cls()
        event(counters, 3)
        changed += [key for key, value in counters.totals().items() if value]
        report = counters.take()
        assert [key for key, value in report.items() if value] == changed[-1:]
    assert sorted(changed) == sorted(keys)
    assert len(keys) == len(set(keys)) == len(events)


def test_every_metric_has_a_sentence_and_a_label_has_values(table: Any) -> None:
    for metric in table[0]:
        assert metric.documentation.endswith("."), metric
        assert bool(metric.label) == bool(metric.label_values), metric


@pytest.mark.parametrize("name", TABLES)
@given(data=st.data())
def test_a_report_has_what_changed_since_the_last_and_all_gauges_and_reports_add_up(
    name: str, data: st.DataObject
) -> None:
    metrics, cls = TABLES[name]
    gauges = {key for metric in metrics if metric.is_gauge for key in metric.keys}
    steps = st.tuples(st.sampled_from(events_of(cls)), st.integers(-9, 999), st.booleans())
    counters = cls()
    reported, read = counters.totals(), {}
    assert not any(reported.values()), "objects share their counters"
    for event, amount, is_reported in [*data.draw(st.lists(steps)), (None, 0, True)]:
        if event is not None:
            event(counters, amount)
        if not is_reported:
            continue
        totals, report = counters.totals(), counters.take()
        assert json.loads(json.dumps(report)) == report == pickle.loads(pickle.dumps(report))
        changed = {key for key, value in totals.items() if value != reported[key]}
        assert report == {
            key: totals[key] - (0 if key in gauges else reported[key])
            for key in (changed | gauges if changed else ())
        }
        metrics.merge(read, report)
        reported = totals
    assert read == {key: value for key, value in reported.items() if value or key in read}
