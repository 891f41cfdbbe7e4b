# SPDX-License-Identifier: Apache-2.0
"""What upstream gets wrong about retention on Ascend, each beside what this package does.

A test named ``test_stock_...`` shows vLLM and vllm-ascend on their own; without it, one could not
tell whether the test after it can fail.
"""

from __future__ import annotations

from collections.abc import Iterator

import pytest

pytest.importorskip(
    "vllm_ascend",
    reason="needs KVEXT_ASCEND_SOURCES and a pytest process that runs tests/ascend alone",
)

from ascend_geometry import HIT_UNIT_TOKENS, planned_layout
from long_prompts import CHUNK_TOKENS, NUM_BLOCKS, hits_around, outputs, prompt, serve
from support.installed import retention_installed
from support.scheduler.block_manager import BlockManager

UNIT_TOKENS = HIT_UNIT_TOKENS[128]
C4, C128, WINDOW_A, WINDOW_B, C4_STATE, C128_STATE = range(6)
MTP = frozenset({WINDOW_B})  # the group that holds the MTP layer


def true_world(
    interval: int | str | None,
    eagle_group_ids: frozenset[int] = frozenset(),
    block_size: int = 128,
) -> BlockManager:
    return BlockManager(planned_layout(block_size, eagle_group_ids), interval, NUM_BLOCKS)


@pytest.fixture
def retention() -> Iterator[None]:
    with retention_installed():
        yield


class TestInterval:
    """An interval that is no multiple of the unit of hits keeps blocks that nothing can hit."""

    NUM_TOKENS = 3 * UNIT_TOKENS + 1

    def test_stock_accepts_one_that_never_hits(self):
        dense, sparse = true_world(None), true_world(128)
        for world in (dense, sparse):
            serve(world, prompt(self.NUM_TOKENS))
        assert dense.cached_blocks()[WINDOW_A] == 3
        assert sparse.cached_blocks()[WINDOW_A] == 3 * UNIT_TOKENS // 128

    @pytest.mark.usefixtures("retention")
    @pytest.mark.parametrize(
        "interval, nearest",
        [
            ("128", (0, UNIT_TOKENS)),
            ("24576", (UNIT_TOKENS, 2 * UNIT_TOKENS)),
            ("-5", (0, UNIT_TOKENS)),
            ("1e4", (0, UNIT_TOKENS)),
        ],
    )
    def test_is_refused_with_unit_and_nearest_values(self, interval, nearest):
        with pytest.raises(ValueError, match=f"={interval!r}") as refused:
            true_world(interval)
        message = str(refused.value)
        assert f"multiple of {UNIT_TOKENS}" in message
        assert f"nearest valid values are {nearest[0]} and {nearest[1]};" in message

    @pytest.mark.usefixtures("retention")
    @pytest.mark.parametrize("interval", [UNIT_TOKENS, 2 * UNIT_TOKENS])
    def test_leaves_a_checkpoint_at_each_multiple(self, interval):
        """A conversation that branches off falls back to the last multiple before the branch."""
        world = true_world(interval)
        serve(world, prompt(self.NUM_TOKENS))
        for branch_tokens in range(1000, self.NUM_TOKENS, 1000):
            branch = [*prompt(branch_tokens), *outputs(1000)]
            assert world.hit_tokens(world.request(branch)) == branch_tokens // interval * interval


