# SPDX-License-Identifier: Apache-2.0
"""DeepSeek-V4 through both sides of KvextConnector: every byte comes back, no other changes."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial

import pytest
from support.connector.page_round_trip import (
    PageRoundTrip,
    check_host_bytes,
    counts_around,
)
from support.layout.eleven_groups import eleven_groups
from support.layout.fixtures import HAS_DEEPSEEK_V4, deepseek_v4
from support.layout.truth import LayoutFixture

FEW_LAYERS = 0, 2, 3, 22
"""Of the eleven groups, each has at least one."""

FIXTURES: dict[str, Callable[[], LayoutFixture]] = {
    "eleven groups": partial(eleven_groups, 40, FEW_LAYERS),
}
if HAS_DEEPSEEK_V4:
    FIXTURES["upstream, packed"] = partial(deepseek_v4, "fp8_ds_mla", 6, 96)
    FIXTURES["upstream, bfloat16"] = partial(deepseek_v4, "auto", 6, 96)

MOST_TOKENS = 2100


@pytest.fixture(scope="module", params=FIXTURES)
def pages(request: pytest.FixtureRequest) -> Iterator[PageRoundTrip]:
    made = PageRoundTrip(FIXTURES[request.param](), seed=7)
    yield made
    made.shutdown()


def test_every_byte_comes_back_around_every_boundary(pages: PageRoundTrip) -> None:
    counts = counts_around(pages.layout, pages.unit_tokens, MOST_TOKENS)
    assert len(counts) > 15
    for num_tokens in counts:
        assert pages.run([num_tokens]) == num_tokens - num_tokens % pages.unit_tokens, num_tokens


def test_second_turn_stores_the_rest(pages: PageRoundTrip) -> None:
    """Rows of a chunk then lie in several pieces."""
    unit = pages.unit_tokens
    for first, second in ((unit, 2 * unit), (unit + 1, 1024 + unit - 1), (1024 + unit, 2049)):
        assert pages.run([first, second]) == second - second % unit


def test_only_what_the_device_lacks_is_written(pages: PageRoundTrip) -> None:
    unit = pages.unit_tokens
    for local_tokens in (unit, 1024, 1024 + unit):
        assert pages.run([2049], local_tokens) == 2048 - local_tokens


def test_page_of_ratio_128_has_16384_tokens() -> None:
    pages = PageRoundTrip(eleven_groups(104, FEW_LAYERS), seed=8)
    try:
        assert max(group.tokens_per_page for group in pages.layout.groups) == 16384
        for num_tokens in (16383, 16384, 16385):
            assert pages.run([num_tokens]) == num_tokens - num_tokens % 128
        assert pages.run([16513], local_tokens=16384) == 128
    finally:
        pages.shutdown()


@pytest.mark.parametrize("name", FIXTURES)
def test_host_memory_holds_what_a_resume_reads(name: str) -> None:
    print(f"{name}, few layers: {check_host_bytes(FIXTURES[name]())}")


@pytest.mark.skipif(not HAS_DEEPSEEK_V4, reason="needs vLLM 0.23.0")
def test_host_bytes_of_the_whole_model() -> None:
    print(f"DeepSeek-V4 upstream: {check_host_bytes(deepseek_v4('fp8_ds_mla', num_blocks=4))}")
