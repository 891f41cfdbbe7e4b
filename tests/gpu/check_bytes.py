# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vllm-ascend-kvext project
"""Bytes that move between pages of a device and host memory, against a slow and simple reference.

python tests/gpu/check_bytes.py --device cuda [--quick] ROWS
"""

from __future__ import annotations

import argparse
import contextlib
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np
import torch

# ``tests`` replaces this folder on the path.
_HERE = Path(__file__).resolve().parent
sys.path[:] = [*(path for path in sys.path if path != str(_HERE)), str(_HERE.parent)]

from gpu.accelerator import Device, device_of  # noqa: E402
from gpu.sections import LEFT_OUT, OK, Rows  # noqa: E402
from hypothesis import HealthCheck, given, settings  # noqa: E402
from support.transfer.cases import (  # noqa: E402
    HOST_TO_PAGES,
    LARGE_CASES,
    Bytes,
    GuardedBytes,
    TransferCase,
    TransferMemory,
    assert_same,
    cases,
    uniform_case,
)

from vllm_ascend_kvext.connector.worker.host_buffer import HostBuffer  # noqa: E402
from vllm_ascend_kvext.layout.model import Plane  # noqa: E402
from vllm_ascend_kvext.layout.transfer_plan import TablePart  # noqa: E402
from vllm_ascend_kvext.segments.keys.rotary import RotarySignature  # noqa: E402
from vllm_ascend_kvext.segments.token_rows import (  # noqa: E402
    SegmentLayout,
    SegmentRows,
    TokenPlane,
)
from vllm_ascend_kvext.segments.worker.device_token_pages import (  # noqa: E402
    DeviceTokenPages,
    PlacedPlane,
)
from vllm_ascend_kvext.segments.worker.segment_mover import SegmentMover  # noqa: E402
from vllm_ascend_kvext.transfer.compute_fence import ComputeFence  # noqa: E402
from vllm_ascend_kvext.transfer.devices import transfers_on  # noqa: E402
from vllm_ascend_kvext.transfer.errors import BackendError, DescriptorError  # noqa: E402
from vllm_ascend_kvext.transfer.page_transfer import page_transfer  # noqa: E402
from vllm_ascend_kvext.transfer.pools import Pools  # noqa: E402
from vllm_ascend_kvext.transfer.schema import Direction, PairStyle, RowDtype  # noqa: E402

ALIGNMENT_BYTES = 64
DEADLINE_S = 20.0
MANY_COPIES = 20_000
"""The copies of one transfer, more than a call of the operator takes."""


class _Placed:
    """A region of a `TransferMemory` in other memory, with its guards and its misalignment."""

    def __init__(self, source: GuardedBytes, make: Callable[[int], torch.Tensor]) -> None:
        first = source.address - source.whole.ctypes.data
        memory = make(source.whole.size + ALIGNMENT_BYTES)
        skipped = (source.address - memory.data_ptr() - first) % ALIGNMENT_BYTES
        self.whole = memory[skipped : skipped + source.whole.size]
        self.whole.copy_(torch.from_numpy(source.whole))
        self.region = self.whole[first : first + source.region.size]


class DeviceMemory:
    """The memory of a case: pools on the device, and a host buffer that its copies may use."""

    def __init__(self, device: Device, memory: TransferMemory) -> None:
        self._device = device
        self._pools = [_Placed(pool, device.empty) for pool in memory.pools]
        self._host = _Placed(memory.host, device.host)
        device.synchronize()

    def run(self, case: TransferCase) -> None:
        """Run the transfer as the connector does, on a stream that is not the default one."""
        with self._device.own_stream():
            self.run_here(case)

    def run_here(self, case: TransferCase) -> None:
        """Run the transfer on the current stream."""
        pools = Pools([pool.region for pool in self._pools])
        direction = Direction(case.direction)
        page_transfer(pools, self._host.region, case.planes, case.runs, direction)

    def snapshot(self) -> tuple[Bytes, ...]:
        self._device.synchronize()
        return tuple(each.whole.cpu().numpy() for each in (*self._pools, self._host))

    def zero(self, direction: int) -> None:
        """Make every byte zero on the side that the transfer writes."""
        for each in self._pools if direction == HOST_TO_PAGES else [self._host]:
            each.region.zero_()


