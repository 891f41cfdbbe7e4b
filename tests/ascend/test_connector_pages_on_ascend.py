# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vllm-ascend-kvext project
"""What vllm-ascend plans and allocates, through both sides of KvextConnector."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from ascend_layouts import FIXTURES, deepseek_v4
from support.connector.page_round_trip import PageRoundTrip, counts_around

MAX_TOKENS = 1160


@pytest.fixture(scope="module", params=FIXTURES)
def pages(request: pytest.FixtureRequest) -> Iterator[PageRoundTrip]:
    """Pages of DeepSeek-V4 with ``--block-size 32``: up to 4,096 tokens."""
    pages = PageRoundTrip(FIXTURES[request.param](), seed=3)
    yield pages
    pages.shutdown()


def test_every_byte_comes_back_around_every_boundary(pages: PageRoundTrip) -> None:
    unit = pages.unit_tokens
    counts = [*counts_around(pages.layout, unit, MAX_TOKENS), 4095, 4096, 4097]
    for num_tokens in counts[counts.index(unit - 1) :]:
        assert pages.run([num_tokens]) == num_tokens - num_tokens % unit, num_tokens


def test_second_turn_stores_the_rest(pages: PageRoundTrip) -> None:
    unit = pages.unit_tokens
    for first, second in ((unit + 1, 2 * unit), (1152, 2049), (4000, 4224)):
        assert pages.run([first, second]) == second - second % unit


def test_only_what_the_device_lacks_is_written(pages: PageRoundTrip) -> None:
    unit = pages.unit_tokens
    assert pages.run([4097 + unit], local_tokens=4096) == unit


def test_page_of_block_size_128() -> None:
    pages = PageRoundTrip(deepseek_v4(128, 72), seed=4)
    try:
        assert pages.run([16383]) == 16256
        assert pages.run([16385]) == 16384
        assert pages.run([16513], local_tokens=16384) == 128
    finally:
        pages.shutdown()
