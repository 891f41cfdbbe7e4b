# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vllm-ascend-kvext project
"""Writes to the pages of one worker like a model, and reads them like attention does.

The bytes of a row depend on the digest of all tokens up to the row, on the tensor, on the rank, on
the place in the row, and on how far the row was moved since it was computed. The module knows
tensors and digests, but neither connectors nor schedulers.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch

from support.layout.truth import LayoutFixture, PagedTensor
from support.layout.upstream_line import HAS_ONE_VIEW
from vllm_ascend_kvext.groups.model import GroupKind

NULL_PAGE = 0
_ODD = np.uint64(0x9E3779B97F4A7C15)

Digests = np.ndarray[Any, np.dtype[np.uint64]]
Shifts = np.ndarray[Any, np.dtype[np.int64]]
"""By token: the number of positions by which the token's row was moved."""

_SHIFT_BYTES = 251
_OF_SOMEBODY_ELSE = 0xA7


def token_axis_of(paged: PagedTensor) -> int:
    """The axis that counts tokens. It follows pages, or the heads of vLLM 0.30's single view."""
    if paged.token_axis is not None:
        return paged.token_axis
    return 2 if HAS_ONE_VIEW and paged.tensor.ndim == 4 else 1


class WrongBytesError(AssertionError):
    """A request would attend to bytes of other tokens."""


def moved_bytes(shifts: Any) -> Any:
    """The value that a move adds to each byte of a row."""
    return np.asarray(shifts % _SHIFT_BYTES, np.uint8)


class PageContents:
    """The pages of one worker.

    Args:
        writers: By group: ranks with the same number write the same bytes; one number for all.
    """

    def __init__(self, pages: LayoutFixture, writers: int | Sequence[int] = 0) -> None:
        if isinstance(writers, int):
            writers = [writers] * pages.num_groups
        self._tensors = [
            _TensorContents(tensor, salt=1000 * writers[tensor.group] + number)
            for number, tensor in enumerate(pages.tensors)
        ]

    def write(
        self, tables: Sequence[Sequence[int]], digests: Digests, start: int, end: int
    ) -> None:
        """Write the tokens from ``start`` to before ``end``, like a step does."""
        for tensor in self._tensors:
            tensor.write(tables[tensor.group], digests, start, end)

    def check_states(self, tables: Sequence[Sequence[int]], digests: Digests, start: int) -> None:
        """Check the state after ``start`` tokens. Recurrent layers read it before they write."""
        for tensor in self._tensors:
            if tensor.is_state and start:
                tensor.check(tables[tensor.group], digests, start - 1, start)

    def check_rows(
        self,
        tables: Sequence[Sequence[int]],
        digests: Digests,
        start: int,
        end: int,
        shifts: Shifts | None,
    ) -> None:
        """Check the rows that attention reads for the tokens from ``start`` to before ``end``."""
        for tensor in self._tensors:
            if not tensor.is_state:
                first = tensor.first_read(start)
                tensor.check(tables[tensor.group], digests, first, end, shifts)

    def check_group(
        self, group: int, table: Sequence[int], digests: Digests, first: int, end: int
    ) -> None:
        """Check that the pages of one group hold the tokens from ``first`` to before ``end``."""
        for tensor in self._tensors:
            if tensor.group == group:
                tensor.check(table, digests, first, end)

    def copy(self, source: int, target: int) -> None:
        """Copy a page, as vLLM >= 0.30 does with blocks of which a request hits a part."""
        for tensor in self._tensors:
            tensor.copy(source, target)

    def overwrite(self, pages: Sequence[int]) -> None:
        """Write wrong bytes to these pages."""
        for tensor in self._tensors:
            tensor.overwrite(pages)

    def row_bytes(self, digests: Digests) -> list[Any]:
        """The rows of tokens that were not moved, per tensor. shape: [num_tokens, row_bytes]."""
        return [tensor.row_bytes(digests) for tensor in self._tensors]


