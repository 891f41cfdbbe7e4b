# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vllm-ascend-kvext project
"""Hashes and endless-cache hits of logged requests, against the tokens that the ids stand for."""

from __future__ import annotations

import random

import pytest

from vllm_ascend_kvext.replay.pieces import ComputedPrefixes, RequestPieces
from vllm_ascend_kvext.replay.trace import LoggedRequest

SEEDS = range(30)


def random_requests(seed: int, number: int = 12) -> list[LoggedRequest]:
    """Requests along a small tree of ids, with known and unknown answers, in one block size."""
    rng = random.Random(seed)
    block_tokens = rng.choice([1, 3, 8, 16])
    requests = []
    for line in range(1, number + 1):
        prompt_tokens = rng.randint(1, 60)
        output_tokens = rng.randint(1, 20)
        num_blocks = -(-prompt_tokens // block_tokens)
        prompt_ids = [rng.randint(0, 1) for _ in range(num_blocks)]
        if prompt_tokens % block_tokens:
            # What is not full is another text, so it has an id of its own.
            prompt_ids[-1] = 100 + prompt_tokens
        output_ids: list[int] = []
        if rng.random() < 0.5:
            num_all = -(-(prompt_tokens + output_tokens) // block_tokens)
            output_ids = [rng.randint(0, 1) for _ in range(num_all - prompt_tokens // block_tokens)]
            if (prompt_tokens + output_tokens) % block_tokens:
                output_ids[-1] = 1000 + line
        requests.append(
            LoggedRequest(
                line, 0.0, prompt_tokens, output_tokens, prompt_ids, output_ids, block_tokens
            )
        )
    return requests


@pytest.mark.parametrize("seed", SEEDS)
def test_hashes_are_equal_exactly_where_all_tokens_before_are(seed: int) -> None:
    all_pieces = [RequestPieces(request) for request in random_requests(seed)]
    for block_tokens in (1, 2, 5, 16):
        hashes = [pieces.block_hashes(block_tokens) for pieces in all_pieces]
        tokens = [pieces.tokens() for pieces in all_pieces]
        for pieces, of_one in zip(all_pieces, hashes, strict=True):
            assert len(of_one) == pieces.logged.num_tokens // block_tokens
            assert len(set(of_one)) == len(of_one)
            assert {len(each) for each in of_one} <= {32}
        for one in range(len(all_pieces)):
            for other in range(one):
                for block in range(min(len(hashes[one]), len(hashes[other]))):
                    end = (block + 1) * block_tokens
                    are_equal = tokens[one][:end] == tokens[other][:end]
                    assert (hashes[one][block] == hashes[other][block]) is are_equal


def test_tokens_have_the_lengths_of_the_request_and_are_not_alike() -> None:
    request = LoggedRequest(3, 0.0, 40, 9, (1, 2, 3), (), 16)
    tokens = RequestPieces(request).tokens()
    assert len(tokens) == 49 and len(set(tokens)) > 40
    assert all(0 <= token < 1 << 15 for token in tokens)
    assert RequestPieces(request).tokens() == tokens


def test_two_unknown_answers_to_one_prompt_are_different() -> None:
    one, other = (
        RequestPieces(LoggedRequest(line, 0.0, 20, 30, (1, 2), (), 16)) for line in (1, 2)
    )
    assert one.tokens()[:20] == other.tokens()[:20] and one.tokens() != other.tokens()
    assert one.block_hashes(4)[:5] == other.block_hashes(4)[:5]
    assert one.block_hashes(4)[5] != other.block_hashes(4)[5]


def test_equal_ids_of_other_lengths_are_other_tokens() -> None:
    one, other = (RequestPieces(LoggedRequest(1, 0.0, 8, 1, (1,), (), size)) for size in (8, 16))
    assert one.block_hashes(8)[0] != other.block_hashes(8)[0]


@pytest.mark.parametrize("seed", SEEDS)
def test_the_endless_cache_against_a_set_of_all_computed_prefixes(seed: int) -> None:
    rng = random.Random(seed)
    prefixes = ComputedPrefixes()
    computed: set[tuple[int, ...]] = {()}
    for request in random_requests(seed, 20):
        pieces = RequestPieces(request)
        tokens = pieces.tokens()
        expected = max(n for n in range(request.prompt_tokens + 1) if tuple(tokens[:n]) in computed)
        assert prefixes.longest(pieces) == expected
        end = rng.randint(0, request.num_tokens)
        start = 0
        while start < end:  # In steps of any length, as an engine computes them.
            step_end = rng.randint(start + 1, end)
            prefixes.note(pieces, start, step_end)
            start = step_end
        computed |= {tuple(tokens[:n]) for n in range(end + 1)}
