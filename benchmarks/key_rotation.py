# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vllm-ascend-kvext project
"""Compares the transfer op that rotates keys with the plain op, and with torch, in one run.

    python benchmarks/key_rotation.py [--quick] [--out FOLDER]

Every round loads the same number of keys by every method in turn. Each load uses host memory and
pages that no cache holds. One thread is timed by its CPU time, two threads by the clock. A ratio is
the median over the rounds of (method / plain copy of the same bytes in the same round). Torch
rotates a plane of keys in float32 and writes it into its pages with ``index_copy_``. Torch's
cosines and views are made outside the measured time.
"""

from __future__ import annotations

import os
import statistics
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))

import torch
from common.report import Table, median_ratio, parser, verdict, write
from transfer.geometry import ColdMemory, Job, Layout, PlaneShape
from transfer.methods import Copy, PageTransfer, time_in_turns

from vllm_ascend_kvext.native import native
from vllm_ascend_kvext.segments.keys.rotary import KeyPlane, RotarySignature, key_rotation
from vllm_ascend_kvext.transfer.key_rotation import KeyRotation, rotated_page_transfer
from vllm_ascend_kvext.transfer.placement import CALLING_THREAD
from vllm_ascend_kvext.transfer.schema import Direction, PairStyle, RowDtype

MAX_RATIO = 1.5
SHIFT = 12_345
NUM_LAYERS = 32
TOKENS = 256
ROUNDS = 30
DTYPES = {RowDtype.FLOAT32: torch.float32, RowDtype.BFLOAT16: torch.bfloat16}

PLAIN = "page_transfer, not rotated"
OURS = "rotated_page_transfer"
TORCH = "torch: rotate, index_copy_ per plane"


