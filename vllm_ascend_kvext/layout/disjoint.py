# SPDX-License-Identifier: Apache-2.0
"""Whether planes would write each other's bytes.

Planes of different groups may share bytes of equal page number, as in vllm-ascend's blobs: block
ids come from one pool, so that a page belongs to one group at a time. Every other shared byte is
refused, and so are regions of different page strides that lie over each other.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable
from typing import NamedTuple

import numpy as np

from vllm_ascend_kvext.errors import LayoutError
from vllm_ascend_kvext.layout.regions import Region


class OwnedRegion(NamedTuple):
    """A region, with the KV cache group and the layer it belongs to."""

    group: int
    layer_name: str
    region: Region


def check_disjoint(regions: Iterable[OwnedRegion], num_pages: int) -> None:
    """Refuse planes that would write each other's bytes.

    Every region is compared with all behind it in its storage, as arrays: half a second for the
    10,000 regions of a hundred layers whose heads are apart.

    Raises:
        LayoutError: Naming both layers.
    """
    by_storage: dict[int, list[OwnedRegion]] = defaultdict(list)
    for owned in regions:
        if owned.region.num_bytes > owned.region.page_stride_bytes:
            _refuse(owned, owned)
        by_storage[owned.region.storage].append(owned)
    for in_storage in by_storage.values():
        in_storage.sort(key=lambda owned: owned.region.offset_bytes)
        groups = np.array([owned.group for owned in in_storage])
        offsets = np.array([owned.region.offset_bytes for owned in in_storage])
        sizes = np.array([owned.region.num_bytes for owned in in_storage])
        strides = np.array([owned.region.page_stride_bytes for owned in in_storage])
        for index, owned in enumerate(in_storage):
            stride = owned.region.page_stride_bytes
            # Page `pages` of this region has the first byte of a page of the other, or it is the
            # last before it.
            pages, distance = np.divmod(offsets[index + 1 :] - offsets[index], stride)
            overlaps = (distance < sizes[index]) & (pages < num_pages)
            overlaps &= (pages > 0) | (groups[index + 1 :] == owned.group)
            overlaps |= (distance + sizes[index + 1 :] > stride) & (pages + 1 < num_pages)
            end_bytes = owned.region.end_bytes + (num_pages - 1) * stride
            is_other_stride = strides[index + 1 :] != stride
            overlaps[is_other_stride] = offsets[index + 1 :][is_other_stride] < end_bytes
            if overlaps.any():
                _refuse(owned, in_storage[index + 1 + int(overlaps.argmax())])


def _refuse(one: OwnedRegion, other: OwnedRegion) -> None:
    raise LayoutError(
        f"layers {one.layer_name} and {other.layer_name} (KV cache groups {one.group}, "
        f"{other.group}) share bytes of one storage: at {one.region.offset_bytes} and "
        f"{other.region.offset_bytes}, {one.region.page_stride_bytes} and "
        f"{other.region.page_stride_bytes} bytes per page; this layout is not supported"
    )
