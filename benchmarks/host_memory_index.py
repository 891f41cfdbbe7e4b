# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vllm-ascend-kvext project
"""Measures the bytes of the scheduler's Python objects per GiB of host memory.

    [KVEXT_ASCEND_SOURCES=FOLDER] python benchmarks/host_memory_index.py [--quick] [--out FOLDER]

The real host tier is filled with prompts of one length, in the default chunks of 1,024 tokens, with
tails at the end of each prompt. The benchmark counts what Python has allocated for the tier
(``tracemalloc``). Host memory itself is not allocated. The last lines say what is remembered of
keys that are not stored. This has a bound, whatever the size of host memory.

The numbers do not depend on the machine, because nothing is timed.
"""

from __future__ import annotations

import gc
import os
import random
import sys
import tracemalloc
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")
sys.path.insert(0, str(Path(__file__).parents[1] / "tests"))

from common.processes import has_ascend, processes
from common.report import Table, parser, write
from host_tier.pages import MODELS, made_up, pages_of
from retention.layouts import ASCEND_BLOCK_SIZES, FULL_16

from vllm_ascend_kvext.connector.common.host_layout import HostLayout
from vllm_ascend_kvext.connector.common.options import ConnectorOptions
from vllm_ascend_kvext.layout.model import KVLayout, StatePolicy
from vllm_ascend_kvext.store.answers import Answers
from vllm_ascend_kvext.store.counters import Refusal
from vllm_ascend_kvext.store.entries import Piece
from vllm_ascend_kvext.store.prefix import HashedPrefix, TierGeometry
from vllm_ascend_kvext.store.store_policy import StoreChooser
from vllm_ascend_kvext.store.tier import HostTier

GIB = 1 << 30
CAPACITY_BYTES = 32 * GIB
QUICK_CAPACITY_BYTES = 4 * GIB
MAX_MODEL_TOKENS = 1 << 17
PROMPTS_TOKENS = (800, 8_000)
KEY_BYTES = 32
"""The bytes of a key: vLLM's default hash is SHA-256."""


@dataclass(frozen=True, slots=True)
class Model:
    """Pages of a model, and the tokens between two hashes of its prompts."""

    name: str
    pages: Callable[[], KVLayout]
    hash_tokens: int


@dataclass(frozen=True, slots=True)
class Row:
    """A full tier: the objects of the scheduler per GiB of host memory."""

    model: str
    unit_tokens: int
    prompt_tokens: int
    held_gib: float
    entries_per_gib: float
    index_bytes_per_gib: float


def models() -> Sequence[Model]:
    dense = MODELS["full"]
    return (
        Model("Qwen3-8B, blocks of 16", lambda: made_up((FULL_16,), dense), 16),
        Model("Qwen3-8B, blocks of 128", lambda: pages_of("full", 4), 128),
        Model("gpt-oss-120b", lambda: pages_of("gptoss", 4), 16),
        Model("gemma-3-27b", lambda: pages_of("gemma", 4), 16),
        Model("Qwen3-Next-80B", lambda: pages_of("mamba", 4), 512),
        Model("DeepSeek-V4 in vLLM", lambda: pages_of("dsv4", 4), 4),
    )


def ascend_models() -> Sequence[Model]:
    """DeepSeek-V4 as vllm-ascend plans it. vllm-ascend must be active in this process."""
    return [
        Model(f"DeepSeek-V4 on Ascend, {size}", partial(pages_of, name, 4), size)
        for name, size in ASCEND_BLOCK_SIZES.items()
    ]


def measure(model: Model, prompt_tokens: int, capacity_bytes: int) -> Row | None:
    """Fill a tier with prompts until one finds no room; None if a prompt has no unit."""
    options = ConnectorOptions()
    host = HostLayout(
        model.pages(),
        model.hash_tokens,
        lambda unit_tokens: options.chunk_tokens_of(unit_tokens, MAX_MODEL_TOKENS),
        StatePolicy.EXACT,
    )
    if prompt_tokens < host.unit_tokens:
        return None
    gc.collect()
    tracemalloc.start()
    try:
        tier = HostTier(capacity_bytes, host.geometry)
        rng = random.Random(0)
        while _has_room_for(tier, host, prompt_tokens):
            _store_prompt(tier, host, model.hash_tokens, prompt_tokens, rng)
        held_gib = tier.counters.bytes_held / GIB
        entries_held = tier.counters.entries_held
        gc.collect()
        index_bytes, _ = tracemalloc.get_traced_memory()
        # What the tier has learned does not grow with host memory, and stays.
        tier.clear()
        gc.collect()
        index_bytes -= tracemalloc.get_traced_memory()[0]
    finally:
        tracemalloc.stop()
    if not held_gib:
        return None
    return Row(
        model.name,
        host.unit_tokens,
        prompt_tokens,
        held_gib,
        entries_held / held_gib,
        index_bytes / held_gib,
    )


