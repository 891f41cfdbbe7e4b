# SPDX-License-Identifier: Apache-2.0
"""What making the descriptors of a transfer costs, beside the transfer itself.

    [KVEXT_ASCEND_SOURCES=FOLDER] python benchmarks/transfer_planning.py [--turns N]

A request of 32k tokens of DeepSeek-V4 with 43 layers, planned and shaped by the installed vLLM, or
by vllm-ascend where the variable names a folder that holds it unpacked (see ``tests/ascend``).
Planned and moved as one chunk, and as 32 chunks of 1,024 tokens in one call. Times are the thread's
CPU time, medians over turns; planning and moving take turns. Then planning alone, for more tokens
per page and for more pages: it grows with runs.
"""

from __future__ import annotations

import argparse
import os
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path

os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")
sys.path.insert(0, str(Path(__file__).parents[1] / "tests"))
sys.path.insert(0, str(Path(__file__).parents[1] / "tests" / "ascend"))

import ascend_sources
import numpy as np
import torch

from vllm_ascend_kvext.groups.model import GroupKind
from vllm_ascend_kvext.layout.model import KVLayout, LayoutGroup, Plane, RegisteredStorage
from vllm_ascend_kvext.layout.planner import TransferPlanner
from vllm_ascend_kvext.layout.row_map import StoredChunk
from vllm_ascend_kvext.layout.rows import TokenRange, kept_rows
from vllm_ascend_kvext.layout.transfer_plan import LoadPlan, PlacedChunk, StorePlan
from vllm_ascend_kvext.layout.views import storage_tensors
from vllm_ascend_kvext.transfer.cpu import CpuBackend
from vllm_ascend_kvext.transfer.page_transfer import page_transfer
from vllm_ascend_kvext.transfer.schema import Direction

REQUEST_TOKENS = 32 * 1024
CHUNK_TOKENS = 1024
LIMIT = 0.05


def deepseek_v4() -> tuple[str, object]:
    """A worker with pages for one request."""
    folder = ascend_sources.sources()
    if folder is not None:
        ascend_sources.activate(folder)
        import ascend_layouts

        return "vllm-ascend", ascend_layouts.deepseek_v4(128, 256)
    from support.layout import fixtures as layout_fixtures

    return "vLLM", layout_fixtures.deepseek_v4("fp8_ds_mla", num_blocks=512)