def is_same(device: Device, case: TransferCase, run: Callable[[DeviceMemory], None]) -> bool:
    """Whether memory is that of the reference after ``run``."""
    memory = TransferMemory.random(case)
    expected = memory.after(case)
    placed = DeviceMemory(device, memory)
    run(placed)
    with contextlib.suppress(AssertionError):
        assert_same(placed.snapshot(), expected)
        return True
    return False


def check_transfers(device: Device, rows: Rows, num_random: int) -> None:
    """Every table of the tests on a CPU, and two controls."""
    counted = [0, 0]

    @settings(
        max_examples=num_random,
        deadline=None,
        derandomize=True,
        database=None,
        suppress_health_check=list(HealthCheck),
    )
    @given(cases())
    def random(case: TransferCase) -> None:
        memory = TransferMemory.random(case)
        expected = memory.after(case)
        placed = DeviceMemory(device, memory)
        placed.run(case)
        assert_same(placed.snapshot(), expected)
        counted[0] += 1
        counted[1] += len(case.runs)

    error = ""
    try:
        random()
    except (AssertionError, BackendError, DescriptorError) as found:
        error = str(found)[:500]
    found = error or f"{counted[0]} transfers, {counted[1]} runs"
    rows.check("random tables move exactly the bytes of the reference", not error, found)

    both_ways = [*LARGE_CASES, *(case.reversed() for case in LARGE_CASES)]
    wrong = [case for case in both_ways if not is_same(device, case, lambda to, c=case: to.run(c))]
    found = f"{len(both_ways)} transfers, {len(wrong)} wrong"
    rows.check("large tables do, in both directions", not wrong, found)

    many = uniform_case(row_bytes=48, rows_per_page=1, pages=range(1, 2 * MANY_COPIES, 2))
    for case, name in ((many, "store"), (many.reversed(), "load")):
        right = is_same(device, case, lambda to, c=case: to.run(c))
        rows.check(f"a {name} of many single copies does", right, f"{MANY_COPIES:,} copies")
        right = is_same(device, case, lambda to, c=case: to.run_here(c))
        rows.check(f"a {name} on the default stream does", right, f"{MANY_COPIES:,} copies")

    for case, name in ((LARGE_CASES[0], "store"), (LARGE_CASES[0].reversed(), "load")):
        right = is_same(device, case, lambda to: None)
        rows.check(f"control: a {name} that moves nothing is seen", not right)

        def run_and_zero(to: DeviceMemory, case: TransferCase = case) -> None:
            to.run(case)
            device.synchronize()
            to.zero(case.direction)

        right = is_same(device, case, run_and_zero)
        rows.check(f"control: zeroed bytes after a {name} are seen", not right)


# Fences.

FENCE_CASE = uniform_case(row_bytes=4096, rows_per_page=16, pages=tuple(range(1, 33)))


class _Race:
    """One store or load that races with kernels, which are enqueued before and after it."""

    def __init__(self, device: Device) -> None:
        self._device = device
        self._memory = DeviceMemory(device, TransferMemory.random(FENCE_CASE))
        self._pool = self._memory._pools[0].region
        self._host = self._memory._host.region

    def store(self, fence: ComputeFence) -> bool:
        """Whether host memory has what a slow kernel writes into pages before the store."""
        self._pool.fill_(1)
        self._host.fill_(0)
        self._device.synchronize()
        self._device.delay()
        self._pool.fill_(2)
        self._copy(fence, FENCE_CASE)
        return bool((self._moved() == 2).all())

    def load(self, fence: ComputeFence) -> bool:
        """Whether a kernel before the load reads old pages, and one behind it new pages."""
        self._pool.fill_(1)
        self._host.fill_(3)
        self._device.synchronize()
        self._device.delay()
        before = self._pool.clone()
        self._copy(fence, FENCE_CASE.reversed())
        behind = self._pool.clone()
        self._device.synchronize()
        page_bytes = 4096 * 16
        is_old = bool((before == 1).all())
        return is_old and bool((behind[page_bytes : 33 * page_bytes] == 3).all())

    def _copy(self, fence: ComputeFence, case: TransferCase) -> None:
        """Copy in another thread, as the connector does. The caller's thread records."""
        recorded = fence.record()
        errors: list[BaseException] = []

        def copy() -> None:
            try:
                fence.run(recorded, lambda: self._memory.run_here(case))
            except BaseException as error:
                errors.append(error)

        thread = threading.Thread(target=copy)
        thread.start()
        thread.join(DEADLINE_S)
        if errors:
            raise errors[0]
        if thread.is_alive():
            raise TimeoutError(f"a copy has not ended in {DEADLINE_S} s")

    def _moved(self) -> torch.Tensor:
        """Host memory without its last bytes, which no page moves to."""
        return self._host[: 32 * 16 * 4096]


