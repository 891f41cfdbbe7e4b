# SPDX-License-Identifier: Apache-2.0
"""A connector that was told of no blocks reads them off what is scheduled."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import pytest

from vllm_ascend_kvext.lmcache.first_blocks import complete_first_blocks

Blocks = tuple[list[int], ...]


@dataclass
class Tracker:
    """LMCache's, of a request."""

    blocks: dict[int, list[int]] = field(default_factory=dict)

    def num_allocated_blocks(self) -> dict[int, int]:
        return {group: len(blocks) for group, blocks in self.blocks.items()}

    def append_block_ids(self, new_block_ids: Blocks) -> None:
        for group, blocks in enumerate(new_block_ids):
            self.blocks.setdefault(group, []).extend(blocks)


@dataclass
class New:
    req_id: str
    block_ids: Blocks


@dataclass
class Cached:
    req_ids: Sequence[str] = ()
    new_block_ids: Sequence[Blocks | None] = ()
    resumed_req_ids: frozenset[str] = frozenset()


@dataclass
class Output:
    scheduled_new_reqs: Sequence[New] = ()
    scheduled_cached_reqs: Cached = field(default_factory=Cached)


@dataclass
class Connector:
    """LMCache's, of the scheduler: what it knows when it plans a step."""

    request_trackers: dict[str, Tracker]
    known: list[dict[int, list[int]]] = field(default_factory=list)

    def build_connector_meta(self, output: Output) -> Output:
        self.known += [dict(tracker.blocks) for tracker in self.request_trackers.values()]
        return output


@pytest.mark.parametrize(
    "output",
    [
        Output([New("a", ([1, 2], [3]))]),
        Output(
            scheduled_cached_reqs=Cached(
                ["other", "a"], [None, ([1, 2], [3])], frozenset({"other", "a"})
            )
        ),
    ],
    ids=["begins", "goes on after a preemption"],
)
@pytest.mark.parametrize(
    ("told", "known"),
    [
        ({}, {0: [1, 2], 1: [3]}),
        ({0: [], 1: []}, {0: [1, 2], 1: [3]}),
        ({0: [7], 1: [8]}, {0: [7], 1: [8]}),
    ],
    ids=["told of none", "told of none by group", "told"],
)
def test_what_was_not_told_is_read_before_the_step_is_planned(
    output: Output, told: dict[int, list[int]], known: dict[int, list[int]]
) -> None:
    connector = Connector({"a": Tracker({group: list(ids) for group, ids in told.items()})})
    complete_first_blocks(connector)
    assert connector.build_connector_meta(output) is output
    assert connector.known == [known]


def test_what_goes_on_is_left_to_lmcache() -> None:
    """It adds the new blocks itself; beside it, another goes on after a preemption."""
    connector = Connector({"a": Tracker()})
    complete_first_blocks(connector)
    cached = Cached(["a", "other"], [([4], [5]), ([6], [7])], frozenset({"other"}))
    connector.build_connector_meta(Output(scheduled_cached_reqs=cached))
    assert connector.known == [{}]


def test_requests_that_lmcache_does_not_know_are_passed_over() -> None:
    connector = Connector({})
    complete_first_blocks(connector)
    connector.build_connector_meta(Output([New("a", ([1],))]))
    assert connector.known == []
    complete_first_blocks(object())