def request_block_ids(layout: KVLayout, chunks: Sequence[PlacedChunk]) -> list[list[int]]:
    """Pages in random order for what the chunks keep; null elsewhere."""
    ids = [[0] * pages for pages in pages_per_group(layout, REQUEST_TOKENS)]
    kept = {
        (group.scheduler_group, row // group.rows_per_page)
        for group in layout.groups
        for chunk in chunks
        for row in kept_rows(group, chunk.tokens)
    }
    fresh = np.random.default_rng(0).permutation(layout.num_pages - 1) + 1
    for (group, page), block_id in zip(sorted(kept), fresh[: len(kept)].tolist(), strict=True):
        ids[group][page] = block_id
    return ids


def pages_per_group(layout: KVLayout, num_tokens: int) -> list[int]:
    pages = [0] * layout.num_scheduler_groups
    for group in layout.groups:
        pages[group.scheduler_group] = -(-num_tokens // group.tokens_per_page)
    return pages


def cut(planner: TransferPlanner, chunk_tokens: int) -> list[PlacedChunk]:
    """The request in chunks, one behind the other in the host buffer."""
    chunks, place_bytes = [], 0
    for first in range(0, REQUEST_TOKENS, chunk_tokens):
        tokens = TokenRange(first, first + chunk_tokens)
        chunks.append(PlacedChunk(tokens, place_bytes))
        place_bytes += planner.chunk_bytes(tokens)
    return chunks


def cpu_ms(work: Callable[[], object]) -> float:
    started_ns = time.thread_time_ns()
    work()
    return (time.thread_time_ns() - started_ns) / 1e6


def compare_with_moving(name: str, fixture: object, turns: int) -> None:
    layout = fixture.layout()
    planner = TransferPlanner(layout)
    storages = storage_tensors(layout, fixture.kv_caches)
    for storage in storages:
        storage.fill_(1)  # so that no page is the system's page of zeros
    print(f"{name}: {REQUEST_TOKENS:,} tokens, {layout.num_planes} planes")
    columns = ("chunks", "runs", "MB", "plan ms", "move ms", "plan/move")
    print(" " * 8 + "".join(f"{column:>11}" for column in columns))
    for chunk_tokens in (REQUEST_TOKENS, CHUNK_TOKENS):
        chunks = cut(planner, chunk_tokens)
        block_ids = request_block_ids(layout, chunks)
        stored = planner.plan_store(chunks, block_ids)
        places = [chunk.host_offset_bytes for chunk in chunks]
        maps = [StoredChunk(*each) for each in zip(stored.row_maps, places, strict=True)]
        request = TokenRange(0, REQUEST_TOKENS)
        host = torch.ones(stored.host_bytes, dtype=torch.uint8)
        plans: dict[Direction, Callable[[], StorePlan | LoadPlan]] = {
            Direction.PAGES_TO_HOST: partial(planner.plan_store, chunks, block_ids),
            Direction.HOST_TO_PAGES: partial(planner.plan_load, maps, request, block_ids),
        }
        for direction, plan in plans.items():
            made = plan()
            move = partial(
                page_transfer,
                storages,
                host,
                made.planes,
                made.runs,
                direction,
                backend=CpuBackend(),
                num_threads=1,
            )
            turn_ms = [(cpu_ms(plan), cpu_ms(move)) for _ in range(turns)]
            plan_ms, move_ms = (statistics.median(column) for column in zip(*turn_ms, strict=True))
            verb = "store" if direction is Direction.PAGES_TO_HOST else "load"
            print(
                f"{verb:8}{len(chunks):11}{len(made.runs):11}{made.host_bytes / 1e6:11.0f}"
                f"{plan_ms:11.2f}{move_ms:11.2f}{plan_ms / move_ms:11.1%}"
                + ("" if plan_ms < LIMIT * move_ms else f"  above {LIMIT:.0%}")
            )


def full_layout(tokens_per_page: int, tokens_per_row: int) -> KVLayout:
    """86 planes of one group: what 43 layers of K and V have."""
    rows = tokens_per_page // tokens_per_row
    planes = tuple(
        Plane(str(index), 0, index << 40, rows * 256, 0, 256, "bfloat16", False)
        for index in range(86)
    )
    group = LayoutGroup(0, GroupKind.FULL, tokens_per_page, tokens_per_row, 0, 0, planes)
    return KVLayout((RegisteredStorage(4096, 1 << 50),), (group,), 1 << 20, 1)


def show_growth(turns: int) -> None:
    print("\nplanning alone, one chunk, 86 planes of one group")
    print(f"{'tokens':>12}{'per page':>10}{'runs':>8}{'plan us':>10}")
    for num_tokens, tokens_per_page in (
        (16, 16),
        (32 << 10, 16),
        (32 << 10, 128),
        (32 << 10, 1024),
        (256 << 10, 128),
        (256 << 10, 1024),
        (2048 << 10, 1024),
    ):
        planner = TransferPlanner(full_layout(tokens_per_page, 1))
        chunks = [PlacedChunk(TokenRange(0, num_tokens))]
        block_ids = [list(range(1, num_tokens // tokens_per_page + 1))]
        num_runs = len(planner.plan_store(chunks, block_ids).runs)
        plan_ms = statistics.median(
            cpu_ms(partial(planner.plan_store, chunks, block_ids)) for _ in range(10 * turns)
        )
        print(f"{num_tokens:12,}{tokens_per_page:10}{num_runs:8}{plan_ms * 1000:10.0f}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--turns", type=int, default=10, metavar="N")
    turns = parser.parse_args().turns
    name, fixture = deepseek_v4()
    compare_with_moving(f"DeepSeek-V4 as {name} lays it out", fixture, turns)
    show_growth(turns)


if __name__ == "__main__":
    main()
