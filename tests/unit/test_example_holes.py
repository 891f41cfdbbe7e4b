# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vllm-ascend-kvext project
"""What `examples/holes.py` prints about the steps that it observes. No engine is started."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any
from unittest import mock

import pytest

from vllm_ascend_kvext.token_range import TokenRange

EXAMPLES = Path(__file__).parents[2] / "examples"


@pytest.fixture
def example() -> Iterator[ModuleType]:
    """The module of the example, which is then forgotten. A benchmark may have the same name."""
    with mock.patch.dict(sys.modules), mock.patch.object(sys, "path", [str(EXAMPLES), *sys.path]):
        for name in ("holes", "offload_hybrid", "retention", "engine_log"):
            sys.modules.pop(name, None)
        yield importlib.import_module("holes")


def a_step(row_id: str, first: int, end: int, is_new: bool = True, *loads: Any) -> SimpleNamespace:
    """A scheduler's output, with one row."""
    row = SimpleNamespace(req_id=row_id, num_computed_tokens=first)
    cached = SimpleNamespace(
        req_ids=[row_id] * (not is_new), num_computed_tokens=[first] * (not is_new)
    )
    return SimpleNamespace(
        scheduled_new_reqs=[row] * is_new,
        scheduled_cached_reqs=cached,
        num_scheduled_tokens={row_id: end - first},
        kv_connector_metadata=SimpleNamespace(jobs=SimpleNamespace(loads=loads)),
    )


def test_picture_is_that_of_the_steps(example: ModuleType) -> None:
    """64 tokens are on the device. Then there are a hole, a load with another hole, and the end."""
    holes = TokenRange(64, 128), TokenRange(192, 256)
    load = SimpleNamespace(request_id="7", tokens=TokenRange(64, 320), holes=holes)
    steps = [
        a_step("7-hole-1", 64, 128, True, load),
        a_step("7-hole-2", 192, 256),
        a_step("7", 320, 360),
        a_step("7", 360, 400, False),
        a_step("7", 400, 401, False),
    ]
    scheduler = SimpleNamespace(update_from_output=lambda output, from_model: from_model)
    observer = example.SpanObserver(scheduler)
    for step in steps:
        assert scheduler.update_from_output(step, "sampled") == "sampled"
    spans = observer.take()
    assert spans.loaded == [(128, 192), (256, 320)]
    assert spans.holes == [(64, 128), (192, 256)]
    signs = spans.signs(400)
    assert signs == "." * 64 + "#" * 64 + "=" * 64 + "#" * 64 + "=" * 64 + "#" * 80
    assert example.draw(signs) == "..##==##==###"
    assert observer.take() == example.Spans()
    # A load has failed. Tokens that were loaded and then computed count as computed.
    assert example.Spans(computed=[(32, 64)], loaded=[(0, 64)]).signs(64) == "=" * 32 + "#" * 32


def test_questions_are_the_same_every_time_and_fit_the_device(example: ModuleType) -> None:
    questions = example.write_questions()
    assert questions == example.write_questions()
    max_tokens = max(len(question.prompt) for question in questions)
    assert max_tokens < (example.DEVICE_BLOCKS - 4) * example.BLOCK_TOKENS
