# SPDX-License-Identifier: Apache-2.0
"""Rows of tokens in pages that are addressed by token, as NPUs have them; here in host memory."""

from __future__ import annotations

import numpy as np
import pytest

torch = pytest.importorskip("torch")

from vllm_ascend_kvext.blending.device_token_pages import (  # noqa: E402
    DeviceTokenPages,
    PlacedPlane,
    runs_of,
)
from vllm_ascend_kvext.blending.rotary import RotarySignature  # noqa: E402
from vllm_ascend_kvext.blending.token_rows import HostRows, TokenPlane  # noqa: E402
from vllm_ascend_kvext.transfer.errors import DescriptorError  # noqa: E402
from vllm_ascend_kvext.transfer.pools import Pools  # noqa: E402
from vllm_ascend_kvext.transfer.schema import PairStyle, RowDtype  # noqa: E402

NUM_PAGES, HEADS, HEAD = 10, 2, 8
BLOCKS = {0: 4, 1: 8}
"""Tokens per page, by KV cache group."""
SIGNATURE = RotarySignature((1.0, 0.5, 0.25, 0.125), PairStyle.HALVES, HEAD, 0, RowDtype.FLOAT32)


def test_runs_are_consecutive_slots_of_one_page() -> None:
    slots = np.array([9, 10, 11, 12, 13, 20, 22, 23, 24, 7, 6])
    assert runs_of(3, slots, 4, 100).tolist() == [
        [3, 2, 1, 3, 100],
        [3, 3, 0, 2, 103],
        [3, 5, 0, 1, 105],
        [3, 5, 2, 2, 106],
        [3, 6, 0, 1, 108],
        [3, 1, 3, 1, 109],
        [3, 1, 2, 1, 110],
    ]
    assert runs_of(0, np.array([0]), 4, 0).tolist() == [[0, 0, 0, 1, 0]]


class Worker:
    """Two layers, each of a group of its own; keys and values are tensors of one storage each."""

    def __init__(self) -> None:
        self.tensors = [
            torch.randn((NUM_PAGES, block, HEADS, HEAD), generator=torch.manual_seed(number))
            for block in BLOCKS.values()
            for number in (0, 1)
        ]
        bytes_of = [tensor.view(torch.uint8).reshape(-1) for tensor in self.tensors]
        self.pools = Pools(bytes_of)
        self.waits = 0
        planes = [
            PlacedPlane(
                TokenPlane(f"layers.{group}", group, HEADS, HEAD, RowDtype.FLOAT32, keys),
                2 * group + number,
                *(0, self.tensors[2 * group][0].numel() * 4, 0),
            )
            for group in BLOCKS
            for number, keys in enumerate((SIGNATURE, None))
        ]
        self.pages = DeviceTokenPages(planes, BLOCKS, NUM_PAGES, self.pools, wait=self.wait)

    def wait(self) -> None:
        self.waits += 1


def slots_of(seed: int, num_tokens: int) -> dict[int, np.ndarray]:
    random = np.random.default_rng(seed)
    return {
        group: np.sort(random.permutation(np.arange(block, NUM_PAGES * block))[:num_tokens])
        for group, block in BLOCKS.items()
    }


def test_rows_are_those_of_the_tensors_and_come_back_elsewhere() -> None:
    worker, num_tokens, first_row = Worker(), 20, 3
    row_bytes = HEADS * HEAD * 4
    plane_bytes = 64 * -(-(num_tokens + first_row) * row_bytes // 64)
    host = HostRows(
        torch.full((4 * plane_bytes,), 0xA5, dtype=torch.uint8),
        [number * plane_bytes for number in range(4)],
        first_row,
    )
    source, target = slots_of(0, num_tokens), slots_of(1, num_tokens)
    before = [tensor.clone() for tensor in worker.tensors]
    worker.pages.read(source, host)
    assert worker.waits == 1
    assert all(map(torch.equal, worker.tensors, before))
    by_plane = host.memory.view(4, plane_bytes)
    assert (by_plane[:, : first_row * row_bytes] == 0xA5).all()
    for number, tensor in enumerate(worker.tensors):
        rows = by_plane[number, first_row * row_bytes :][: num_tokens * row_bytes]
        wanted = tensor.view(-1, HEADS, HEAD)[source[number // 2]]
        assert torch.equal(rows.view(torch.float32).view(-1, HEADS, HEAD), wanted)

    expected = [tensor.clone() for tensor in worker.tensors]
    for number, tensor in enumerate(expected):
        flat = tensor.view(-1, HEADS, HEAD)
        flat[target[number // 2]] = flat[source[number // 2]].clone()
    worker.pages.write(target, host)
    assert worker.waits == 2
    assert all(map(torch.equal, worker.tensors, expected))


def test_pages_that_are_gone_are_refused() -> None:
    worker = Worker()
    worker.pools.tensors[0].untyped_storage().resize_(0)
    host = HostRows(torch.zeros(1 << 16, dtype=torch.uint8), [0, 1 << 12, 1 << 13, 3 << 12])
    with pytest.raises(DescriptorError, match="found some elsewhere"):
        worker.pages.read(slots_of(0, 4), host)
