# SPDX-License-Identifier: Apache-2.0
"""Runs of blocks that are cut at a boundary, and the counts of tails that share blocks."""

from __future__ import annotations

from collections import Counter

import pytest
from hypothesis import given
from hypothesis import strategies as st
from unit.retention.pool_model import ModelBlock, hash_of

from vllm_ascend_kvext.retention.checkpoints import (
    Checkpoint,
    TailCounts,
    alive,
    cut_runs,
)
from vllm_ascend_kvext.retention.protocols import CachedBlock
from vllm_ascend_kvext.retention.reasons import Origin, Reason

PROMPT = Reason(Origin.PROMPT)


def cached_blocks(*block_ids: int) -> list[CachedBlock]:
    found = []
    for block_id in block_ids:
        block_hash = hash_of("prefix", block_id)
        found.append((ModelBlock(block_id, _block_hash=block_hash), block_hash))
    return found


@pytest.mark.parametrize("num_tokens", [0, 8, 16, 24])
def test_runs_are_cut_after_the_same_number_of_tokens(num_tokens: int) -> None:
    runs = (cached_blocks(*range(3)), cached_blocks(*range(10, 16)))
    before, after = cut_runs(runs, num_tokens, (8, 4))
    assert [len(run) for run in before] == [num_tokens // 8, num_tokens // 4]
    assert tuple(a + b for a, b in zip(before, after, strict=True)) == runs


def test_every_group_needs_its_block_size() -> None:
    with pytest.raises(ValueError, match="zip"):
        cut_runs((cached_blocks(1), cached_blocks(2)), 4, (4,))


def test_a_checkpoint_is_cut_from_its_parent_on() -> None:
    root = Checkpoint(b"", 0, None, PROMPT)
    parent = Checkpoint(b"a" * 16, 16, root, PROMPT)
    node = Checkpoint(b"a" * 40, 40, parent, PROMPT)
    node.runs = (cached_blocks(*range(6)),)
    before, after = node.cut(24, (4,))
    assert [len(before[0]), len(after[0])] == [2, 4]
    assert node.num_run_blocks == 6


def test_only_the_empty_prefix_has_no_parent() -> None:
    root = Checkpoint(b"", 0, None, PROMPT)
    assert root.is_root
    assert not Checkpoint(b"a", 4, root, PROMPT).is_root


def test_a_boundary_is_needed_for_its_tail_its_children_or_a_request() -> None:
    root = Checkpoint(b"", 0, None, PROMPT)
    node = Checkpoint(b"a", 4, root, PROMPT)
    assert not node.is_needed
    node.pins = 1
    assert node.is_needed
    node.pins = 0
    node.tail = cached_blocks(1)
    assert node.is_needed
    node.tail = []
    node.children.add(Checkpoint(b"aa", 8, node, PROMPT))
    assert node.is_needed


def test_a_block_with_another_hash_is_not_alive() -> None:
    blocks = cached_blocks(1, 2, 3)
    blocks[0][0]._block_hash = None
    blocks[1][0]._block_hash = hash_of("prefix", 2)  # cached again: equal, and not the same
    assert alive(blocks) == [blocks[2][0]]


@given(
    events=st.lists(
        st.tuples(st.sampled_from(["add", "remove", "reallocate"]), st.integers(0, 3)), max_size=60
    )
)
def test_counts_of_tails(events: list[tuple[str, int]]) -> None:
    counts = TailCounts()
    blocks = cached_blocks(*range(4))
    expected: Counter[int] = Counter()
    gone: list[CachedBlock] = []
    for event, index in events:
        if event == "add":
            assert counts.add([blocks[index]]) == (not expected[index])
            expected[index] += 1
        elif event == "remove":
            last = counts.remove([blocks[index]])
            assert last == ([blocks[index]] if expected[index] == 1 else [])
            expected[index] = max(0, expected[index] - 1)
        else:
            gone.append(blocks[index])
            block_hash = hash_of("another prefix", index)
            blocks[index] = (blocks[index][0], block_hash)
            counts.add([blocks[index]])
            expected[index] = 1
        assert [counts.count(cached) for cached in blocks] == [expected[i] for i in range(4)]
        assert counts.share(blocks) == pytest.approx(sum(1 / n for n in expected.values() if n))
        assert not counts.share(gone) and not counts.remove(gone)
        assert not any(counts.count(cached) for cached in gone)
    counts.clear()
    assert not any(counts.count(cached) for cached in blocks)
