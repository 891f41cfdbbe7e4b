# SPDX-License-Identifier: Apache-2.0
"""What is read of single specs, and the arithmetic of windows, hits and pages."""

from __future__ import annotations

import pkgutil
import subprocess
import sys

import pytest
from hypothesis import given
from hypothesis import strategies as st
from support.layout.fakes import (
    AscendMLAAttentionSpec,
    ChunkedLocalAttentionSpec,
    CrossAttentionSpec,
    FullAttentionSpec,
    MambaSpec,
    MLAAttentionSpec,
    SlidingWindowMLASpec,
    SlidingWindowSpec,
    config,
)

import vllm_ascend_kvext.groups
from vllm_ascend_kvext.groups.model import (
    CacheGroup,
    GroupKind,
    is_clipped,
    num_skipped_pages,
    window_pages,
)
from vllm_ascend_kvext.groups.spec_attributes import (
    holds_states,
    kind_of,
    tokens_per_page_of,
    window_tokens_of,
)
from vllm_ascend_kvext.groups.specs import read_cache_groups

SPECS = [
    # spec, kind, window_tokens, tokens_per_page
    (FullAttentionSpec(block_size=16), GroupKind.FULL, 0, 16),
    (FullAttentionSpec(block_size=16, sliding_window=9), GroupKind.FULL, 0, 16),
    (MLAAttentionSpec(block_size=256, compress_ratio=4), GroupKind.FULL, 0, 256),
    (AscendMLAAttentionSpec(block_size=128, compress_ratio=128), GroupKind.FULL, 0, 16384),
    (SlidingWindowSpec(block_size=16, sliding_window=9), GroupKind.WINDOW, 9, 16),
    (SlidingWindowMLASpec(block_size=4, sliding_window=8), GroupKind.WINDOW, 8, 4),
    (
        ChunkedLocalAttentionSpec(block_size=16, attention_chunk_size=64),
        GroupKind.CHUNKED,
        64,
        16,
    ),
    (MambaSpec(block_size=32, shapes=(), dtypes=()), GroupKind.STATE, 0, 32),
    (CrossAttentionSpec(block_size=16), GroupKind.OTHER, 0, 16),
]


@pytest.mark.parametrize(("spec", "kind", "window_tokens", "tokens_per_page"), SPECS)
def test_a_spec_says_which_tokens_its_layers_read(
    spec: object, kind: GroupKind, window_tokens: int, tokens_per_page: int
) -> None:
    assert kind_of(spec) is kind
    assert window_tokens_of(spec) == window_tokens
    assert tokens_per_page_of(spec) == tokens_per_page


def test_context_parallelism_multiplies_the_tokens_of_a_page() -> None:
    spec = FullAttentionSpec(block_size=16)
    assert tokens_per_page_of(spec, context_parallel_size=4) == 64
    (group,) = read_cache_groups(config(4, (spec, "a")), 4)
    assert group.tokens_per_page == 64


def test_a_compressors_states_are_a_window_that_holds_states() -> None:
    """To the scheduler they are a sliding window like any other."""
    spec = SlidingWindowMLASpec(block_size=4, sliding_window=8)
    of_compressor, of_attention = read_cache_groups(
        config(4, (spec, "0.compressor.state_cache"), (spec, "0.swa_cache")), 1
    )
    assert of_compressor == CacheGroup(GroupKind.WINDOW, 4, 8, holds_states=True)
    assert of_attention == CacheGroup(GroupKind.WINDOW, 4, 8, holds_states=False)


def test_a_recurrence_holds_states() -> None:
    assert holds_states(MambaSpec(block_size=32, shapes=(), dtypes=()), "0.mamba")
    assert not holds_states(FullAttentionSpec(block_size=16), "0.state_cache")


@given(window_tokens=st.integers(1, 60), tokens_per_page=st.integers(1, 20))
def test_a_window_spans_the_pages_of_its_tokens(window_tokens: int, tokens_per_page: int) -> None:
    boundary = 100 * tokens_per_page
    read = {token // tokens_per_page for token in range(boundary - window_tokens + 1, boundary)}
    assert window_pages(window_tokens, tokens_per_page) == len(read)
    group = CacheGroup(GroupKind.WINDOW, tokens_per_page, window_tokens)
    assert group.window_pages == len(read)


@given(
    computed_tokens=st.integers(0, 200),
    window_tokens=st.integers(1, 60),
    tokens_per_page=st.integers(1, 20),
)
def test_skipped_pages_hold_no_token_of_the_window(
    computed_tokens: int, window_tokens: int, tokens_per_page: int
) -> None:
    """The next token reads itself and the ``window_tokens - 1`` tokens before it."""
    first_read = max(0, computed_tokens - window_tokens + 1)
    skipped = num_skipped_pages(computed_tokens, window_tokens, tokens_per_page)
    assert skipped * tokens_per_page <= first_read < (skipped + 1) * tokens_per_page


def test_only_windows_shorter_than_the_boundary_are_not_clipped() -> None:
    assert is_clipped(16, window_tokens=20, tokens_per_page=4, unit_tokens=16)
    assert not is_clipped(32, window_tokens=20, tokens_per_page=4, unit_tokens=16)
    assert not is_clipped(4, window_tokens=20, tokens_per_page=4, unit_tokens=4)


def test_nothing_heavy_is_imported() -> None:
    names = [module.name for module in pkgutil.iter_modules(vllm_ascend_kvext.groups.__path__)]
    assert "specs" in names
    imports = "".join(f"import vllm_ascend_kvext.groups.{name}\n" for name in names)
    code = f"import sys\nsys.path[:] = {sys.path!r}\n{imports}"
    code += "print({'torch', 'vllm', 'vllm_ascend', 'numpy'} & set(sys.modules))"
    found = subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, text=True)
    assert found.stdout.strip() == "set()"