@dataclass(frozen=True)
class Keys:
    """The keys of one kind of model: every layer has one plane of them.

    Attributes:
        name: The printed name.
        signature: How the keys are rotated.
        num_heads: The heads of a row.
        rows_per_page: The tokens of a page.
    """

    name: str
    signature: RotarySignature
    num_heads: int
    rows_per_page: int

    @cached_property
    def layout(self) -> Layout:
        signature = self.signature
        row_bytes = self.num_heads * signature.head_elements * signature.dtype.element_bytes
        shape = PlaneShape(row_bytes, self.rows_per_page)
        return Layout(self.name, (shape,), NUM_LAYERS, TOKENS // self.rows_per_page)

    @cached_property
    def rotation(self) -> KeyRotation:
        planes = [KeyPlane(plane, self.signature, self.num_heads) for plane in range(NUM_LAYERS)]
        return key_rotation(planes, {0: SHIFT})


def frequencies(num_pairs: int) -> tuple[float, ...]:
    return tuple(500_000.0 ** (-pair / num_pairs) for pair in range(num_pairs))


def keys_of(dtype: RowDtype) -> list[Keys]:
    name = dtype.name.lower()
    halves = PairStyle.HALVES
    neighbours = PairStyle.NEIGHBOURS
    heads = [
        Keys(
            f"{name}, 8 heads of {size}, {words}",
            RotarySignature(frequencies(size // 2), style, size, 0, dtype),
            num_heads=8,
            rows_per_page=16,
        )
        for size in (64, 128)
        for style, words in ((halves, "halves"), (neighbours, "neighbours"))
    ]
    latent = RotarySignature(frequencies(32), neighbours, 576, 512, dtype)
    return [*heads, Keys(f"{name}, MLA rows of 576, 64 of them rotated", latent, 1, 64)]


class Rotated:
    """The op, from registered pools and descriptors to the last byte."""

    def __init__(self, keys: Keys) -> None:
        self.name = OURS
        self._keys = keys

    def prepare(self, job: Job) -> Copy:
        placement = CALLING_THREAD._replace(num_threads=job.num_threads)
        return lambda: rotated_page_transfer(
            job.memory.pools,
            job.host,
            job.memory.plane_table,
            job.runs,
            job.direction,
            self._keys.rotation,
            placement=placement,
        )


class TorchRotation:
    """The rotation in torch, plane by plane."""

    def __init__(self, keys: Keys) -> None:
        self.name = TORCH
        self._keys = keys
        angles = SHIFT * torch.tensor(keys.signature.frequencies, dtype=torch.float64)
        self._cosines, self._sines = angles.cos().float(), angles.sin().float()

    def prepare(self, job: Job) -> Copy:
        ids = torch.from_numpy(job.pages)
        planes = [self._views(job, plane) for plane in range(NUM_LAYERS)]

        def copy() -> None:
            for in_pages, in_host in planes:
                in_pages.index_copy_(0, ids, self._rotated(in_host))

        return copy

    def _views(self, job: Job, plane: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Pages and host rows, shape ``[pages, rows, heads, head_elements]``."""
        signature = self._keys.signature
        layout = job.memory.layout
        first = layout.host_offsets[plane]
        num_bytes = layout.planes[plane].page_bytes * len(job.pages)
        shape = -1, self._keys.rows_per_page, self._keys.num_heads, signature.head_elements
        in_pages, in_host = (
            side.view(DTYPES[signature.dtype]).view(shape)
            for side in (job.memory.tensors[plane], job.host[first : first + num_bytes])
        )
        return in_pages, in_host

    def _rotated(self, rows: torch.Tensor) -> torch.Tensor:
        signature = self._keys.signature
        begin = signature.offset_elements
        part = rows[..., begin : begin + signature.rotary_elements].float()
        if signature.pair_style == PairStyle.HALVES:
            a, b = part.chunk(2, -1)
        else:
            a = part[..., ::2]
            b = part[..., 1::2]
        turned = a * self._cosines - b * self._sines, b * self._cosines + a * self._sines
        if signature.pair_style == PairStyle.HALVES:
            together = torch.cat(turned, -1)
        else:
            together = torch.stack(turned, -1).flatten(-2)
        if signature.rotary_elements == signature.head_elements:
            return together.to(rows.dtype)
        result = rows.clone()
        result[..., begin : begin + signature.rotary_elements] = together
        return result


@dataclass(frozen=True, slots=True)
class Result:
    """One row of the table; times in milliseconds per load."""

    keys: str
    mb: float
    num_threads: int
    method: str
    time_ms: float
    gb_per_s: float
    plain_ratio: float


def fill(memory: ColdMemory, dtype: torch.dtype) -> None:
    """Fill the memory with numbers, because NaN or numbers near zero would change the times."""
    numbers = torch.randn(1 << 20).to(dtype).view(torch.uint8)
    for whole in (memory.arena, memory.host):
        whole.view(-1, len(numbers)).copy_(numbers)


def check(memory: ColdMemory, keys: Keys) -> None:
    """Check that the op rotates the keys.

    Raises:
        SystemExit: The keys differ from torch's by more than rounding.
    """
    job = Job.next(memory, Direction.HOST_TO_PAGES, True, 1)
    ids = torch.from_numpy(job.pages)
    reference = TorchRotation(keys)
    Rotated(keys).prepare(job)()
    limit = 1e-5 if keys.signature.dtype == RowDtype.FLOAT32 else 2e-2
    for plane in range(NUM_LAYERS):
        in_pages, in_host = reference._views(job, plane)
        if not torch.allclose(in_pages[ids], reference._rotated(in_host), rtol=limit, atol=limit):
            raise SystemExit(f"{keys.name}: the rotated keys of plane {plane} are not torch's")


def measure(memory: ColdMemory, keys: Keys, num_threads: int, rounds: int) -> Iterator[Result]:
    """Time every method in every round."""
    methods = (PageTransfer(PLAIN), Rotated(keys), TorchRotation(keys))
    way = Direction.HOST_TO_PAGES
    times_ns = time_in_turns(methods, memory, way, True, num_threads, rounds)
    num_bytes = keys.layout.chunk_bytes
    for name, spent_ns in times_ns.items():
        median_ns = statistics.median(spent_ns)
        yield Result(
            keys=keys.name,
            mb=num_bytes / 1e6,
            num_threads=num_threads,
            method=name,
            time_ms=median_ns / 1e6,
            gb_per_s=2 * num_bytes / median_ns,
            plain_ratio=median_ratio(spent_ns, times_ns[PLAIN]),
        )


TABLE = Table(
    "keys:<48",
    "MB:>5",
    "threads:>7",
    "method:<38",
    "GB/s:>6",
    "time / plain copy:>17",
)


def line(result: Result) -> str:
    cells = (result.keys, f"{result.mb:.1f}", result.num_threads, result.method)
    return TABLE.line(*cells, f"{result.gb_per_s:.1f}", f"{result.plain_ratio:.2f}x")


def target(results: list[Result]) -> str:
    """The target of the project, and the measured value."""
    ours = [result for result in results if result.method == OURS]
    worst = max(ours, key=lambda result: result.plain_ratio)
    gains = [
        other.plain_ratio / own.plain_ratio
        for own in ours
        for other in results
        if (other.keys, other.num_threads, other.method) == (own.keys, own.num_threads, TORCH)
    ]
    return verdict(
        worst.plain_ratio <= MAX_RATIO,
        f"at most {MAX_RATIO} x the plain copy. Worst: {worst.plain_ratio:.2f} x ({worst.keys}, "
        f"threads: {worst.num_threads}). "
        f"Faster than torch: {min(gains):.1f} to {max(gains):.1f} x.",
    )


def main() -> None:
    arguments = parser(__doc__, "bench-key-rotation").parse_args()
    described = native().describe()
    print(
        f"kernels {described['kernel']}, {described['rotation_kernel']}; "
        f"load average {os.getloadavg()[0]:.1f}\n{TABLE.head}"
    )
    results: list[Result] = []
    for dtype, as_torch in DTYPES.items():
        for keys in keys_of(dtype):
            memory = ColdMemory(keys.layout)
            fill(memory, as_torch)
            check(memory, keys)
            for num_threads in (1, 2):
                results += measure(memory, keys, num_threads, 8 if arguments.quick else ROUNDS)
                print(*map(line, results[-3:]), sep="\n", flush=True)
            del memory
    print(target(results))
    write(arguments.out, [TABLE.head, *map(line, results), target(results)], results)


if __name__ == "__main__":
    main()
