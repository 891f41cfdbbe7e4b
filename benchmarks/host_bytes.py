# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vllm-ascend-kvext project
"""Prints the host memory of a chunk of 1,024 tokens, and its size with dense storage of all groups.

    [KVEXT_ASCEND_SOURCES=FOLDER] python benchmarks/host_bytes.py

There is one line per layout that the tests move byte by byte. The installed vLLM plans and shapes
the layouts. If the variable names a folder with the unpacked vllm-ascend, vllm-ascend does so, too
(see ``tests/ascend``). The numbers are exact and do not depend on the machine, because nothing is
timed.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Container
from dataclasses import replace
from functools import partial
from pathlib import Path

from vllm_ascend_kvext.token_range import TokenRange

os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")
sys.path.insert(0, str(Path(__file__).parents[1] / "tests"))

from common.processes import ASCEND_VARIABLE, has_ascend, processes

from vllm_ascend_kvext.groups.model import GroupKind
from vllm_ascend_kvext.layout.model import KVLayout, StatePolicy
from vllm_ascend_kvext.layout.rows import kept_rows
from vllm_ascend_kvext.layout.transfer_plan import PlacedChunk

CHUNK = TokenRange(15 * 1024, 16 * 1024)

Layouts = dict[str, Callable[[], object]]


def vllm_layouts() -> Layouts:
    from support.layout import fixtures as layout_fixtures

    layouts: Layouts = {
        "K and V, 4 full + 4 window": layout_fixtures.keys_then_values,
        "the same on a CPU": layout_fixtures.cpu_attention,
        "MLA, 3 layers": layout_fixtures.latent_rows,
        "1 attention + 3 Mamba": layout_fixtures.attention_and_mamba,
    }
    for name, cache_dtype in (("fp8", "fp8_ds_mla"), ("bfloat16", "auto")):
        layouts[f"DeepSeek-V4 in vLLM, {name}"] = partial(
            layout_fixtures.deepseek_v4, cache_dtype, num_blocks=4
        )
    return layouts


def ascend_layouts() -> Layouts:
    import ascend_layouts

    return {
        "K and V on Ascend, 3 + 3": ascend_layouts.keys_and_values,
        "MLA on Ascend, 3 layers": ascend_layouts.latent_and_rope,
        "DSA-C8 on Ascend, 3 layers": ascend_layouts.sparse_c8,
        "DeepSeek-V4 on Ascend": partial(ascend_layouts.deepseek_v4, 128, 4),
        "  --block-size 32": partial(ascend_layouts.deepseek_v4, 32, 4),
    }


def kind_bytes(layout: KVLayout, kinds: Container[GroupKind], holds_states: bool) -> int:
    """The bytes of some kinds of groups, without alignment."""
    return sum(
        sum(plane.row_bytes for plane in group.planes) * len(kept_rows(group, CHUNK))
        for group in layout.groups
        if group.kind in kinds and group.holds_states is holds_states
    )


def print_line(name: str, layout: KVLayout) -> None:
    from support.layout.byte_memory import chunk_bytes, dense_layout

    chunk = PlacedChunk(CHUNK)
    kept = chunk_bytes(layout, chunk)
    skipping = chunk_bytes(layout, chunk, StatePolicy.SKIP)
    dense = chunk_bytes(dense_layout(layout), chunk)
    stateless = replace(layout, groups=tuple(g for g in layout.groups if not g.holds_states))
    columns = [
        kind_bytes(layout, [GroupKind.FULL], False),
        kind_bytes(layout, [GroupKind.WINDOW, GroupKind.CHUNKED], False),
        kind_bytes(layout, GroupKind, True),
    ]
    columns += [kept, skipping, dense, chunk_bytes(dense_layout(stateless), chunk)]
    print(f"{name:32}" + "".join(f"{size:12,}" for size in columns) + f"{dense / kept:8.1f}")


def print_lines(layouts: Layouts) -> None:
    for name, make in layouts.items():
        print_line(name, make().layout())
    sys.stdout.flush()


def print_ascend_lines() -> None:
    print_lines(ascend_layouts())


def main() -> None:
    print(f"Host bytes of tokens {CHUNK.first_tokens} to {CHUNK.end_tokens - 1}\n")
    columns = ("full", "window", "state", "kept", "no states", "dense", "no states")
    print(f"{'layout':32}" + "".join(f"{column:>12}" for column in columns) + "   dense / kept")
    print_lines(vllm_layouts())
    if has_ascend():
        # vllm-ascend has its own process, because its patches would also plan the other layouts.
        with processes(1, is_ascend=True) as process:
            process.submit(print_ascend_lines).result()
    else:
        print(f"(set {ASCEND_VARIABLE} for the layouts of vllm-ascend)")


if __name__ == "__main__":
    main()
