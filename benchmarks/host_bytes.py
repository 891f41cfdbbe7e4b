# SPDX-License-Identifier: Apache-2.0
"""What a chunk of 1,024 tokens takes in host memory, beside storing every group densely.

    [KVEXT_ASCEND_SOURCES=FOLDER] python benchmarks/host_bytes.py

One line per layout that the tests move byte by byte, planned and shaped by the installed vLLM; and
by vllm-ascend, where the variable names a folder that holds it unpacked (see ``tests/ascend``).
Exact and independent of the machine: nothing is timed.
"""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable, Container
from dataclasses import replace
from functools import partial
from pathlib import Path

os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")
sys.path.insert(0, str(Path(__file__).parents[1] / "tests"))
sys.path.insert(0, str(Path(__file__).parents[1] / "tests" / "ascend"))

import ascend_sources

from vllm_ascend_kvext.groups.model import GroupKind
from vllm_ascend_kvext.layout.host_arrangement import dense_chunk_bytes
from vllm_ascend_kvext.layout.model import KVLayout, StatePolicy
from vllm_ascend_kvext.layout.planner import TransferPlanner
from vllm_ascend_kvext.layout.rows import TokenRange, kept_rows

CHUNK = TokenRange(15 * 1024, 16 * 1024)
ASCEND_ONLY = "--ascend"

Layouts = dict[str, Callable[[], object]]


def vllm_layouts() -> Layouts:
    from support.layout import fixtures as layout_fixtures
    from support.layout.eleven_groups import eleven_groups

    layouts: Layouts = {
        "K and V, 4 full + 4 window": layout_fixtures.keys_then_values,
        "the same on a CPU": layout_fixtures.cpu_attention,
        "MLA, 3 layers": layout_fixtures.latent_rows,
        "1 attention + 3 Mamba": layout_fixtures.attention_and_mamba,
        "DeepSeek-V4, 11 groups, 9 layers": eleven_groups,
    }
    if layout_fixtures.HAS_DEEPSEEK_V4:
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
    """Bytes of some kinds of groups, alignment aside."""
    return sum(
        group.row_bytes * len(kept_rows(group, CHUNK))
        for group in layout.groups
        if group.kind in kinds and group.holds_states is holds_states
    )


def print_line(name: str, layout: KVLayout) -> None:
    kept = TransferPlanner(layout).chunk_bytes(CHUNK)
    skipping = TransferPlanner(layout, StatePolicy.SKIP).chunk_bytes(CHUNK)
    dense = dense_chunk_bytes(layout, CHUNK)
    stateless = replace(layout, groups=tuple(g for g in layout.groups if not g.holds_states))
    columns = [
        kind_bytes(layout, [GroupKind.FULL], False),
        kind_bytes(layout, [GroupKind.WINDOW, GroupKind.CHUNKED], False),
        kind_bytes(layout, GroupKind, True),
    ]
    columns += [kept, skipping, dense, dense_chunk_bytes(stateless, CHUNK)]
    print(f"{name:32}" + "".join(f"{size:12,}" for size in columns) + f"{dense / kept:8.1f}")


def print_lines(layouts: Layouts) -> None:
    for name, make in layouts.items():
        print_line(name, make().layout())
    sys.stdout.flush()


def main() -> None:
    if ASCEND_ONLY in sys.argv:
        # In a process of its own: its patches would plan the other layouts too.
        ascend_sources.activate(ascend_sources.sources())
        print_lines(ascend_layouts())
        return
    print(f"Host bytes of tokens {CHUNK.first} to {CHUNK.end - 1}\n")
    columns = ("full", "window", "state", "kept", "no states", "dense", "no states")
    print(f"{'layout':32}" + "".join(f"{column:>12}" for column in columns) + "   dense / kept")
    print_lines(vllm_layouts())
    if ascend_sources.sources() is not None:
        subprocess.run([sys.executable, __file__, ASCEND_ONLY], check=True)
    else:
        print(f"(set {ascend_sources.SOURCES_VARIABLE} for the layouts of vllm-ascend)")


if __name__ == "__main__":
    main()
