# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vllm-ascend-kvext project
"""Moves the rows of segments between the pages of a worker and sections of host memory.

A store copies rows as they are. A load rotates keys to their new positions on the way::

    section in host memory --rotated_page_transfer--> staging rows --TokenPages.write--> pages

All places are checked before the first byte moves. This module knows no queue and no requests.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from functools import partial
from itertools import groupby, pairwise
from typing import TYPE_CHECKING, NamedTuple, Protocol

import numpy as np
import numpy.typing as npt

from vllm_ascend_kvext.connector.common.messages import EXTRA_ROWS, PlaneDigest
from vllm_ascend_kvext.connector.worker.plane_digests import digest_of
from vllm_ascend_kvext.errors import SegmentError
from vllm_ascend_kvext.layout.sharing import HostSharing, PlaneShare
from vllm_ascend_kvext.layout.transfer_plan import TablePart
from vllm_ascend_kvext.segments.keys.key_check import check_keys
from vllm_ascend_kvext.segments.keys.rotary import KeyPlane, key_rotation, torch_dtype
from vllm_ascend_kvext.segments.token_rows import (
    HostRows,
    SegmentLayout,
    SegmentRows,
    Slots,
    TokenPages,
    TokenPlane,
    slots_of,
)
from vllm_ascend_kvext.segments.worker.section_share import SectionShare, apart, section_share
from vllm_ascend_kvext.transfer.key_rotation import rotated_page_transfer
from vllm_ascend_kvext.transfer.placement import Placer, in_calling_thread
from vllm_ascend_kvext.transfer.pools import Pools
from vllm_ascend_kvext.transfer.schema import DTYPE, HOST_ALIGNMENT_BYTES, Direction

if TYPE_CHECKING:
    import torch

MAX_STAGING_BYTES = 64 << 20
"""The maximum size of the rows that one call rotates. More rows take several calls."""

_STAGED_PAGE = 1
"""The page number of a segment's rows in the table of planes. The op never moves page 0."""


class _Staged(NamedTuple):
    """Some tokens of a segment, counted from its first token, and their first row in staging."""

    rows: SegmentRows
    slots: Slots
    first_token: int
    num_tokens: int
    staging_row: int


class Staging(Protocol):
    """The host memory in which rows are rotated on their way to pages; a ``HostBuffer``."""

    @property
    def tensor(self) -> torch.Tensor:
        """The memory. dtype: uint8, shape: [num_bytes], at least the requested number."""

    def unmap(self) -> None:
        """Unmap the memory from a device. No copy from it is under way or follows."""


