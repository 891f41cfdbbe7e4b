# SPDX-License-Identifier: Apache-2.0
"""What is lost, and to which cause."""

from __future__ import annotations

from dataclasses import astuple

import pytest
from retention.losses import CachedOnce, ComputedPrefixes, GroupNeeds, Losses, split_losses
from retention.texts import Library


class CachedAt:
    """Boundaries that were once cached."""

    def __init__(self, *boundaries: int) -> None:
        self._boundaries = boundaries

    def at(self, boundary_tokens: int) -> bool:
        return boundary_tokens in self._boundaries


class TestSplit:
    @pytest.mark.parametrize(
        "hit, ideal, look_ahead, once, expected",
        [
            (96, 99, 0, (96,), Losses(granularity=3)),
            (32, 99, 0, (96, 64, 32), Losses(granularity=3, evicted=64)),
            (32, 99, 0, (32,), Losses(granularity=3, never_kept=64)),
            (0, 99, 0, (64,), Losses(granularity=3, never_kept=32, evicted=64)),
            (0, 99, 0, (), Losses(granularity=3, never_kept=96)),
            (64, 99, 16, (64,), Losses(granularity=3, look_ahead=32)),
            (0, 20, 0, (), Losses(granularity=20)),
            (0, 0, 16, (), Losses()),
        ],
    )
    def test_by_cause(self, hit, ideal, look_ahead, once, expected):
        assert split_losses(hit, ideal, 32, look_ahead, CachedAt(*once)) == expected

    def test_adds_up(self):
        total = Losses(1, 2, 3, 4)
        total.add(Losses(10, 20, 30, 40))
        assert astuple(total) == (11, 22, 33, 44)
        for hit in range(0, 97, 32):
            losses = split_losses(hit, 99, 32, 0, CachedAt(32))
            assert sum(astuple(losses)) == 99 - hit


class TestCachedOnce:
    """Hashes of 4 tokens; a full group of blocks of 8, a window of 6 in blocks of 4."""

    HASHES = (b"0", b"1", b"2", b"3")
    GROUPS = (GroupNeeds(8, None), GroupNeeds(4, 5))

    @staticmethod
    def key(hash_: bytes, group_id: int) -> bytes:
        return hash_ + group_id.to_bytes(4, "big")

    def history(self, full: bytes, window: bytes) -> CachedOnce:
        ever_cached = {self.key(bytes([h]), 0) for h in full}
        ever_cached |= {self.key(bytes([h]), 1) for h in window}
        return CachedOnce(self.GROUPS, 4, self.HASHES, ever_cached)

    def test_a_boundary_reads_all_full_blocks_and_a_tail(self):
        history = self.history(full=b"13", window=b"23")
        assert history.at(16)
        assert not history.at(8)

    def test_a_missing_tail_block_counts(self):
        assert not self.history(full=b"13", window=b"3").at(16)

    def test_a_missing_full_block_counts_for_the_boundaries_behind_it(self):
        history = self.history(full=b"1", window=b"0123")
        assert not history.at(16)
        assert history.at(8)

    def test_a_tail_begins_with_the_text(self):
        assert GroupNeeds(4, 127).tail_blocks(8) == range(1, -1, -1)
        assert list(GroupNeeds(4, 5).tail_blocks(16)) == [3, 2]
        assert list(GroupNeeds(512, 1).tail_blocks(1024)) == [1]


class TestComputedPrefixes:
    def test_follows_texts_into_their_branches(self):
        library = Library("prefixes")
        root = library.write(100)
        one, other = library.write(50, root), library.write(50, root.cut(80))
        prefixes = ComputedPrefixes()
        assert prefixes.longest(one) == 0
        prefixes.extend(one, 0, 60)
        assert (prefixes.longest(one), prefixes.longest(other)) == (60, 60)
        prefixes.extend(one, 60, 120)
        assert (prefixes.longest(one), prefixes.longest(other)) == (120, 80)
        prefixes.extend(other, 80, 130)
        assert prefixes.longest(other) == 130
        assert prefixes.longest(library.write(9, other)) == 130

    def test_never_forgets(self):
        text = Library("prefixes").write(100)
        prefixes = ComputedPrefixes()
        prefixes.extend(text, 0, 90)
        prefixes.extend(text, 0, 20)
        assert prefixes.longest(text) == 90
