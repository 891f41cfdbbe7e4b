# SPDX-License-Identifier: Apache-2.0
"""Each repair on vllm-ascend's own coordinator, beside the defect, without retention.

A test named ``test_stock_...`` shows vLLM and vllm-ascend on their own.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from dataclasses import replace

import pytest

pytest.importorskip(
    "vllm_ascend",
    reason="needs KVEXT_ASCEND_SOURCES and a pytest process that runs tests/ascend alone",
)

from ascend_geometry import (
    HIT_UNIT_TOKENS,
    SMALL_HIT_UNIT_TOKENS,
    compressed_spec,
    planned_layout,
    small_layout,
    window_spec,
)
from long_prompts import NUM_BLOCKS, prompt, serve
from support.installed import installed
from support.scheduler.block_manager import BlockManager, Layout
from vllm.v1.request import Request

from vllm_ascend_kvext.patches.repairs.async_scheduler import drafts_in_flight

C4, C128 = 0, 1


@pytest.fixture
def repaired(request: pytest.FixtureRequest) -> Iterator[None]:
    """The features named by the class are in effect, and no others."""
    with installed(*request.cls.FEATURES):
        yield


class TestTrimFullGroups:
    FEATURES = ("trim-full-groups",)
    UNIT_TOKENS = HIT_UNIT_TOKENS[128]
    MTP = frozenset({3})

    def handed_out(self) -> tuple[int, dict[int, int]]:
        """Tokens hit by a prompt that is sent again, and tokens handed out per full group."""
        layout = planned_layout(128, self.MTP)
        world = BlockManager(layout, num_blocks=NUM_BLOCKS)
        token_ids = prompt(2 * self.UNIT_TOKENS + 32)
        serve(world, token_ids)
        blocks, hit_tokens = world.manager.get_computed_blocks(world.request(token_ids))
        return hit_tokens, {
            group_id: len(blocks.blocks[group_id])
            * layout.specs[group_id].block_size
            * layout.specs[group_id].compress_ratio
            for group_id in (C4, C128)
        }

    def test_stock_hands_out_more_than_it_hits(self) -> None:
        hit_tokens, handed_out = self.handed_out()
        assert hit_tokens == self.UNIT_TOKENS
        assert handed_out[C128] == 2 * self.UNIT_TOKENS

    @pytest.mark.usefixtures("repaired")
    def test_every_full_group_ends_where_the_hit_ends(self) -> None:
        assert self.handed_out() == (
            self.UNIT_TOKENS,
            {C4: self.UNIT_TOKENS, C128: self.UNIT_TOKENS},
        )


class TestTwoPhaseAllocation:
    """The shape of Gemma: one full group, which is compressed at ratio 1, and five windows."""

    FEATURES = ("two-phase-allocation",)
    GEMMA = Layout(
        (compressed_spec(4, 1), *(window_spec(4, 64, head_size=i + 1) for i in range(5)))
    )

    def owned_twice(self) -> list[int]:
        world = BlockManager(self.GEMMA, num_blocks=1 + 6 * 11 + 6 * 10)
        assert type(world.manager.coordinator).__name__ == "AscendHybridKVCacheCoordinator"
        first, other = world.request(range(41)), world.request(range(1000, 1040))
        for filling in (first, other):
            world.prefill(filling, 100)
        for filling in (first, other):
            world.finish(filling)
        request = world.request(range(74))
        blocks, hit_tokens = world.manager.get_computed_blocks(request)
        assert hit_tokens == 40
        assert world.manager.allocate_slots(
            request, 2, hit_tokens, blocks, num_external_computed_tokens=32
        )
        groups = world.manager.coordinator.get_blocks(request.request_id)
        owners = Counter(block.block_id for group in groups for block in group if not block.is_null)
        return [block_id for block_id, count in owners.items() if count > 1]

    def test_stock_gives_one_block_to_two_groups(self) -> None:
        assert self.owned_twice()

    @pytest.mark.usefixtures("repaired")
    def test_no_block_belongs_to_two_groups(self) -> None:
        assert not self.owned_twice()


class TestContextParallelWindows:
    FEATURES = ("context-parallel-windows", "trim-full-groups")

    def hits(self, **ranks: int) -> tuple[int, list[int]]:
        """Of a prompt that is sent again: tokens hit, and blocks handed out per group."""
        world = BlockManager(
            small_layout(),
            scheduler_block_size=2 * SMALL_HIT_UNIT_TOKENS,
            manager_arguments=ranks,
        )
        token_ids = range(4 * SMALL_HIT_UNIT_TOKENS + 5)
        first = world.request(token_ids)
        world.prefill(first, 20)
        world.finish(first)
        again = world.request(token_ids)
        blocks, hit_tokens = world.manager.get_computed_blocks(again)
        world.prefill(again, 20)
        world.finish(again)
        return hit_tokens, [len(group) for group in blocks.blocks]

    @pytest.mark.parametrize("ranks", ["dcp_world_size", "pcp_world_size"])
    def test_stock_asserts(self, ranks: str) -> None:
        with pytest.raises(AssertionError, match="not support sliding window"):
            self.hits(**{ranks: 2})

    @pytest.mark.usefixtures("repaired")
    @pytest.mark.parametrize("ranks", ["dcp_world_size", "pcp_world_size"])
    def test_nothing_is_hit(self, ranks: str) -> None:
        assert self.hits(**{ranks: 2}) == (0, [0] * 6)


class TestDraftsInFlight:
    FEATURES = ("drafts-in-flight",)

    @pytest.mark.usefixtures("repaired")
    def test_allowance_is_made_once(self) -> None:
        """vllm-ascend has its managers wait for the tokens in flight, drafts included."""
        world = BlockManager(small_layout())
        request: Request = world.request(range(10))
        request.num_output_placeholders, request.spec_token_ids = 4, [-1] * 3
        assert hasattr(request, "num_in_flight_tokens")
        assert drafts_in_flight(request) == 0


def test_the_small_layout_has_compressed_groups_first() -> None:
    specs = small_layout().specs
    assert [spec.compress_ratio for spec in specs[:2]] == [4, 8]
    assert replace(specs[0], compress_ratio=8) == specs[1]
