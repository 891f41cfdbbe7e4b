# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vllm-ascend-kvext project
"""The transfer op for keys that change their positions. It rotates the keys while it moves them.

A rotary embedding turns pair ``i`` of a key at position ``p`` by ``p * frequency[i]``. A turn by
``d * frequency[i]`` moves a key by ``d`` positions, whatever its position was. An embedding may
also multiply keys by a factor, such as YaRN's attention factor. Stored keys contain that factor
already, so a change of position must not apply it again.

One call can move several segments of a prompt, just as `page_transfer` can move several chunks. The
planes are listed once per segment, with a group number of their own, and every group has its own
shift.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

from vllm_ascend_kvext.native import native
from vllm_ascend_kvext.transfer.backend import STREAMING_WHERE_IT_PAYS
from vllm_ascend_kvext.transfer.errors import BackendError
from vllm_ascend_kvext.transfer.placement import CALLING_THREAD, CopyPlacement
from vllm_ascend_kvext.transfer.pools import Pools, require_bytes
from vllm_ascend_kvext.transfer.schema import Direction, Frequencies, Table

if TYPE_CHECKING:
    import torch


class KeyRotation(NamedTuple):
    """Which planes of a transfer are keys, and by how much they turn.

    Attributes:
        rotations: See `RotationColumn`. shape: ``[num_rotations, 8]``.
        shifts: See `ShiftColumn`. shape: ``[num_shifts, 2]``.
        frequencies: Radians per position, from 0 to 2 pi. dtype: float64, shape:
            ``[num_frequencies]``, contiguous.
    """

    rotations: Table
    shifts: Table
    frequencies: Frequencies


def rotated_page_transfer(
    pools: Pools,
    host: torch.Tensor,
    planes: Table,
    runs: Table,
    direction: Direction,
    rotation: KeyRotation,
    *,
    placement: CopyPlacement | None = None,
) -> None:
    """Do what `page_transfer` does, and rotate keys in the same pass.

    Angles are computed in float64, once per shift. Keys are rotated in float32 and rounded once.
    Both directions turn keys by the shift, so the negative shift undoes a rotation.

    The other arguments are the same as in `page_transfer`. The pools are in host memory.

    Raises:
        DescriptorError: A table of `page_transfer` or of `rotation` is wrong; nothing has been
            written.
        BackendError: The pools are on a device; nothing has been written.
    """
    pools.require_current()
    require_bytes("host", host)
    on_devices = [device for device in pools.device_types if device != "cpu"]
    if on_devices:
        raise BackendError(
            f"pools: expected all of them on cpu, found {', '.join(on_devices)}: keys are rotated "
            "in host memory only. Rotate into a host buffer, and move that with page_transfer."
        )
    placement = placement or CALLING_THREAD
    native().rotated_page_transfer(
        pools.table,
        host.data_ptr(),
        host.numel(),
        planes,
        runs,
        direction,
        *rotation,
        placement.num_threads,
        STREAMING_WHERE_IT_PAYS,
        placement.cpus,
        placement.niceness,
    )
