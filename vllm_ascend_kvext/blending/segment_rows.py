# SPDX-License-Identifier: Apache-2.0
"""How the tokens of a segment lie in host memory, and which of them go to or come from a request.

A *section* has room for the rows of consecutive tokens, plane after plane: the keys and the values
of each layer, a row per token, whatever order the pages have. Every plane begins at a multiple of
64 bytes::

    section of 3 rows    keys of layer 0: row 0 row 1 row 2 | values of layer 0: row 0 ...

Knows no pages, and no torch.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import NamedTuple

from vllm_ascend_kvext.transfer.schema import HOST_ALIGNMENT_BYTES


@dataclass(frozen=True, slots=True)
class SegmentLayout:
    """What a worker says of its tokens.

    Attributes:
        row_bytes: Of one token, by plane.
        fingerprint: Equal where rows of one engine can be used by another: model, dtypes, planes,
            and how keys turn. Hexadecimal digits.
        window_tokens: The largest sliding window, with the token that reads; 0 if there is none.
    """

    row_bytes: tuple[int, ...]
    fingerprint: str
    window_tokens: int = 0

    def plane_offsets_bytes(self, section_rows: int) -> list[int]:
        """Where the planes of a section begin, and, last, where it ends."""
        sizes = [_aligned(row_bytes * section_rows) for row_bytes in self.row_bytes]
        return list(accumulate(sizes, initial=0))

    def num_bytes(self, section_rows: int) -> int:
        """Size of a section."""
        return sum(_aligned(row_bytes * section_rows) for row_bytes in self.row_bytes)


class SegmentRows(NamedTuple):
    """Consecutive tokens of a request, and their rows in one section.

    Attributes:
        first_tokens: Of the request.
        end_tokens: Behind the last of them.
        offset_bytes: Where the section begins in the host buffer, a multiple of 64.
        section_rows: That it has room for.
        first_row: Of the first token, in the section.
        shift_tokens: By how many positions a load moves the keys.
        token_ids: Of a store: the tokens, by which keys are checked. Empty for a load.
    """

    first_tokens: int
    end_tokens: int
    offset_bytes: int
    section_rows: int
    first_row: int
    shift_tokens: int = 0
    token_ids: Sequence[int] = ()

    @property
    def num_tokens(self) -> int:
        return self.end_tokens - self.first_tokens


def _aligned(num_bytes: int) -> int:
    return num_bytes + -num_bytes % HOST_ALIGNMENT_BYTES
