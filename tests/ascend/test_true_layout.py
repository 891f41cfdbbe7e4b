# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vllm-ascend-kvext project
"""Retention on the true layouts of DeepSeek-V4, whose hits are thousands of tokens apart.

What does not depend on the sizes is shared with vLLM's own managers, on a small layout of the same
shape: ``tests/engine``, with ``KVEXT_MANAGERS=ascend``. A test named ``test_stock_...`` shows vLLM
and vLLM-Ascend on their own.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence

import pytest
from ascend_geometry import BLOCK_SIZES, HIT_UNIT_TOKENS, planned_layout
from support.installed import installed, retention_installed
from support.retention.checkpoints import adaptive_retention
from support.retention.reachability import Difference, Hits, UnderPressure
from support.sample import IS_LONG
from support.scheduler.block_manager import BlockManager
from vllm.v1.request import Request

from vllm_ascend_kvext.features import FAST_PREFIX_CACHE, REPAIRS
from vllm_ascend_kvext.patches.repairs.async_scheduler import drafts_in_flight
from vllm_ascend_kvext.upstream_state import BlockManagerState

NUM_BLOCKS = 16000
"""The room for three units of every group, cached densely."""

CHUNK_TOKENS = 2048
FIRST_OUTPUT = 1 << 24
"""The token ids of outputs. Ids of prompts lie below, so that no prefix repeats by accident."""

UNIT_TOKENS = HIT_UNIT_TOKENS[128]
C4, C128, WINDOW_A, WINDOW_B, C4_STATE, C128_STATE = range(6)
TOKENS_PER_C4_BLOCK = 128 * 4
EAGLE_SETS = {
    "none": frozenset(),
    "MTP": frozenset({WINDOW_B}),  # the group that holds the MTP layer
    "all": frozenset(range(6)),  # what vllm-ascend falls back to when none is flagged
}


def true_world(
    interval: int | str | None,
    eagle_group_ids: frozenset[int] = frozenset(),
    block_size: int = 128,
) -> BlockManager:
    return BlockManager(planned_layout(block_size, eagle_group_ids), interval, NUM_BLOCKS)


def prompt(num_tokens: int) -> list[int]:
    return list(range(num_tokens))


def outputs(num_tokens: int) -> range:
    return range(FIRST_OUTPUT, FIRST_OUTPUT + num_tokens)


def serve(world: BlockManager, token_ids: Sequence[int], num_output_tokens: int = 0) -> None:
    """Run a request from admission to its end."""
    request = world.request(token_ids)
    world.prefill(request, CHUNK_TOKENS)
    world.decode(request, outputs(num_output_tokens))
    world.finish(request)


def hits_around(world: BlockManager, num_tokens: int) -> Hits:
    """What lookups hit when a request has computed ``num_tokens`` tokens, in four situations.

    `support.retention.reachability` walks through every token of a life. Here only the moments
    around one length are visited, for which a few steps are enough.
    """
    return {
        **_finished(world, num_tokens),
        **_preempted_in_prefill(world, num_tokens),
        **_preempted_in_decode(world, num_tokens),
    }


def _finished(world: BlockManager, num_tokens: int) -> Hits:
    world.reset()
    serve(world, prompt(num_tokens))
    next_turn = [*prompt(num_tokens), *outputs(300)]
    return {
        "resend": world.hit_tokens(world.request(prompt(num_tokens))),
        "next turn": world.hit_tokens(world.request(next_turn)),
    }


def _preempted_in_prefill(world: BlockManager, num_tokens: int) -> Hits:
    world.reset()
    request = world.request(prompt(num_tokens + 300))
    world.admit(request, min(CHUNK_TOKENS, num_tokens))
    while request.num_computed_tokens < num_tokens:
        world.step(request, min(CHUNK_TOKENS, num_tokens - request.num_computed_tokens))
    return {"resume in prefill": _resume_and_finish(world, request)}


def _preempted_in_decode(world: BlockManager, num_tokens: int) -> Hits:
    """Decoding crosses the boundaries next to ``num_tokens``, one token at a time."""
    world.reset()
    num_prompt_tokens = max(1, num_tokens - 10)
    request = world.request(prompt(num_prompt_tokens))
    world.prefill(request, CHUNK_TOKENS)
    world.decode(request, outputs(num_tokens - num_prompt_tokens + 1))
    return {"resume after decoding": _resume_and_finish(world, request)}


def _resume_and_finish(world: BlockManager, request: Request) -> int:
    world.preempt(request)
    hit_tokens = world.prefill(request, CHUNK_TOKENS)
    world.finish(request)
    return hit_tokens


@pytest.fixture
def retention() -> Iterator[None]:
    with retention_installed():
        yield


def lengths(block_size: int) -> Iterator[int]:
    """Lengths around boundaries of three units: at them, and one block of each size behind."""
    sizes = BLOCK_SIZES[block_size]
    blocks = {0, sizes.c4_state, sizes.c128_state, sizes.window}
    distances = sorted({-1, *(block + extra for block in blocks for extra in (0, 1))})
    for index in (1, 2, 3) if IS_LONG else (1, 3):
        yield from (index * HIT_UNIT_TOKENS[block_size] + distance for distance in distances)


@pytest.mark.parametrize("eagle", EAGLE_SETS)
@pytest.mark.parametrize("block_size", HIT_UNIT_TOKENS)
def test_interval_0_hits_what_dense_caching_hits(block_size: int, eagle: str) -> None:
    difference = Difference()
    with retention_installed():
        dense = true_world(None, EAGLE_SETS[eagle], block_size)
        sparse = UnderPressure(planned_layout(block_size, EAGLE_SETS[eagle]), 0, NUM_BLOCKS)
        for length in lengths(block_size):
            found = hits_around(sparse, length)
            difference.compare(f"{length} tokens", hits_around(dense, length), found)
    assert not difference.examples


@pytest.mark.vllm("<0.30")
def test_stock_loses_a_resend_with_mtp() -> None:
    """The same comparison fails without the features: the look-ahead block does not fit."""
    mtp, num_tokens = EAGLE_SETS["MTP"], 2 * UNIT_TOKENS + 32
    assert hits_around(true_world(None, mtp), num_tokens)["resend"] == UNIT_TOKENS
    assert hits_around(true_world(0, mtp), num_tokens)["resend"] == 0


@pytest.mark.parametrize("eagle", EAGLE_SETS)
def test_adaptive_retention_hits_at_least_what_dense_caching_hits(eagle: str) -> None:
    """The prompt is sent again, extended and resumed; and a third prompt shares its prefix."""
    dense = true_world(None, EAGLE_SETS[eagle])
    with adaptive_retention():
        adaptive = true_world(None, EAGLE_SETS[eagle])
        for num_tokens in (UNIT_TOKENS + 129, 2 * UNIT_TOKENS + 1, 3 * UNIT_TOKENS + 700):
            found = hits_around(adaptive, num_tokens)
            for moment, hit_tokens in hits_around(dense, num_tokens).items():
                assert found[moment] >= hit_tokens, (num_tokens, moment)
        num_hits = 0
        for num_shared_tokens in (UNIT_TOKENS + 200, 2 * UNIT_TOKENS + 5000):
            hits = [hit_of_the_third(world, num_shared_tokens) for world in (dense, adaptive)]
            assert hits[1] >= hits[0], f"{num_shared_tokens} shared: {hits}"
            num_hits += hits[0] > 0
    assert num_hits > 0


def hit_of_the_third(world: BlockManager, num_shared_tokens: int) -> int:
    """The hit of the third of three prompts that begin with the same tokens, and then part."""
    world.reset()
    for start in (10**6, 2 * 10**6):
        own = range(start, start + UNIT_TOKENS + 500)
        serve(world, [*prompt(num_shared_tokens), *own], 3)
    own = range(3 * 10**6, 3 * 10**6 + UNIT_TOKENS + 500)
    return world.hit_tokens(world.request([*prompt(num_shared_tokens), *own]))


@pytest.mark.vllm("<0.30")  # vLLM 0.30 refuses it.
@pytest.mark.usefixtures("retention")
@pytest.mark.parametrize(
    "interval, nearest",
    [("128", (0, UNIT_TOKENS)), ("24576", (UNIT_TOKENS, 2 * UNIT_TOKENS))],
)
def test_an_interval_is_refused_with_unit_and_nearest_values(
    interval: str, nearest: tuple[int, int]
) -> None:
    with pytest.raises(ValueError, match=f"={interval!r}") as refused:
        true_world(interval)
    message = str(refused.value)
    assert f"multiple of {UNIT_TOKENS}" in message
    assert f"nearest valid values are {nearest[0]} and {nearest[1]};" in message


@pytest.mark.usefixtures("retention")
def test_blocks_kept_per_group() -> None:
    """Each group has one tail: one block for a window of 128 tokens, or four of 32 tokens."""
    world = UnderPressure(planned_layout(128), 0, NUM_BLOCKS)
    serve(world, prompt(2 * UNIT_TOKENS + UNIT_TOKENS // 2))
    world.request(())  # This looks the cache up when the surplus is gone.
    cached = [block.block_hash for block in world.pool.blocks if block.block_hash is not None]
    assert Counter(int.from_bytes(key[-4:], "big") for key in cached) == {
        C4: 2 * UNIT_TOKENS // TOKENS_PER_C4_BLOCK,
        C128: 2,
        WINDOW_A: 1,
        WINDOW_B: 1,
        C4_STATE: 1,
        C128_STATE: 4,
    }


@pytest.mark.vllm("<0.30")  # Other managers do not get the fast path.
def test_steps_between_two_blocks_are_quiet() -> None:
    num_output_tokens = 300
    with installed(FAST_PREFIX_CACHE.name, *(repair.name for repair in REPAIRS)):
        world = true_world(None)
        request = world.request(prompt(1000))
        world.prefill(request, CHUNK_TOKENS)
        world.decode(request, outputs(num_output_tokens))
        steps = BlockManagerState.of(world.manager).steps
    assert steps is not None and steps.groups
    # A block of the group of the smallest blocks begins, and one leaves the window, every 8 tokens.
    assert min(group.limits.block_tokens for group in steps.groups) == 8
    assert steps.counts.quiet >= 5 / 8 * num_output_tokens


def test_no_second_allowance_is_made_for_drafts() -> None:
    """vllm-ascend makes its managers wait for the tokens in flight, drafts included."""
    request: Request = true_world(None).request(range(10))
    request.num_output_placeholders, request.spec_token_ids = 4, [-1] * 3
    assert hasattr(request, "num_in_flight_tokens")
    assert drafts_in_flight(request) == 0