def pieces_of(host: HostLayout, prompt_tokens: int) -> Iterator[Piece]:
    """What is stored of a prompt: its rows by chunks, and tails at its end."""
    end_tokens = host.geometry.floor(prompt_tokens)
    if host.geometry.needs_rows:
        for first in range(0, end_tokens, host.geometry.chunk_tokens):
            yield Piece.rows(first, min(first + host.geometry.chunk_tokens, end_tokens))
    if host.geometry.needs_tails:
        yield Piece.tails(end_tokens)


def _has_room_for(tier: HostTier, host: HostLayout, prompt_tokens: int) -> bool:
    num_bytes = sum(host.num_bytes(piece) for piece in pieces_of(host, prompt_tokens))
    return tier.counters.bytes_held + num_bytes <= tier.capacity_bytes


def _store_prompt(
    tier: HostTier, host: HostLayout, hash_tokens: int, prompt_tokens: int, rng: random.Random
) -> None:
    hashes = [rng.randbytes(KEY_BYTES) for _ in range(prompt_tokens // hash_tokens)]
    prefix, use = HashedPrefix(hashes, hash_tokens), tier.next_use()
    tier.note_ended(prefix, prompt_tokens, prefix.num_tokens)
    for piece in pieces_of(host, prompt_tokens):
        entry = tier.begin_store(prefix, piece, host.num_bytes(piece), use)
        assert not isinstance(entry, Refusal), entry
        tier.finish_store(entry, host.row_map(piece))


def remembered_bytes() -> dict[str, int]:
    """The bytes for keys that are not stored, when the maximum number of them is known."""
    return {
        "keys that were stored, chunks that were asked for, and tails": _traced(_forgotten_tier),
        "answers, and whether they come back": _traced(_full_answers),
        "keys that were seen once (store_policy=second_touch)": _traced(_full_chooser),
    }


def _traced(make: Callable[[], Any]) -> int:
    gc.collect()
    tracemalloc.start()
    try:
        kept = make()
        gc.collect()
        return tracemalloc.get_traced_memory()[0] if kept is not None else 0
    finally:
        tracemalloc.stop()


def _forgotten_tier() -> HostTier:
    """An empty tier that remembers the maximum number of keys of both kinds."""
    tier = HostTier(1 << 20, TierGeometry(16, 16))
    rng = random.Random(0)
    for _ in range(70_000):
        prefix, use = HashedPrefix([rng.randbytes(KEY_BYTES)], 16), tier.next_use()
        tier.note_ended(prefix, 16, 16)
        for piece in (Piece.rows(0, 16), Piece.tails(16)):
            entry = tier.begin_store(prefix, piece, 64, use)
            assert not isinstance(entry, Refusal)
            tier.fail_store(entry)
    return tier


def _full_answers() -> Answers:
    """Answers of the maximum number of requests, each with a ``cache_salt`` of its own."""
    answers = Answers(16)
    rng = random.Random(0)
    for number in range(20_000):
        prefix = HashedPrefix([rng.randbytes(KEY_BYTES) for _ in range(3)], 16)
        salt = f"{number:032x}"
        conversation, _ = answers.note_prompt(prefix, 16, salt)
        answers.note_ended(prefix, 16, 32, conversation, salt)
        answers.note_prompt(prefix, 48, salt)
        answers.note_ended(prefix, 16, 32, conversation, salt)
    return answers


def _full_chooser() -> StoreChooser:
    chooser = StoreChooser()
    rng = random.Random(0)
    for number in range(270_000):
        chooser.is_wanted(rng.randbytes(KEY_BYTES), f"chatcmpl-{number:032x}")
    return chooser


TABLE = Table("model:<28", "unit:>6", "prompts:>8", "entries/GiB:>12", "KiB/GiB:>8", "share:>8")


def line_of(row: Row) -> str:
    return TABLE.line(
        row.model,
        row.unit_tokens,
        row.prompt_tokens,
        f"{row.entries_per_gib:.1f}",
        f"{row.index_bytes_per_gib / 1024:.1f}",
        f"{row.index_bytes_per_gib / GIB:.3%}",
    )


def rows_of(has_ascend_models: bool, capacity_bytes: int) -> list[Row]:
    """The rows that are measured in this process."""
    found = ascend_models() if has_ascend_models else models()
    measured = [
        measure(model, prompt_tokens, capacity_bytes)
        for model in found
        for prompt_tokens in PROMPTS_TOKENS
    ]
    return [row for row in measured if row is not None]


def main() -> None:
    arguments = parser(__doc__, "host_memory_index").parse_args()
    capacity_bytes = QUICK_CAPACITY_BYTES if arguments.quick else CAPACITY_BYTES
    rows = rows_of(False, capacity_bytes)
    if has_ascend():
        # vllm-ascend has its own process, because its patches would also plan the other layouts.
        with processes(1, is_ascend=True) as process:
            rows += process.submit(rows_of, True, capacity_bytes).result()
    lines = [TABLE.head, *map(line_of, rows)]
    if not arguments.quick:
        lines += [
            f"at most {num_bytes / (1 << 20):.0f} MiB for {what}"
            for what, num_bytes in remembered_bytes().items()
        ]
    print("\n".join(lines))
    write(arguments.out, lines, rows)


if __name__ == "__main__":
    main()
