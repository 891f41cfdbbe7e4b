# SPDX-License-Identifier: Apache-2.0
"""DeepSeek-V4 as vllm-ascend plans and allocates it, through both sides of KvextConnector."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

pytest.importorskip(
    "vllm_ascend",
    reason="needs KVEXT_ASCEND_SOURCES and a pytest process that runs tests/ascend alone",
)

from ascend_layouts import deepseek_v4
from support.connector.page_round_trip import PageRoundTrip, check_host_bytes, counts_around

MOST_TOKENS = 1160


@pytest.fixture(scope="module")
def small_pages() -> Iterator[PageRoundTrip]:
    """``--block-size 32``: pages of up to 4,096 tokens."""
    pages = PageRoundTrip(deepseek_v4(32, 88), seed=3)
    yield pages
    pages.shutdown()


def test_every_byte_comes_back_around_every_boundary(small_pages: PageRoundTrip) -> None:
    counts = counts_around(small_pages.layout, small_pages.unit_tokens, MOST_TOKENS)
    counts += [4095, 4096, 4097]
    for num_tokens in counts[counts.index(small_pages.unit_tokens - 1) :]:
        assert small_pages.run([num_tokens]) == num_tokens - num_tokens % 128, num_tokens


def test_second_turn_stores_the_rest(small_pages: PageRoundTrip) -> None:
    for first, second in ((129, 256), (1152, 2049), (4000, 4224)):
        assert small_pages.run([first, second]) == second - second % 128


def test_only_what_the_device_lacks_is_written(small_pages: PageRoundTrip) -> None:
    assert small_pages.run([4225], local_tokens=4096) == 128


def test_page_of_block_size_128() -> None:
    pages = PageRoundTrip(deepseek_v4(128, 72), seed=4)
    try:
        assert pages.run([16383]) == 16256
        assert pages.run([16385]) == 16384
        assert pages.run([16513], local_tokens=16384) == 128
    finally:
        pages.shutdown()


@pytest.mark.parametrize("block_size", [32, 128])
def test_host_memory_holds_what_a_resume_reads(block_size: int) -> None:
    print(f"block size {block_size}: {check_host_bytes(deepseek_v4(block_size, 4))}")