class TestCompressedGroups:
    """Blocks of compressed groups behind the last boundary can never be hit."""

    NUM_TOKENS = UNIT_TOKENS + UNIT_TOKENS // 2
    TOKENS_PER_C4_BLOCK = 128 * 4

    def test_stock_caches_them(self):
        world = true_world(None)
        serve(world, prompt(self.NUM_TOKENS))
        assert world.cached_blocks()[C4] == self.NUM_TOKENS // self.TOKENS_PER_C4_BLOCK

    @pytest.mark.usefixtures("retention")
    @pytest.mark.parametrize("interval", [0, UNIT_TOKENS])
    def test_end_at_the_last_boundary(self, interval):
        world = true_world(interval)
        serve(world, prompt(self.NUM_TOKENS))
        assert world.cached_blocks()[C4] == UNIT_TOKENS // self.TOKENS_PER_C4_BLOCK
        assert world.cached_blocks()[C128] == 1

    def test_stock_hands_out_more_than_it_hits(self):
        assert self._hit_of_a_resend_with_mtp(None) == (UNIT_TOKENS, 2)

    @pytest.mark.usefixtures("retention")
    def test_hand_out_what_is_hit(self):
        assert self._hit_of_a_resend_with_mtp(0) == (UNIT_TOKENS, 1)

    def _hit_of_a_resend_with_mtp(self, interval: int | None) -> tuple[int, int]:
        """Tokens hit, and blocks of ratio 128 handed out."""
        world = true_world(interval, MTP)
        token_ids = prompt(2 * UNIT_TOKENS + 32)
        serve(world, token_ids)
        blocks, hit_tokens = world.manager.get_computed_blocks(world.request(token_ids))
        return hit_tokens, len(blocks.blocks[C128])


class TestReplayBoundary:
    """Where the same prompt, its extension, or a preempted request hits."""

    LOOK_AHEAD_DOES_NOT_FIT = (2 * UNIT_TOKENS + 1, 2 * UNIT_TOKENS + 32, 2 * UNIT_TOKENS + 128)

    @pytest.mark.parametrize("num_tokens", LOOK_AHEAD_DOES_NOT_FIT)
    def test_stock_loses_a_resend_with_mtp(self, num_tokens):
        assert hits_around(true_world(None, MTP), num_tokens)["resend"] == UNIT_TOKENS
        assert hits_around(true_world(0, MTP), num_tokens)["resend"] == 0

    @pytest.mark.usefixtures("retention")
    @pytest.mark.parametrize("num_tokens", LOOK_AHEAD_DOES_NOT_FIT)
    def test_leaves_room_for_the_look_ahead_block(self, num_tokens):
        assert hits_around(true_world(0, MTP), num_tokens)["resend"] == UNIT_TOKENS

    def test_stock_loses_the_next_turn_of_an_aligned_prompt(self):
        assert hits_around(true_world(0), 2 * UNIT_TOKENS)["next turn"] == UNIT_TOKENS

    @pytest.mark.usefixtures("retention")
    def test_next_turn_of_an_aligned_prompt_hits_all_of_it(self):
        assert hits_around(true_world(0), 2 * UNIT_TOKENS)["next turn"] == 2 * UNIT_TOKENS

    def test_stock_forgets_what_was_decoded(self):
        assert self._hit_of_a_request_preempted_after_decoding() == HIT_UNIT_TOKENS[32]

    @pytest.mark.usefixtures("retention")
    def test_preempted_request_resumes_behind_what_it_decoded(self):
        assert self._hit_of_a_request_preempted_after_decoding() == 2 * HIT_UNIT_TOKENS[32]

    def _hit_of_a_request_preempted_after_decoding(self) -> int:
        world = true_world(0, block_size=32)
        request = world.request(prompt(HIT_UNIT_TOKENS[32] + 400))
        world.prefill(request, CHUNK_TOKENS)
        world.decode(request, outputs(HIT_UNIT_TOKENS[32]))
        world.preempt(request)
        return world.hit_tokens(request)


@pytest.mark.usefixtures("retention")
def test_blocks_kept_per_group():
    """One tail per group: of a window of 128 tokens one block, or four blocks of 32 tokens."""
    world = true_world(0)
    serve(world, prompt(2 * UNIT_TOKENS + 1000))
    assert world.cached_blocks() == {
        C4: 2 * UNIT_TOKENS // 512,
        C128: 2,
        WINDOW_A: 1,
        WINDOW_B: 1,
        C4_STATE: 1,
        C128_STATE: 4,
    }
