# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vllm-ascend-kvext project
"""References give way where blocks are lacking, and only there."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from vllm_ascend_kvext.connector.common.block_references import BlockReferences


class World:
    """A pool, and referenced blocks of which each call of ``give_way`` frees some."""

    def __init__(self, num_free: int, given: list[int]) -> None:
        self.num_free = num_free
        self._given = given
        self.pool: Any = SimpleNamespace(
            get_num_free_blocks=lambda: self.num_free, get_new_blocks=self._get_new_blocks
        )
        self.references = BlockReferences(self.pool, self._give_way)

    def _get_new_blocks(self, num_blocks: int) -> list[Any]:
        self.num_free -= num_blocks
        return [SimpleNamespace(block_id=number) for number in range(num_blocks)]

    def _give_way(self) -> bool:
        if not self._given:
            return False
        self.num_free += self._given.pop(0)
        return True


@pytest.mark.parametrize(
    ("num_blocks", "is_free", "num_left"),
    [(5, True, 2), (6, True, 1), (8, True, 1), (9, True, 0), (10, True, 0), (11, False, 0)],
)
def test_as_few_give_way_as_are_needed(num_blocks: int, is_free: bool, num_left: int) -> None:
    given = [3, 2]
    world = World(5, given)
    assert world.references.make_free(num_blocks) is is_free
    assert len(given) == num_left


def test_blocks_of_holes_are_allocated_where_others_give_way() -> None:
    world = World(1, [3])
    blocks = world.references.allocate(4)
    assert blocks is not None and len(list(blocks)) == 4
    assert world.references.num_references == 4
    assert world.references.allocate(1) is None
