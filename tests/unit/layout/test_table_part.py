# SPDX-License-Identifier: Apache-2.0
"""Part of a block table stands for the whole where a transfer needs no more."""

from __future__ import annotations

import pytest

from vllm_ascend_kvext.layout.errors import TokenRangeError
from vllm_ascend_kvext.layout.transfer_plan import TablePart

WHOLE = tuple(range(100, 112))
PART = TablePart(4, WHOLE[4:])


def test_slices_are_those_of_the_whole_table() -> None:
    assert len(PART) == len(WHOLE)
    for first in range(4, 14):
        for end in range(14):
            assert PART[first:end] == WHOLE[first:end]


@pytest.mark.parametrize("first", [0, 3])
def test_pages_before_the_part_are_refused(first: int) -> None:
    with pytest.raises(TokenRangeError, match="expected pages from 4 on, found"):
        PART[first:6]
    assert PART[first:first] == ()