class SegmentMover:
    """Moves tokens of segments. Threads may share it.

    ``host`` is the host buffer, dtype: uint8, shape: [num_bytes]. ``make_staging`` makes host
    memory of a given size, which the device of the pages can reach. ``pages`` is None while the
    memory of the pages is taken away. After a wake-up or a reset, ``pages`` is set to new pages
    with the same rows. ``sharing`` says how the worker shares the host buffer, and ``shares`` how
    it shares the planes of ``layout``; None, and nothing, if it does not.
    """

    def __init__(
        self,
        pages: TokenPages,
        host: torch.Tensor,
        layout: SegmentLayout,
        make_staging: Callable[[int], Staging],
        placer: Placer = in_calling_thread,
        sharing: HostSharing | None = None,
        shares: Sequence[PlaneShare] = (),
    ) -> None:
        self._sharing = sharing
        self._share_sections(layout, section_share(sharing, shares))
        self.pages: TokenPages | None = pages
        self._host = host
        self._placer = placer
        self._own_rows: dict[int, torch.Tensor] = {}  # See `_keep_own_keys`.
        self._token_bytes = sum(layout.row_bytes)
        self._max_tokens = max(1, MAX_STAGING_BYTES // self._token_bytes)
        self._staging: Staging | None = None
        self._make_staging = make_staging
        self._loading = threading.Lock()  # All loads share one staging memory.
        self._checking_keys = threading.Lock()
        self._are_keys_settled = False
        self._num_key_checks = 0
        self._key_check_failure = ""

    def close(self) -> None:
        """Give the staging memory back, while no load runs. A later load makes new memory."""
        staging = self._staging
        self._staging = None
        if staging is not None:
            staging.unmap()

    def _share_sections(self, layout: SegmentLayout, share: SectionShare) -> None:
        self._share = share
        self.layout = replace(layout, num_sections=share.num_sections, section=share.section)

    def keep_apart(self) -> None:
        """From the next job on, this worker has its own section of each entry."""
        if self._sharing is not None:
            self._share_sections(self.layout, apart(self._sharing))

    def digests(
        self, rows: Sequence[SegmentRows], block_ids: Sequence[TablePart]
    ) -> tuple[PlaneDigest, ...]:
        """Digests of what this worker has in its pages for the first chunk of a store."""
        if not self._share.planes:
            return ()
        pages = self._require_pages()
        slots = self._check(pages, rows[0], block_ids)
        found = (pages.read_plane(i, slots[each.group]) for i, each in enumerate(pages.planes))
        content = self._share.content
        return tuple(
            PlaneDigest(EXTRA_ROWS, index, content, digest_of(each.tobytes()))
            for index, each in enumerate(found)
        )

    def store(self, rows: Sequence[SegmentRows], block_ids: Sequence[TablePart]) -> int:
        """Copy tokens of a request out of pages into their sections; returns the number of bytes.

        ``block_ids`` has one part of the request's table per KV cache group. Keys are not rotated.
        Workers that share sections divide them: this worker writes some, another one the others.

        Raises:
            SegmentError: A place of a token is wrong. No byte has been written.
        """
        pages = self._require_pages()
        slots = [self._check(pages, each, block_ids) for each in rows]
        written = []
        for each, of_rows in zip(rows, slots, strict=True):
            if self._share.writes(each.offset_bytes):
                pages.read(of_rows, self._section(each))
                written.append(each)
        self._own_rows = {}
        if len(written) < len(rows) and not self._are_keys_settled:
            self._keep_own_keys(pages, slots)
        return self._num_bytes(written)

    def _keep_own_keys(self, pages: TokenPages, slots: Sequence[Slots]) -> None:
        """Keep the rows that `after_store` checks: another worker may not have written them yet."""
        import torch

        for index, plane in enumerate(pages.planes):
            if plane.layer_name == pages.planes[0].layer_name:
                found = [pages.read_plane(index, each[plane.group]) for each in slots]
                self._own_rows[index] = torch.from_numpy(np.concatenate(found).reshape(-1))

    def load(self, rows: Sequence[SegmentRows], block_ids: Sequence[TablePart]) -> int:
        """Copy tokens out of their sections into pages; for arguments and errors, see `store`.

        Each token is copied once. Keys are rotated by their shifts. A shift of 0 keeps every bit.
        """
        pages = self._require_pages()
        slots = [self._check(pages, each, block_ids) for each in rows]
        with self._loading:
            for batch in self._batches(rows, slots):
                staged = self._stage(pages, batch)
                pages.write(_slots_of(batch), staged)
        return self._num_bytes(rows)

    def after_store(self, rows: Sequence[SegmentRows]) -> None:
        """Check the keys of a stored segment, unless an earlier store has settled the check.

        All chunks are checked together, because a small chunk has too few equal tokens.
        """
        with self._checking_keys:
            if self._are_keys_settled:
                return
            failure = self.check_keys(rows)
            self._own_rows = {}
            if failure is None:
                return
            self._are_keys_settled = True
            if not failure:
                self._num_key_checks += 1
            self._key_check_failure = self._key_check_failure or failure

    def take_key_checks(self) -> tuple[int, str]:
        """Take the results of key checks since the last call.

        Returns:
            The number of stores whose keys were right, and what is wrong with the keys of other
            stores. The text is empty if no key is wrong.
        """
        with self._checking_keys:
            found = self._num_key_checks, self._key_check_failure
            self._num_key_checks = 0
            self._key_check_failure = ""
        return found

    def check_keys(self, rows: Sequence[SegmentRows]) -> str | None:
        """Check that keys depend on positions by rotation alone; see `key_check.check_keys`.

        ``rows`` are the stored chunks of one segment, ascending. The keys of the model's first
        layer are checked.

        Returns:
            What is wrong with the keys; empty if they are right. None if there are too few equal
            tokens.
        """
        planes = self._require_pages().planes
        layer_name = planes[0].layer_name
        keys, *values = (
            partial(_numbers, *self._rows_of_plane(rows, index), plane)
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

    def _rows_of_plane(
        self, rows: Sequence[SegmentRows], plane_index: int
    ) -> tuple[torch.Tensor, npt.NDArray[np.int64]]:
        """The memory with the rows of tokens in one plane, and their offsets. shape: [tokens]."""
        own = self._own_rows.get(plane_index)
        if own is None:
            return self._host, self._row_offsets_bytes(rows, plane_index)
        row_bytes = self.layout.row_bytes[plane_index]
        return own, np.arange(0, own.numel(), row_bytes, dtype=np.int64)

    def _row_offsets_bytes(
        self, rows: Sequence[SegmentRows], plane_index: int
    ) -> npt.NDArray[np.int64]:
        """The offsets of the rows of tokens in host memory, in one plane. shape: [tokens]."""
        row_bytes = self.layout.row_bytes[plane_index]
        return np.concatenate(
            [
                self._section(each).plane_offsets_bytes[plane_index]
                + (each.first_row + np.arange(each.num_tokens)) * row_bytes
                for each in rows
            ]
        )

    def _stage(self, pages: TokenPages, batch: Sequence[_Staged]) -> HostRows:
        """Copy the rows of some tokens to the staging memory, with their keys rotated."""
        num_tokens = sum(part.num_tokens for part in batch)
        offsets = self.layout.plane_offsets_bytes(num_tokens)
        # The op counts offsets from a page before the rows, which is as large as the largest plane.
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
                        group,
                        0,
                        place - _STAGED_PAGE * page_bytes,
                        page_bytes,
                        0,
                        plane.row_bytes,
                        num_rows,
                        _STAGED_PAGE + 1,
                        section.plane_offsets_bytes[index],
                    )
                )
            for part in of_section:
                host_row = part.rows.first_row + part.first_token
                row = part.staging_row - first_row
                runs.append((group, _STAGED_PAGE, row, part.num_tokens, host_row))
        rotated_page_transfer(
            Pools([staging]),
            self._host,
            np.array(planes, DTYPE),
            np.array(runs, DTYPE),
            Direction.HOST_TO_PAGES,
            key_rotation(key_planes, shifts),
            placement=self._placer(),
        )
        return HostRows(staging, [before + offset for offset in offsets[:-1]])

    def _batches(
        self, rows: Sequence[SegmentRows], slots: Sequence[Slots]
    ) -> Iterator[list[_Staged]]:
        """Batches of tokens that fit into the staging memory.

        Tokens of one section are neighbours in a batch. One call of the transfer op reads a section
        with one shift. So a text that a prompt has twice is in two batches.
        """
        batch: list[_Staged] = []
        num_tokens = 0
        shifts: dict[int, int] = {}
        pairs = list(zip(rows, slots, strict=True))
        # After the sort, rows of one section and shift are neighbours, as are rows of one segment.
        pairs.sort(key=lambda pair: (pair[0].shift_tokens, pair[0].offset_bytes, pair[0].first_row))
        for each, of_rows in pairs:
            first = 0
            while first < each.num_tokens:
                shift = shifts.setdefault(each.offset_bytes, each.shift_tokens)
                if shift != each.shift_tokens or num_tokens == self._max_tokens:
                    yield batch
                    batch = []
                    num_tokens = 0
                    shifts = {each.offset_bytes: each.shift_tokens}
                count = min(each.num_tokens - first, self._max_tokens - num_tokens)
                batch.append(_Staged(each, of_rows, first, count, num_tokens))
                first += count
                num_tokens += count
        if batch:
            yield batch

    def _staging_of(self, num_bytes: int) -> torch.Tensor:
        if self._staging is None or self._staging.tensor.numel() < num_bytes:
            self.close()  # Its copies are done, because `write` of the pages waits for them.
            self._staging = self._make_staging(num_bytes)
        return self._staging.tensor

    def _section(self, rows: SegmentRows) -> HostRows:
        offsets = self.layout.plane_offsets_bytes(rows.section_rows)
        first = rows.offset_bytes + self.layout.section * offsets[-1]
        return HostRows(self._host, [first + offset for offset in offsets[:-1]], rows.first_row)

    def _check(self, pages: TokenPages, rows: SegmentRows, block_ids: Sequence[TablePart]) -> Slots:
        """The slots of the tokens; raises if one of their places is wrong."""
        end_row = rows.first_row + rows.num_tokens
        end_bytes = rows.offset_bytes + self.layout.num_bytes(rows.section_rows)
        is_aligned = rows.offset_bytes >= 0 and rows.offset_bytes % HOST_ALIGNMENT_BYTES == 0
        for fits, expected, found in (
            (
                0 <= rows.first_tokens < rows.end_tokens,
                "at least one token",
                f"{rows.first_tokens} to {rows.end_tokens - 1}",
            ),
            (is_aligned, f"an offset in multiples of {HOST_ALIGNMENT_BYTES}", rows.offset_bytes),
            (
                rows.first_row >= 0 and end_row <= rows.section_rows,
                f"rows within the {rows.section_rows} of its section",
                f"{rows.first_row} to {end_row - 1}",
            ),
            (
                end_bytes <= self._host.numel(),
                f"a section that ends within the {self._host.numel()} bytes of the host buffer",
                end_bytes,
            ),
            (
                max(pages.tokens_per_page) < len(block_ids),
                "a block table of every KV cache group",
                f"{len(block_ids)} tables",
            ),
        ):
            if not fits:
                raise SegmentError(
                    f"{_tokens(rows)}: expected {expected}, found {found}. Plan the job as the "
                    "store was planned."
                )
        return {
            group: slots_of(
                f"{_tokens(rows)}, block ids of KV cache group {group}",
                rows.first_tokens,
                rows.end_tokens,
                block_ids[group],
                tokens_per_page,
                pages.num_pages,
            )
            for group, tokens_per_page in pages.tokens_per_page.items()
        }

    def _require_pages(self) -> TokenPages:
        if self.pages is None:
            raise SegmentError(
                "pages: expected those of a worker, found none since they have been taken away. "
                "Register them again."
            )
        return self.pages

    def _num_bytes(self, rows: Sequence[SegmentRows]) -> int:
        return self._token_bytes * sum(each.num_tokens for each in rows)


def _numbers(
    memory: torch.Tensor,
    row_offsets_bytes: npt.NDArray[np.int64],
    plane: TokenPlane,
    tokens: Sequence[int],
) -> npt.NDArray[np.float64]:
    """The rows of some tokens in one plane. shape: [tokens, heads, head_elements]."""
    import torch

    offsets = row_offsets_bytes[list(tokens), None] + np.arange(plane.row_bytes)
    shape = len(tokens), plane.num_heads, plane.head_elements
    found = torch.from_numpy(memory.numpy()[offsets]).view(torch_dtype(plane.dtype))
    numbers: npt.NDArray[np.float64] = found.reshape(shape).double().numpy()
    return numbers


def _slots_of(batch: Sequence[_Staged]) -> Slots:
    """The slots of all tokens of a batch."""
    tokens = [slice(part.first_token, part.first_token + part.num_tokens) for part in batch]
    parts = list(zip(batch, tokens, strict=True))
    return {
        group: np.concatenate([part.slots[group][of_part] for part, of_part in parts])
        for group in batch[0].slots
    }


def _tokens(rows: SegmentRows) -> str:
    return f"segment with tokens {rows.first_tokens} to {rows.end_tokens - 1} of the request"
