# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vllm-ascend-kvext project
"""Counts token by token which tokens the token behind a boundary reads. Chunks must keep them.

The code is slow, but plainly follows the definition of each attention. It does not know how the
layout plans.
"""

from __future__ import annotations

from dataclasses import dataclass, fields

from vllm_ascend_kvext.groups.model import GroupKind
from vllm_ascend_kvext.layout.model import LayoutGroup


@dataclass(frozen=True, slots=True)
class Reach:
    """The reach of one group. See ``LayoutGroup`` for the fields."""

    kind: GroupKind
    tokens_per_page: int
    tokens_per_row: int
    window_tokens: int = 0
    restart_tokens: int = 0
    holds_states: bool = False
    compress_ratio: int = 1

    @classmethod
    def of(cls, group: LayoutGroup) -> Reach:
        return cls(*(getattr(group, field.name) for field in fields(cls)))

    def reads(self, token: int, end: int) -> bool:
        """Whether a resume at ``end`` reads this token."""
        if self.kind is GroupKind.FULL:
            return True
        if self.kind is GroupKind.STATE:
            return token == end - 1  # The last token's page is the state at the end.
        if token <= end - self.window_tokens:
            return False
        return not self.restart_tokens or token // self.restart_tokens == end // self.restart_tokens

    def rows_read(self, first: int, end: int) -> list[int]:
        """The rows that a store keeps: whole rows of a chunk, in pages that are read.

        The boundary is the end of the last whole row. A state is kept at any boundary.
        """
        if self.kind is GroupKind.STATE:
            return self.rows_needed(first, end)
        end -= end % self.tokens_per_row
        pages = {token // self.tokens_per_page for token in range(end) if self.reads(token, end)}
        rows_per_page = self.tokens_per_page // self.tokens_per_row
        rows = range(first // self.tokens_per_row, end // self.tokens_per_row)
        return [row for row in rows if row // rows_per_page in pages]

    def rows_needed(self, first: int, end: int) -> list[int]:
        """The rows that a load moves: rows in pages that are read.

        The last row may be incomplete.
        """
        end -= end % self.compress_ratio
        pages = {token // self.tokens_per_page for token in range(end) if self.reads(token, end)}
        return sorted(
            {
                token // self.tokens_per_row
                for token in range(first, end)
                if token // self.tokens_per_page in pages
            }
        )
