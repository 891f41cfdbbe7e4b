# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vllm-ascend-kvext project
"""Rows of tokens in the pages of a CPU attention backend. Their order is learnt from its write op.

The backend orders a page by rules of its own, which depend on the instruction set, the dtype and
the block size: keys may be transposed, or cut into tiles. So the op writes numbers into a small
cache of the same shape and strides. The places of these numbers show where the elements of a row
lie. The found order is tested on random rows before a page of the model is touched.

The caller passes the op: this module knows no vLLM.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import numpy.typing as npt

from vllm_ascend_kvext.errors import BlendingError
from vllm_ascend_kvext.segments.keys.rotary import RotarySignature
from vllm_ascend_kvext.segments.token_rows import HostRows, Slots, TokenPlane

if TYPE_CHECKING:
    import torch

WriteRows = Callable[..., None]
"""The backend's write op: ``(keys, values, key_cache, value_cache, slots)``.

``keys`` and ``values`` have the shape [num_tokens, num_heads, head_size]. The caches have the shape
[num_pages, num_heads, tokens_per_page, head_size], with any strides. ``slots`` are int64, of shape
[num_tokens].
"""

Offsets = npt.NDArray[np.int64]
"""Offsets of the elements of a row from the first element of its page. shape: [tokens_per_page,
row_elements]."""

_SCRATCH_PAGES = 5
_PROBED_PAGE = 2
_UNTOUCHED = -1.0
_BASE = 256
"""The base of the written digits. bfloat16 has all whole numbers up to this base."""


class CpuLayer(NamedTuple):
    """One layer with pages of its own, in a KV cache group.

    The write op takes the caches, of shape [num_pages, num_heads, tokens_per_page, head_size].
    Their strides need not say the real order of the bytes. ``signature`` says how the keys turn
    with their position.
    """

    name: str
    group: int
    key_cache: torch.Tensor
    value_cache: torch.Tensor
    signature: RotarySignature


class _Place(NamedTuple):
    """The pages of a plane, cut into parts. A part has adjacent elements, which are moved together.

    ``parts`` is the storage from page 0 on, as integers, shape [num_parts, part_elements].
    ``offsets`` has the offsets of a row, counted in parts, shape [tokens_per_page, parts_of_row].
    """

    parts: npt.NDArray[Any]
    page_parts: int
    offsets: Offsets


class CpuTokenPages:
    """The pages of a worker on a CPU. ``write_rows`` only gets small caches that are made here.

    ``layers`` are in the order of the model. The layers of one group have the same number of tokens
    per page. All layers have the same number of pages.

    Raises:
        BlendingError: The op writes pages in an order that this module does not understand.
    """

    def __init__(self, layers: Sequence[CpuLayer], write_rows: WriteRows) -> None:
        orders: dict[object, tuple[Offsets, Offsets]] = {}
        planes: list[TokenPlane] = []
        self._places: list[_Place] = []
        self.tokens_per_page = {each.group: int(each.key_cache.shape[2]) for each in layers}
        self.num_pages = len(layers[0].key_cache)
        for layer in layers:
            caches = layer.key_cache, layer.value_cache
            kind = tuple((each.dtype, tuple(each.shape[1:]), each.stride()) for each in caches)
            if kind not in orders:
                orders[kind] = _read_orders(layer, write_rows)
            for cache, order, keys in zip(
                caches, orders[kind], (layer.signature, None), strict=True
            ):
                _, num_heads, _, head_elements = cache.shape
                dtype = layer.signature.dtype
                planes.append(
                    TokenPlane(layer.name, layer.group, num_heads, head_elements, dtype, keys)
                )
                self._places.append(_place_of(cache, order))
        self.planes = tuple(planes)

    def read(self, slots: Slots, rows: HostRows) -> None:
        for place, in_host, index in self._each(slots, rows):
            # The mode "clip" copies without a buffer. The caller has checked the slots.
            np.take(place.parts, index, axis=0, out=in_host, mode="clip")

    def write(self, slots: Slots, rows: HostRows) -> None:
        for place, in_host, index in self._each(slots, rows):
            place.parts[index] = in_host

    def read_plane(self, index: int, slots: npt.NDArray[np.int64]) -> npt.NDArray[np.uint8]:
        plane, place = self.planes[index], self._places[index]
        parts = place.parts[_parts_of(place, slots)]
        return parts.view(np.uint8).reshape(len(slots), plane.row_bytes)

    def _each(self, slots: Slots, rows: HostRows) -> Iterator[tuple[_Place, Any, Offsets]]:
        """For each plane: its place, its rows in host memory, and the indices of their parts."""
        memory = rows.memory.numpy()
        for plane, place, offset_bytes in zip(
            self.planes, self._places, rows.plane_offsets_bytes, strict=False
        ):
            index = _parts_of(place, slots[plane.group])
            first = offset_bytes + rows.first_row * plane.row_bytes
            in_host = memory[first : first + len(slots[plane.group]) * plane.row_bytes]
            yield place, in_host.view(place.parts.dtype).reshape(len(index), -1), index


def _read_orders(layer: CpuLayer, write_rows: WriteRows) -> tuple[Offsets, Offsets]:
    """Read the order of keys and the order of values, and verify both."""
    keys = _Scratch(layer.key_cache)
    values = _Scratch(layer.value_cache)

    def write_keys(rows: torch.Tensor, slots: torch.Tensor) -> None:
        write_rows(rows, values.untouched(len(rows)), keys.cache, values.cache, slots)

    def write_values(rows: torch.Tensor, slots: torch.Tensor) -> None:
        write_rows(keys.untouched(len(rows)), rows, keys.cache, values.cache, slots)

    orders = _probe(layer.name, keys, write_keys), _probe(layer.name, values, write_values)
    _verify(layer.name, (keys, values), orders, write_rows)
    return orders


class _Scratch:
    """A cache of a few pages, with the strides of another cache, and its whole storage."""

    def __init__(self, like: torch.Tensor) -> None:
        import torch

        shape = _SCRATCH_PAGES, *like.shape[1:]
        num_elements = 1 + sum((n - 1) * step for n, step in zip(shape, like.stride(), strict=True))
        # The storage goes to the end of the last page, to see writes behind its last element.
        num_elements = max(num_elements, _SCRATCH_PAGES * like.stride(0))
        self.storage = torch.full((num_elements,), _UNTOUCHED, dtype=like.dtype)
        self.cache = self.storage.as_strided(shape, like.stride())

        self.page_elements = int(like.stride(0))
        self.tokens_per_page = int(like.shape[2])
        self.row_shape = int(like.shape[1]), int(like.shape[3])

    def untouched(self, num_rows: int) -> torch.Tensor:
        """Rows that do not change the storage when they are written."""
        return self.storage.new_full((num_rows, *self.row_shape), _UNTOUCHED)


def _probe(name: str, scratch: _Scratch, write: Callable[..., None]) -> Offsets:
    """Write every page element's number, digit by digit, and find where each number lands."""
    import torch

    num_tokens, row_shape = scratch.tokens_per_page, scratch.row_shape
    row_elements = row_shape[0] * row_shape[1]
    numbers = np.arange(num_tokens * row_elements).reshape(num_tokens, row_elements)
    in_page = np.random.default_rng(0).permutation(num_tokens)
    slots = torch.from_numpy(_PROBED_PAGE * num_tokens + in_page)
    found = np.zeros(scratch.storage.numel(), np.int64)
    is_touched = np.zeros(scratch.storage.numel(), bool)
    power = 1
    while power < max(2, numbers.size):
        digits = torch.from_numpy(numbers[in_page] // power % _BASE).to(scratch.storage.dtype)
        scratch.storage.fill_(_UNTOUCHED)
        write(digits.reshape(num_tokens, *row_shape), slots)
        written = scratch.storage.double().numpy()
        is_touched |= written != _UNTOUCHED
        found += np.where(written == _UNTOUCHED, 0, written).astype(np.int64) * power
        power *= _BASE
    places = np.flatnonzero(is_touched)
    first = _PROBED_PAGE * scratch.page_elements
    is_in_page = (
        len(places) > 0 and places[0] >= first and places[-1] < first + scratch.page_elements
    )
    if not is_in_page or not np.array_equal(np.sort(found[places]), numbers.reshape(-1)):
        raise BlendingError(
            f"layer {name}: expected the attention backend to write the {numbers.size} elements of "
            f"a page into this page, each once, found {len(places)} elements written "
            f"({'' if is_in_page else 'some '}{'in' if is_in_page else 'outside'} the page) with "
            f"{len(np.unique(found[places]))} different numbers. Serve this model without segments."
        )
    offsets = np.empty(numbers.size, np.int64)
    offsets[found[places]] = places - first
    return offsets.reshape(numbers.shape)


def _verify(
    name: str, both: tuple[_Scratch, _Scratch], orders: Sequence[Offsets], write_rows: WriteRows
) -> None:
    """Verify the orders with random rows in shuffled slots.

    The rows that the op has written are read, and the same rows are written without the op.
    """
    import torch

    num_tokens = both[0].tokens_per_page
    random = np.random.default_rng(1)
    # Only some slots are used, so that most pages are written in part.
    slots = random.permutation(np.arange(num_tokens, _SCRATCH_PAGES * num_tokens))
    slots = slots[: max(1, len(slots) * 3 // 4)]
    generator = torch.Generator().manual_seed(2)
    rows = [
        torch.randn((len(slots), *scratch.row_shape), generator=generator).to(scratch.storage.dtype)
        for scratch in both
    ]
    for scratch in both:
        scratch.storage.fill_(_UNTOUCHED)
    caches = [scratch.cache for scratch in both]
    write_rows(*rows, *caches, torch.from_numpy(slots))
    for scratch, order, wanted, what in zip(both, orders, rows, ("keys", "values"), strict=True):
        place = _place_of(scratch.cache, order)
        index = _parts_of(place, slots)
        in_host = wanted.view(_integers_of(wanted)).numpy().reshape(-1, place.parts.shape[1])
        is_read = np.array_equal(place.parts[index], in_host)
        by_op = scratch.storage.clone()
        scratch.storage.fill_(_UNTOUCHED)
        place.parts[index] = in_host
        if not is_read or not torch.equal(
            by_op.view(_integers_of(by_op)), scratch.storage.view(_integers_of(by_op))
        ):
            raise BlendingError(
                f"layer {name}: expected {what} of {len(slots)} random tokens where the attention "
                "backend's write op had put numbers before, found others there: the order of a "
                "page depends on more than this package knows. Serve this model without segments, "
                "and report it."
            )


def _place_of(cache: torch.Tensor, offsets: Offsets) -> _Place:
    """Cut the pages of one plane into parts that are as large as its rows allow."""
    import torch

    page_elements = int(cache.stride(0))
    part = _part_elements(offsets, page_elements)
    num_elements = (len(cache) - 1) * page_elements + int(offsets.max()) + 1
    flat = torch.empty(0, dtype=cache.dtype).set_(
        cache.untyped_storage(), cache.storage_offset(), (num_elements,), (1,)
    )
    parts = flat.view(_integers_of(cache)).numpy().reshape(-1, part)
    return _Place(parts, page_elements // part, np.ascontiguousarray(offsets[:, ::part] // part))


def _parts_of(place: _Place, slots: npt.NDArray[np.int64]) -> Offsets:
    """The indices of the parts of rows, row after row."""
    pages, in_page = np.divmod(slots, len(place.offsets))
    found = place.offsets[in_page]
    found += (pages * place.page_parts)[:, None]
    return found.reshape(-1)


def _part_elements(offsets: Offsets, page_elements: int) -> int:
    """The largest part, a power of two, such that rows consist of parts of adjacent elements."""
    row_elements = offsets.shape[1]
    part = 1
    while row_elements % (2 * part) == 0 and page_elements % (2 * part) == 0:
        parts = offsets.reshape(-1, 2 * part)
        first = parts[:, :1]
        if (first % (2 * part)).any() or (parts != first + np.arange(2 * part)).any():
            break
        part *= 2
    return part


def _integers_of(tensor: torch.Tensor) -> torch.dtype:
    """The integer type as wide as the elements. Copied as integers, a number keeps every bit."""
    import torch

    return {2: torch.int16, 4: torch.int32}[tensor.element_size()]
