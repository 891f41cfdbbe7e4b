# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vllm-ascend-kvext project
"""Layouts of vLLM through both sides of KvextConnector: every byte comes back, no other changes."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from support.connector.page_round_trip import PageRoundTrip, counts_around
from support.layout.fixtures import FIXTURES

MAX_TOKENS = 2100


@pytest.fixture(scope="module", params=FIXTURES)
def pages(request: pytest.FixtureRequest) -> Iterator[PageRoundTrip]:
    made = PageRoundTrip(FIXTURES[request.param](), seed=7)
    yield made
    made.shutdown()


def test_every_byte_comes_back_around_every_boundary(pages: PageRoundTrip) -> None:
    counts = counts_around(pages.layout, pages.unit_tokens, MAX_TOKENS)
    assert len(counts) > 10
    for num_tokens in counts:
        assert pages.run([num_tokens]) == num_tokens - num_tokens % pages.unit_tokens, num_tokens


def test_second_turn_stores_the_rest(pages: PageRoundTrip) -> None:
    """The rows of a chunk then lie in several pieces."""
    unit = pages.unit_tokens
    for first, second in ((unit, 2 * unit), (unit + 1, 1024 + unit - 1), (1024 + unit, 2049)):
        assert pages.run([first, second]) == second - second % unit


def test_only_what_the_device_lacks_is_written(pages: PageRoundTrip) -> None:
    unit = pages.unit_tokens
    for local_tokens in (unit, 1024, 1024 + unit):
        assert pages.run([2049], local_tokens) == 2048 - local_tokens