class _NoFence(ComputeFence):
    """A control: copies have a stream of their own, and wait for nothing but themselves."""

    def __init__(self, device: Device) -> None:
        self._device = device

    def run(self, recorded: object, copy: Callable[[], None]) -> float:
        with self._device.own_stream():
            copy()
            end_of_copies = self._device.end_of_stream()
        end_of_copies()
        return 0.0


def check_fences(device: Device, rows: Rows, num_rounds: int) -> None:
    """Copies keep the order with kernels, round after round; without a fence they do not."""
    race = _Race(device)
    fence = transfers_on(device.type).make_fence(device.torch_device)
    ways = {"store waits for a slow kernel": race.store, "load lets kernels read first": race.load}
    for name, run in ways.items():
        began_s = time.monotonic()
        right = [run(fence) for _ in range(num_rounds)]
        found = f"{sum(right)} of {num_rounds} rounds, {time.monotonic() - began_s:.1f} s"
        rows.check(f"a {name}", all(right), found)
        if not device.is_late:
            rows.add(f"control: a {name}, without a fence", LEFT_OUT, "kernels are never late here")
            continue
        without = [run(_NoFence(device)) for _ in range(num_rounds)]
        found = f"{num_rounds - sum(without)} of {num_rounds} rounds are wrong"
        rows.check(f"control: a {name}, without a fence, is seen", not all(without), found)


# Rows of tokens, whose keys are rotated on their way.

HEADS = 2
HEAD_ELEMENTS = 64
PAGE_TOKENS = 16
NUM_PAGES = 40


def check_token_rows(device: Device, rows: Rows) -> None:
    """Rows of tokens that leave pages, turn in host memory, and come back into other pages."""
    for dtype, name in ((RowDtype.FLOAT32, "float32"), (RowDtype.BFLOAT16, "bfloat16")):
        for style in PairStyle:
            worst, others = _turned_rows(device, dtype, style)
            found = f"largest difference {worst:.1e} of keys near 1; {others} other bytes changed"
            tolerance = 1e-5 if name == "float32" else 0.02
            what = f"keys turn to new positions, {name}, {style.name.lower()}"
            rows.check(what, worst < tolerance and not others, found)
    worst, _ = _turned_rows(device, RowDtype.FLOAT32, PairStyle.HALVES, expected_shift=8)
    rows.check("control: keys of a wrong position are seen", worst > 0.1, f"{worst:.2f}")


