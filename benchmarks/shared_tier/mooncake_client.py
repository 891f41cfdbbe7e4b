# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vllm-ascend-kvext project
"""Compares the shared tier in Mooncake Store with Mooncake's own client: GB/s and ratios.

    python benchmarks/shared_tier/mooncake_client.py [--quick] [--rounds N] [--out FOLDER]

A master and a client with memory run on this machine, over TCP. The shared tier puts sealed objects
of each size once. Then every round gets all objects into the same memory, once by the shared tier
and once by the tier's client, and puts them again by both. The shared tier first asks whether an
object exists, makes a checksum of each put, and verifies each get. A ratio is the median over the
rounds of (ours / the client's seconds). Without Mooncake's wheel the benchmark is skipped.
"""

from __future__ import annotations

import importlib.util
import mmap
import os
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path

sys.path[0] = str(Path(__file__).parents[1])
sys.path.insert(1, str(Path(__file__).parents[2] / "tests"))

from common.report import Table, median_ratio, parser, verdict, write  # noqa: E402

TARGET = 1.2
SIZES_BYTES = (256 << 10, 4 << 20, 7 << 20, 32 << 20)
ROUND_BYTES = 128 << 20
POOL = "512 MB"
TABLE = Table("object:>8", "put GB/s:>9", "of client:>10", "get GB/s:>9", "of client:>10")


@dataclass
class Row:
    """The seconds of each round, by operation and contender."""

    object_bytes: int
    num_bytes: int
    seconds: dict[str, list[float]] = field(default_factory=dict)

    def ratio(self, what: str) -> float:
        return median_ratio(self.seconds[f"{what} ours"], self.seconds[f"{what} client"])

    def speed(self, what: str) -> float:
        return self.num_bytes / statistics.median(self.seconds[f"{what} ours"]) / 1e9


def measure(url: str, object_bytes: int, rounds: int) -> Row:
    from vllm_ascend_kvext.shared_tier.backend import SEAL_BYTES, Answer, SharedObject
    from vllm_ascend_kvext.shared_tier.mooncake import MooncakeTier

    num_objects = max(1, min(64, ROUND_BYTES // object_bytes))
    place_bytes = -(-(object_bytes + SEAL_BYTES) // 4096) * 4096
    memory = mmap.mmap(-1, num_objects * place_bytes)
    memory.write(os.urandom(place_bytes) * num_objects)
    tier = MooncakeTier(url, rank=0)
    tier.register(memoryview(memory))
    objects = [
        SharedObject(number, f"{'a' * 32}/R0-16-{number:032x}", number * place_bytes, object_bytes)
        for number in range(num_objects)
    ]
    places = [tier._place(each) for each in objects]

    def forget() -> None:
        for each in objects:
            tier.forget(each.name)

    def put_ours() -> None:
        assert all(tier.put(each) is Answer.WHOLE for each in objects)

    def get_ours() -> None:
        assert all(tier.get_into(each, lambda _: None) is Answer.WHOLE for each in objects)

    def put_client() -> None:
        for key, place, address in places:
            assert tier._store.batch_put_from([key], [address], [len(place)]) == [0]

    def get_client() -> None:
        for key, place, address in places:
            assert tier._store.batch_get_into([key], [address], [len(place)]) == [len(place)]

    row = Row(object_bytes, num_objects * object_bytes)
    steps: Sequence[tuple[str, Callable[[], None]]] = (
        ("put client", put_client),
        ("get client", get_client),
        ("put ours", put_ours),
        ("get ours", get_ours),
    )
    for number in range(-1, rounds):  # The first round warms up.
        for name, step in steps:
            if name.startswith("put"):
                forget()
            began_s = time.perf_counter()
            step()
            if number >= 0:
                row.seconds.setdefault(name, []).append(time.perf_counter() - began_s)
    forget()
    tier.close()
    return row


def main() -> int:
    options = parser(__doc__, "bench-shared-tier")
    options.add_argument("--rounds", type=int)
    arguments = options.parse_args()
    if importlib.util.find_spec("mooncake") is None:
        print("Mooncake's wheel is not installed: nothing was measured")
        return 0
    from support.mooncake import Servers

    sizes = SIZES_BYTES[1:2] if arguments.quick else SIZES_BYTES
    rounds = arguments.rounds or (3 if arguments.quick else 7)
    lines = [TABLE.head]
    rows = []
    with tempfile.TemporaryDirectory() as folder:
        servers = Servers(Path(folder), POOL)
        try:
            for object_bytes in sizes:
                rows.append(row := measure(servers.url, object_bytes, rounds))
                cells = (x for name in ("put", "get") for x in (row.speed(name), row.ratio(name)))
                lines.append(
                    TABLE.line(f"{object_bytes >> 10} KiB", *(f"{cell:.2f}" for cell in cells))
                )
                print(*lines[-2:] if len(lines) == 2 else lines[-1:], sep="\n", flush=True)
        finally:
            servers.end()
    worst = max(row.ratio("get") for row in rows)
    lines.append(
        verdict(worst <= TARGET, f"a get takes {worst:.2f} x the client's; target {TARGET}")
    )
    print(lines[-1])
    write(arguments.out, lines, rows, "mooncake")
    return 0


if __name__ == "__main__":
    sys.exit(main())
