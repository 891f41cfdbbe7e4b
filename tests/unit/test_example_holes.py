# SPDX-License-Identifier: Apache-2.0
"""What `examples/holes.py` says of the steps that it observes. The engine is not started."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any
from unittest import mock

import pytest

EXAMPLES = Path(__file__).parents[2] / "examples"


@pytest.fixture
def example() -> Iterator[ModuleType]:
    """Modules of examples have names that benchmarks have, too."""
    with mock.patch.dict(sys.modules), mock.patch.object(sys, "path", [str(EXAMPLES), *sys.path]):
        for name in ("holes", "offload_hybrid", "retention", "engine_log"):
            sys.modules.pop(name, None)
        yield importlib.import_module("holes")


def a_step(
    new: dict[str, tuple[int, int]],
    going_on: dict[str, tuple[int, int]] | None = None,
    loads: tuple[Any, ...] = (),
) -> SimpleNamespace:
    """A scheduler's output, from the first and end token of each row."""
    going_on = going_on or {}
    spans = {**new, **going_on}
    return SimpleNamespace(
        scheduled_new_reqs=[
            SimpleNamespace(req_id=row_id, num_computed_tokens=first)
            for row_id, (first, _) in new.items()
        ],
        scheduled_cached_reqs=SimpleNamespace(
            req_ids=list(going_on), num_computed_tokens=[first for first, _ in going_on.values()]
        ),
        num_scheduled_tokens={row_id: end - first for row_id, (first, end) in spans.items()},
        kv_connector_metadata=SimpleNamespace(jobs=SimpleNamespace(loads=loads)),
    )


def a_range(first: int, end: int) -> SimpleNamespace:
    return SimpleNamespace(first=first, end=end)


def test_picture_is_that_of_the_steps(example: ModuleType) -> None:
    """64 tokens on the device, a hole, a load with another hole in it, and the end."""
    load = SimpleNamespace(
        request_id="7", tokens=a_range(64, 320), holes=(a_range(64, 128), a_range(192, 256))
    )
    steps = iter(
        [
            a_step({"7-hole-1": (64, 128)}, loads=(load,)),
            a_step({"7-hole-2": (192, 256)}),
            a_step({"7": (320, 360)}),
            a_step({}, {"7": (360, 400)}),
            a_step({}, {"7": (400, 401)}),
        ]
    )
    scheduler = SimpleNamespace(schedule=lambda: next(steps))
    observer = example.SpanObserver(scheduler)
    for _ in range(5):
        scheduler.schedule()
    spans = observer.take()
    assert spans.loaded == [(128, 192), (256, 320)]
    assert spans.holes == [(64, 128), (192, 256)]
    signs = spans.signs(400)
    assert signs == "." * 64 + "#" * 64 + "=" * 64 + "#" * 64 + "=" * 64 + "#" * 80
    assert example.draw(signs) == "..##==##==###"
    assert observer.take() == example.Spans()


def test_what_was_loaded_and_then_computed_counts_as_computed(example: ModuleType) -> None:
    """As after a load that has failed."""
    assert example.Spans(computed=[(32, 64)], loaded=[(0, 64)]).signs(64) == "=" * 32 + "#" * 32


def test_questions_are_the_same_every_time_and_fit_the_device(example: ModuleType) -> None:
    questions = example.write_questions()
    assert questions == example.write_questions()
    most_tokens = max(len(question.prompt) for question in questions)
    assert most_tokens < (example.DEVICE_BLOCKS - 4) * example.BLOCK_TOKENS
