# SPDX-License-Identifier: Apache-2.0
"""Tokens of segments between the pages of a worker and sections of host memory.

A store copies rows as they are. A load rotates keys to their new positions on the way::

    section in host memory --rotated_page_transfer--> staging rows --TokenPages.write--> pages

Everything that is named is checked before the first byte moves. Knows no queue and no requests.
"""

from __future__ import annotations

import threading
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from itertools import groupby, pairwise
from typing import TYPE_CHECKING, NamedTuple, Protocol

import numpy as np
import numpy.typing as npt

from vllm_ascend_kvext.blending.errors import SegmentError
from vllm_ascend_kvext.blending.key_check import KeyCheck, check_keys
from vllm_ascend_kvext.blending.rotary_signature import KeyPlane, key_rotation
from vllm_ascend_kvext.blending.segment_rows import SegmentLayout, SegmentRows
from vllm_ascend_kvext.blending.token_pages import (
    HostRows,
    Slots,
    TokenPages,
    TokenPlane,
    numbers_of,
)
from vllm_ascend_kvext.blending.token_slots import BlockTable, slots_of
from vllm_ascend_kvext.transfer.key_rotation import rotated_page_transfer
from vllm_ascend_kvext.transfer.placement import CopyPlacement
from vllm_ascend_kvext.transfer.pools import Pools
from vllm_ascend_kvext.transfer.schema import DTYPE, HOST_ALIGNMENT_BYTES, Direction

if TYPE_CHECKING:
    import torch

MOST_STAGING_BYTES = 64 << 20
"""Of the rows that one call rotates: of more, one part after the other."""

_STAGED_PAGE = 1
"""In the table of planes, the rows of a segment are a page of their own; page 0 is never moved."""


class _Staged(NamedTuple):
    """Some tokens of a segment, counted from its first, and their first row in staging."""

    rows: SegmentRows
    slots: Slots
    first_token: int
    num_tokens: int
    staging_row: int


class Staging(Protocol):
    """Host memory in which rows are rotated on their way to the pages."""

    @property
    def tensor(self) -> torch.Tensor:
        """dtype: uint8, shape: [num_bytes], as many as were asked for or more."""

    def unmap(self) -> None:
        """Let a device go that reaches it. Nothing is copied from it any more."""


class _PlainStaging:
    """For pages in host memory."""

    def __init__(self, num_bytes: int) -> None:
        import torch

        self.tensor = torch.empty(num_bytes, dtype=torch.uint8)

    def unmap(self) -> None:
        """There is no device."""


