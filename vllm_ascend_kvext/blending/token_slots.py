# SPDX-License-Identifier: Apache-2.0
"""The slots of a request's tokens, from its block table. See ``token_pages`` for what a slot is."""

from __future__ import annotations

from typing import Protocol

import numpy as np
import numpy.typing as npt

from vllm_ascend_kvext.blending.errors import SegmentError

_NULL_PAGE = 0


class BlockTable(Protocol):
    """Part of a block table, see ``TablePart``."""

    @property
    def first_page(self) -> int: ...

    @property
    def ids(self) -> tuple[int, ...]: ...


def slots_of(
    what: str,
    first_tokens: int,
    end_tokens: int,
    table: BlockTable,
    tokens_per_page: int,
    num_pages: int,
) -> npt.NDArray[np.int64]:
    """The slots of consecutive tokens in the pages of one KV cache group.

    Args:
        what: Whose tokens and table, for the error.
        first_tokens: Of the request.
        end_tokens: Behind the last of them.
        table: The request's, at least the part that has them.
        tokens_per_page: Of the group.
        num_pages: Of the worker.

    Raises:
        SegmentError: The part is too short, or a page is null or not there.
    """
    first_page, end_page = first_tokens // tokens_per_page, -(-end_tokens // tokens_per_page)
    end_of_table = table.first_page + len(table.ids)
    if first_page < table.first_page or end_page > end_of_table:
        raise SegmentError(
            f"{what}: expected pages {first_page} to {end_page - 1}, found {table.first_page} to "
            f"{end_of_table - 1}. Pass the part of the table that the tokens need."
        )
    ids = np.array(table.ids[first_page - table.first_page : end_page - table.first_page], np.int64)
    is_wrong = (ids <= _NULL_PAGE) | (ids >= num_pages)
    if is_wrong.any():
        index = int(np.argmax(is_wrong))
        found = int(ids[index])
        null = ", the null page" if found == _NULL_PAGE else ""
        raise SegmentError(
            f"{what}: expected pages 1 to {num_pages - 1}, found {found} for page "
            f"{first_page + index} of the request{null}. Leave out tokens whose pages are gone."
        )
    pages, in_page = np.divmod(np.arange(first_tokens, end_tokens, dtype=np.int64), tokens_per_page)
    slots: npt.NDArray[np.int64] = ids[pages - first_page] * tokens_per_page + in_page
    return slots