class _TensorContents:
    """One registered tensor as slots. A slot has an entry for a fixed number of tokens."""

    def __init__(self, paged: PagedTensor, salt: int) -> None:
        self.group = paged.group
        self._reach = paged.reach
        self.is_state = paged.reach.kind is GroupKind.STATE
        tensor = paged.tensor.movedim(paged.page_axis, 0)
        tensor = tensor.unsqueeze(1) if self.is_state else tensor.movedim(token_axis_of(paged), 1)
        # shape: [num_pages, slots_per_page, ...], dtype: uint8
        self._bytes = tensor.view(torch.uint8).numpy()
        self._slots = self._bytes.shape[1]
        self._tokens = paged.reach.tokens_per_page // self._slots
        self._salt = np.uint64((salt + 1) * int(_ODD) % (1 << 64))
        num_bytes = int(np.prod(self._bytes.shape[2:]))
        place = np.arange(num_bytes)
        self._byte_of_digest = place % 8
        self._place = (place // 8 * 37).astype(np.uint8)

    def first_read(self, start: int) -> int:
        reach = self._reach
        if reach.kind is GroupKind.FULL:
            return 0
        first = max(0, start - reach.window_tokens + 1)
        if reach.restart_tokens:
            first = max(first, start - start % reach.restart_tokens)
        return first

    def write(self, table: Sequence[int], digests: Digests, start: int, end: int) -> None:
        entries = self._entries(start, end)
        pages = np.asarray(table, np.int64)[entries // self._slots]
        has_page = pages != NULL_PAGE
        entries = entries[has_page]
        pages = pages[has_page]
        if len(entries):
            self._bytes[pages, entries % self._slots] = self._expected(entries, digests, end)

    def check(
        self,
        table: Sequence[int],
        digests: Digests,
        first: int,
        end: int,
        shifts: Shifts | None = None,
    ) -> None:
        entries = self._entries(first, end)
        if not len(entries):
            return
        pages = np.asarray(table, np.int64)[entries // self._slots]
        found = self._bytes[pages, entries % self._slots]
        expected = self._expected(entries, digests, end)
        if shifts is not None:
            last = (entries + 1) * self._tokens - 1
            moved = moved_bytes(shifts[last])
            expected = expected + moved.reshape(len(entries), *[1] * (expected.ndim - 1))
        if np.array_equal(found, expected) and (pages != NULL_PAGE).all():
            return
        differs = (found != expected).reshape(len(entries), -1).any(axis=1) | (pages == NULL_PAGE)
        wrong = entries[differs] * self._tokens
        raise WrongBytesError(
            f"group {self.group} ({self._reach.kind.value}): {len(wrong)} of {len(entries)} "
            f"entries before token {end} are not the request's own, those of tokens {wrong[0]} to "
            f"{wrong[-1]}, in blocks {sorted(set(pages[differs].tolist()))}"
        )

    def copy(self, source: int, target: int) -> None:
        self._bytes[target] = self._bytes[source]

    def overwrite(self, pages: Sequence[int]) -> None:
        self._bytes[pages] = _OF_SOMEBODY_ELSE

    def row_bytes(self, digests: Digests) -> Any:
        entries = self._entries(0, len(digests))
        return self._expected(entries, digests, len(digests)).reshape(len(entries), -1)

    def _entries(self, first: int, end: int) -> Any:
        """The complete entries. For states, only the entry at the end."""
        if self.is_state:
            return np.array([(end - 1) // self._tokens])
        return np.arange(first // self._tokens, end // self._tokens)

    def _expected(self, entries: Any, digests: Digests, end: int) -> Any:
        """shape: [num_entries, ...]"""
        last = np.array([end - 1]) if self.is_state else (entries + 1) * self._tokens - 1
        mixed = (digests[last] ^ self._salt) * _ODD
        of_entry = mixed.view(np.uint8).reshape(len(entries), 8)
        content = of_entry[:, self._byte_of_digest] + self._place
        return content.reshape(len(entries), *self._bytes.shape[2:])
