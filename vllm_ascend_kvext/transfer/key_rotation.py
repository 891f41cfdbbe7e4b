# SPDX-License-Identifier: Apache-2.0
"""The transfer op for keys that change their positions: they are rotated while they move.

A rotary embedding turns pair ``i`` of a key at position ``p`` by ``p * frequency[i]``. A key moves
by ``d`` positions when it is turned by ``d * frequency[i]``, wherever it was. What the embedding
has multiplied keys with, such as YaRN's attention factor, is in the stored keys: a difference of
positions must not apply it again.

Segments of a prompt go in one call, as chunks do: the planes are named once per segment, with a
group number of its own, and every group has its shift.
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

    Shapes: ``rotations`` is ``[num_rotations, 8]``, see `RotationColumn`; ``shifts``
    ``[num_shifts, 2]``, see `ShiftColumn`. Frequencies are radians per position, 0 to 2 pi. dtype:
    float64, shape: ``[num_frequencies]``, contiguous.
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

    Angles are computed in float64, once per shift; keys are rotated in float32 and rounded once.
    Both directions turn keys by the shift: what went one way comes back with the negative one.

    Arguments are those of `page_transfer`; the pools are in host memory.

    Raises:
        DescriptorError: As of `page_transfer`, or for `rotation`; nothing has been written.
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