def _turned_rows(
    device: Device, dtype: RowDtype, style: PairStyle, expected_shift: int = 7
) -> tuple[float, int]:
    """The largest difference of a row from numpy's rotation, and the bytes changed elsewhere."""
    num_tokens, shift = 45, 7
    torch_dtype = torch.float32 if dtype is RowDtype.FLOAT32 else torch.bfloat16
    frequencies = tuple(10_000.0 ** -(np.arange(HEAD_ELEMENTS // 2) / (HEAD_ELEMENTS // 2)))
    signature = RotarySignature(frequencies, style, HEAD_ELEMENTS, 0, dtype)
    shape = (NUM_PAGES, 2, PAGE_TOKENS, HEADS * HEAD_ELEMENTS)
    generator = torch.Generator().manual_seed(0)
    computed = torch.randn(shape, generator=generator).to(torch_dtype)
    pages = computed.to(device.torch_device)
    pool = pages.view(torch.uint8).reshape(-1)
    row_bytes = HEADS * HEAD_ELEMENTS * dtype.element_bytes
    planes = [
        PlacedPlane(
            TokenPlane("layer", 0, HEADS, HEAD_ELEMENTS, dtype, keys),
            Plane(
                "layer",
                0,
                0,
                2 * PAGE_TOKENS * row_bytes,
                index * PAGE_TOKENS * row_bytes,
                row_bytes,
                "bytes",
                is_packed=False,
            ),
        )
        for index, keys in enumerate((signature, None))
    ]
    fence = transfers_on(device.type).make_fence(device.torch_device)
    token_pages = DeviceTokenPages(
        planes, {0: PAGE_TOKENS}, NUM_PAGES, Pools([pool]), wait=fence.wait
    )
    layout = SegmentLayout((row_bytes, row_bytes))
    host = device.host(layout.num_bytes(num_tokens))
    mover = SegmentMover(
        token_pages, host, layout, lambda size: HostBuffer.allocate(size, device.torch_device)
    )
    source = TablePart(0, (5, 9, 3))
    target = TablePart(0, (21, 20, 30, 31))
    device.synchronize()
    with device.own_stream():
        mover.store([SegmentRows(0, num_tokens, 0, num_tokens, 0)], [source])
        loaded = SegmentRows(shift, shift + num_tokens, 0, num_tokens, 0, shift)
        mover.load([loaded], [target])
    device.synchronize()
    found = pages.cpu()
    mover.close()
    expected = computed.clone()
    for token in range(num_tokens):
        page, row = source.ids[token // PAGE_TOKENS], token % PAGE_TOKENS
        keys, values = computed[page, :, row]
        place = token + shift
        page, row = target.ids[place // PAGE_TOKENS], place % PAGE_TOKENS
        turned = _turned(keys.float().numpy(), np.array(frequencies) * expected_shift, style)
        expected[page, 0, row] = torch.from_numpy(turned).to(torch_dtype)
        expected[page, 1, row] = values
    worst = (found.float() - expected.float()).abs().max().item()
    is_row = torch.zeros(shape[:3], dtype=torch.bool)
    for place in range(shift, shift + num_tokens):
        is_row[target.ids[place // PAGE_TOKENS], 0, place % PAGE_TOKENS] = True
    differs = (found.view(torch.uint8) != expected.view(torch.uint8)) & ~is_row[..., None]
    return worst, int(differs.sum())


def _turned(keys: np.ndarray, angles: np.ndarray, style: PairStyle) -> np.ndarray:
    """Turn each pair of each head by its angle. shape: [HEADS * HEAD_ELEMENTS]."""
    heads = keys.reshape(HEADS, HEAD_ELEMENTS).astype(np.float64)
    half = HEAD_ELEMENTS // 2
    if style is PairStyle.NEIGHBOURS:
        one, other = slice(0, None, 2), slice(1, None, 2)
    else:
        one, other = slice(0, half), slice(half, None)
    result = np.empty_like(heads)
    result[:, one] = heads[:, one] * np.cos(angles) - heads[:, other] * np.sin(angles)
    result[:, other] = heads[:, other] * np.cos(angles) + heads[:, one] * np.sin(angles)
    return result.reshape(-1).astype(np.float32)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--device", choices=("cuda", "npu", "cpu"), required=True)
    parser.add_argument("--quick", action="store_true")
    parser.add_argument("rows", type=Path)
    options = parser.parse_args()
    device = device_of(options.device)
    rows = Rows(options.rows)
    check_transfers(device, rows, 20 if options.quick else 400)
    check_token_rows(device, rows)
    check_fences(device, rows, 3 if options.quick else 40)
    rows.add("all byte checks have run", OK)


if __name__ == "__main__":
    main()