class SegmentMover:
    """Moves tokens of segments. Threads may share it.

    Args:
        pages: Of the worker.
        host: The host buffer. dtype: uint8, shape: [num_bytes].
        layout: Of the sections.
        placement: Where rotations run; None is the default of `rotated_page_transfer`.
        staging_bytes: At most, of the rows that one call rotates.
        make_staging: For so many bytes; where a device copies from it, memory that it can reach.
    """

    def __init__(
        self,
        pages: TokenPages,
        host: torch.Tensor,
        layout: SegmentLayout,
        placement: CopyPlacement | None = None,
        *,
        staging_bytes: int = MOST_STAGING_BYTES,
        make_staging: Callable[[int], Staging] = _PlainStaging,
    ) -> None:
        self.layout = layout
        self._pages: TokenPages | None = None
        self._host = host
        self._placement = placement
        self._token_bytes = sum(layout.row_bytes)
        self._most_tokens = max(1, staging_bytes // self._token_bytes)
        self._staging: Staging | None = None
        self._make_staging = make_staging
        self._loading = threading.Lock()  # There is one staging.
        self.renew(pages)

    def renew(self, pages: TokenPages) -> None:
        """Take the pages where they are since a wake-up or a reset.

        Raises:
            SegmentError: They are laid out otherwise; nothing has changed.
        """
        found = tuple(plane.row_bytes for plane in pages.planes)
        if found != self.layout.row_bytes:
            raise SegmentError(
                f"pages: expected planes of {_short(self.layout.row_bytes)} bytes per token, as "
                f"sections have, found {_short(found)}. Start a new engine for another layout."
            )
        self._pages = pages

    def retire(self) -> None:
        """Forget the pages: their memory is about to be taken away."""
        self._pages = None

    def close(self) -> None:
        """Give staging back. Nothing is loaded meanwhile; what is loaded later gets another."""
        staging, self._staging = self._staging, None
        if staging is not None:
            staging.unmap()

    def store(self, rows: Sequence[SegmentRows], block_ids: Sequence[BlockTable]) -> int:
        """Copy tokens out of pages into their sections.

        Args:
            rows: The tokens, and where they go.
            block_ids: Of the request, one part of a table per KV cache group.

        Returns:
            Bytes that were copied.

        Raises:
            SegmentError: Something does not fit; nothing has been written.
        """
        pages = self._require_pages()
        slots = [self._check(pages, each, block_ids) for each in rows]
        for each in rows:
            if each.shift_tokens:
                raise _refused(each, "shift", "0 for a store", each.shift_tokens, _STORE_AS_IT_IS)
        for each, of_rows in zip(rows, slots, strict=True):
            pages.read(of_rows, self._section(each))
        return self._num_bytes(rows)

    def load(self, rows: Sequence[SegmentRows], block_ids: Sequence[BlockTable]) -> int:
        """Copy tokens out of their sections into pages, keys rotated by their shifts.

        A shift of 0 keeps every bit.

        Args:
            rows: The tokens, each once, and where they come from.
            block_ids: As of `store`.

        Returns:
            Bytes that were copied.

        Raises:
            SegmentError: Something does not fit; nothing has been written.
        """
        pages = self._require_pages()
        slots = [self._check(pages, each, block_ids) for each in rows]
        _require_disjoint(self.layout, rows)
        if not rows:
            return 0
        with self._loading:
            for batch in self._batches(rows, slots):
                staged = self._stage(pages, batch)
                pages.write(_slots_of(batch), staged)
        return self._num_bytes(rows)

    def check_keys(self, rows: Sequence[SegmentRows]) -> KeyCheck:
        """Whether the keys that a store has stored turn with their positions alone.

        Of the model's first layer, whose keys depend on nothing else; see `key_check`.

        Args:
            rows: Chunks of one segment, ascending.
        """
        planes = self._require_pages().planes
        layer_name = planes[0].layer_name
        keys, *values = (
            partial(_numbers, self._host, self._row_offsets_bytes(rows, index), plane)
            for index, plane in enumerate(planes)
            if plane.layer_name == layer_name
        )
        signature = planes[0].keys
        assert signature is not None, "keys come before values"
        token_ids = [token_id for each in rows for token_id in each.token_ids]
        positions = [
            position for each in rows for position in range(each.first_tokens, each.end_tokens)
        ]
        return check_keys(token_ids, positions, signature, keys, values)

    def _row_offsets_bytes(
        self, rows: Sequence[SegmentRows], plane_index: int
    ) -> npt.NDArray[np.int64]:
        """Where the rows of tokens begin in host memory, in one plane. shape: [tokens]."""
        row_bytes = self.layout.row_bytes[plane_index]
        return np.concatenate(
            [
                self._section(each).plane_offsets_bytes[plane_index]
                + (each.first_row + np.arange(each.num_tokens)) * row_bytes
                for each in rows
            ]
        )

    def _stage(self, pages: TokenPages, batch: Sequence[_Staged]) -> HostRows:
        """Bring the rows of some tokens to staging, rotated."""
        num_tokens = sum(part.num_tokens for part in batch)
        offsets = self.layout.plane_offsets_bytes(num_tokens)
        # A page as large as the largest plane may lie before the first row.
        before = max(end - first for first, end in pairwise(offsets))
        staging = self._staging_of(before + offsets[-1])
        planes: list[tuple[int, ...]] = []
        runs: list[tuple[int, ...]] = []
        key_planes: list[KeyPlane] = []
        shifts: dict[int, int] = {}
        by_section = groupby(batch, key=lambda part: part.rows.offset_bytes)
        for group, (_, parts) in enumerate(by_section):
            of_section = list(parts)
            section = self._section(of_section[0].rows)
            first_row = of_section[0].staging_row
            num_rows = sum(part.num_tokens for part in of_section)
            shifts[group] = of_section[0].rows.shift_tokens
            for index, plane in enumerate(pages.planes):
                page_bytes = num_rows * plane.row_bytes
                place = before + offsets[index] + first_row * plane.row_bytes
                if plane.keys is not None:
                    key_planes.append(KeyPlane(len(planes), plane.keys, plane.num_heads))
                planes.append(
                    (
                        *(group, 0, place - _STAGED_PAGE * page_bytes, page_bytes, 0),
                        *(plane.row_bytes, num_rows, _STAGED_PAGE + 1),
                        section.plane_offsets_bytes[index],
                    )
                )
            for part in of_section:
                host_row = part.rows.first_row + part.first_token
                row = part.staging_row - first_row
                runs.append((group, _STAGED_PAGE, row, part.num_tokens, host_row))
        rotated_page_transfer(
            Pools.of([staging]),
            self._host,
            np.array(planes, DTYPE),
            np.array(runs, DTYPE),
            Direction.HOST_TO_PAGES,
            key_rotation(key_planes, shifts),
            placement=self._placement,
        )
        return HostRows(staging, [before + offset for offset in offsets[:-1]])

    def _batches(
        self, rows: Sequence[SegmentRows], slots: Sequence[Slots]
    ) -> Iterator[list[_Staged]]:
        """The tokens, as many at a time as staging holds; those of one section side by side.

        One call of the transfer op reads a section with one shift: a text that a prompt has twice
        is read by two.
        """
        for of_round in _rounds(rows, slots):
            batch: list[_Staged] = []
            num_tokens = 0
            for each, of_rows in of_round:
                first = 0
                while first < each.num_tokens:
                    count = min(each.num_tokens - first, self._most_tokens - num_tokens)
                    batch.append(_Staged(each, of_rows, first, count, num_tokens))
                    first += count
                    num_tokens += count
                    if num_tokens == self._most_tokens:
                        yield batch
                        batch, num_tokens = [], 0
            if batch:
                yield batch

    def _staging_of(self, num_bytes: int) -> torch.Tensor:
        if self._staging is None or self._staging.tensor.numel() < num_bytes:
            self.close()  # What was copied from it has arrived: pages wait for their copies.
            self._staging = self._make_staging(num_bytes)
        return self._staging.tensor

    def _section(self, rows: SegmentRows) -> HostRows:
        offsets = self.layout.plane_offsets_bytes(rows.section_rows)
        return HostRows(
            self._host, [rows.offset_bytes + offset for offset in offsets[:-1]], rows.first_row
        )

    def _check(
        self, pages: TokenPages, rows: SegmentRows, block_ids: Sequence[BlockTable]
    ) -> Slots:
        """Refuse what does not fit; else the slots of the tokens."""
        if not 0 <= rows.first_tokens < rows.end_tokens:
            raise _refused(
                rows,
                "tokens",
                "at least one",
                f"{rows.first_tokens} to {rows.end_tokens - 1}",
                "Leave out empty segments.",
            )
        if rows.offset_bytes < 0 or rows.offset_bytes % HOST_ALIGNMENT_BYTES:
            raise _refused(
                rows,
                "section",
                f"an offset that is a multiple of {HOST_ALIGNMENT_BYTES}",
                rows.offset_bytes,
                "Allocate sections in whole units of that.",
            )
        end_row = rows.first_row + rows.num_tokens
        if rows.first_row < 0 or end_row > rows.section_rows:
            raise _refused(
                rows,
                "section",
                f"rows within its {rows.section_rows}",
                f"{rows.first_row} to {end_row - 1}",
                "Name the rows of the stored tokens.",
            )
        end_bytes = rows.offset_bytes + self.layout.num_bytes(rows.section_rows)
        if end_bytes > self._host.numel():
            raise _refused(
                rows,
                "section",
                f"an end within the {self._host.numel()} bytes of the host buffer",
                end_bytes,
                "Pass the section where it was allocated.",
            )
        slots: dict[int, npt.NDArray[np.int64]] = {}
        for group, tokens_per_page in pages.tokens_per_page.items():
            what = f"block ids of KV cache group {group}"
            if group >= len(block_ids):
                found = f"{len(block_ids)} tables"
                raise _refused(rows, what, "a table of every group", found, "Pass all tables.")
            slots[group] = slots_of(
                f"{_tokens(rows)}, {what}",
                rows.first_tokens,
                rows.end_tokens,
                block_ids[group],
                tokens_per_page,
                pages.num_pages,
            )
        return slots

    def _require_pages(self) -> TokenPages:
        if self._pages is None:
            raise SegmentError(
                "pages: expected those of a worker, found retired ones. Call renew with the pages "
                "that hold the tokens since."
            )
        return self._pages

    def _num_bytes(self, rows: Sequence[SegmentRows]) -> int:
        return self._token_bytes * sum(each.num_tokens for each in rows)


def _numbers(
    memory: torch.Tensor,
    row_offsets_bytes: npt.NDArray[np.int64],
    plane: TokenPlane,
    tokens: Sequence[int],
) -> npt.NDArray[np.float64]:
    """Rows of some tokens in one plane. shape: [tokens, heads, head_elements]."""
    offsets = row_offsets_bytes[list(tokens), None] + np.arange(plane.row_bytes)
    shape = len(tokens), plane.num_heads, plane.head_elements
    return numbers_of(memory.numpy()[offsets], plane.dtype).reshape(shape)


_STORE_AS_IT_IS = "Store tokens as they are; a load moves them."


def _require_disjoint(layout: SegmentLayout, rows: Sequence[SegmentRows]) -> None:
    """Refuse a token that would be written twice, and sections that share bytes."""
    for one, other in pairwise(sorted(rows, key=lambda each: each.first_tokens)):
        if other.first_tokens < one.end_tokens:
            raise _refused(
                other,
                "tokens",
                f"none before {one.end_tokens}, where another segment ends",
                other.first_tokens,
                "Load every token once.",
            )
    for one, other in pairwise(sorted(rows, key=lambda each: each.offset_bytes)):
        end_bytes = one.offset_bytes + layout.num_bytes(one.section_rows)
        section = one.offset_bytes, one.section_rows
        if other.offset_bytes < end_bytes and section != (other.offset_bytes, other.section_rows):
            raise _refused(
                other,
                "section",
                f"another one than at {one.offset_bytes}, which has {one.section_rows} rows and "
                f"ends at {end_bytes}",
                f"{other.section_rows} rows at {other.offset_bytes}",
                "Name a section by where it was allocated.",
            )


def _rounds(
    rows: Sequence[SegmentRows], slots: Sequence[Slots]
) -> list[list[tuple[SegmentRows, Slots]]]:
    """Rows by section, each section with one shift at a time."""
    rounds: list[list[tuple[SegmentRows, Slots]]] = []
    shifts: dict[int, list[int]] = defaultdict(list)
    pairs = zip(rows, slots, strict=True)
    for each, of_rows in sorted(pairs, key=lambda pair: (pair[0].offset_bytes, pair[0].first_row)):
        known = shifts[each.offset_bytes]
        if each.shift_tokens not in known:
            known.append(each.shift_tokens)
        number = known.index(each.shift_tokens)
        if number == len(rounds):
            rounds.append([])
        rounds[number].append((each, of_rows))
    return rounds


def _slots_of(batch: Sequence[_Staged]) -> Slots:
    """Of all tokens of a batch."""
    return {
        group: np.concatenate(
            [
                part.slots[group][part.first_token : part.first_token + part.num_tokens]
                for part in batch
            ]
        )
        for group in batch[0].slots
    }


def _refused(
    rows: SegmentRows, what: str, expected: object, found: object, remedy: str
) -> SegmentError:
    return SegmentError(f"{_tokens(rows)}, {what}: expected {expected}, found {found}. {remedy}")


def _tokens(rows: SegmentRows) -> str:
    return f"segment with tokens {rows.first_tokens} to {rows.end_tokens - 1} of the request"


def _short(row_bytes: Sequence[int]) -> str:
    shown = ", ".join(map(str, row_bytes[:4]))
    return f"{len(row_bytes)} planes ({shown}{', …' if len(row_bytes) > 4 else ''})"
