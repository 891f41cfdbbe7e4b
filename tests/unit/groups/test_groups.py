# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vllm-ascend-kvext project
"""How single specs are read, and the arithmetic of windows, hits and pages."""

from __future__ import annotations

import re
from dataclasses import dataclass, replace
from fractions import Fraction

import pytest
from hypothesis import given
from hypothesis import strategies as st
from support.layout.fakes import (
    INT8,
    AscendMLAAttentionSpec,
    ChunkedLocalAttentionSpec,
    CrossAttentionSpec,
    DeclaredMLASpec,
    FullAttentionSpec,
    MambaSpec,
    MLAAttentionSpec,
    RSWASpec,
    SlidingWindowMLASpec,
    SlidingWindowSpec,
    cache_groups,
    config,
)

from vllm_ascend_kvext.errors import GroupError
from vllm_ascend_kvext.groups.kinds import kind_of, window_tokens_of
from vllm_ascend_kvext.groups.model import (
    CacheGroup,
    GroupKind,
    window_pages,
)
from vllm_ascend_kvext.groups.spec_attributes import (
    config_rows_of,
    holds_states,
    tokens_per_page,
    tokens_per_page_of,
)


@dataclass(frozen=True, kw_only=True)
class StateSpec(MambaSpec):
    """A class that stands for a spec of vLLM 0.30."""

    shapes: tuple[tuple[int, ...], ...] = ()
    dtypes: tuple[object, ...] = ()
    tokens_per_state: int = -1


SPECS = [
    # The spec, its kind, window_tokens and tokens_per_page. States count as those of their kind.
    (FullAttentionSpec(block_size=16), GroupKind.FULL, 0, 16),
    (FullAttentionSpec(block_size=16, sliding_window=9), GroupKind.FULL, 0, 16),
    (MLAAttentionSpec(block_size=256, compress_ratio=4), GroupKind.FULL, 0, 256),
    (AscendMLAAttentionSpec(block_size=128, compress_ratio=128), GroupKind.FULL, 0, 16384),
    (DeclaredMLASpec(block_size=512, tokens_per_state=4), GroupKind.FULL, 0, 512),
    (DeclaredMLASpec(block_size=16384, tokens_per_state=128), GroupKind.FULL, 0, 16384),
    (RSWASpec(block_size=16), GroupKind.OTHER, 0, 16),
    (SlidingWindowSpec(block_size=16, sliding_window=9), GroupKind.WINDOW, 9, 16),
    (SlidingWindowMLASpec(block_size=4, sliding_window=8), GroupKind.WINDOW, 8, 4),
    (
        ChunkedLocalAttentionSpec(block_size=16, attention_chunk_size=64),
        GroupKind.CHUNKED,
        64,
        16,
    ),
    (MambaSpec(block_size=32, shapes=(), dtypes=()), GroupKind.STATE, 0, 32),
    (StateSpec(block_size=32), GroupKind.STATE, 0, 32),
    (CrossAttentionSpec(block_size=16), GroupKind.OTHER, 0, 16),
]


@pytest.mark.parametrize(("spec", "kind", "window_tokens", "page_tokens"), SPECS)
def test_a_spec_says_which_tokens_its_layers_read(
    spec: object, kind: GroupKind, window_tokens: int, page_tokens: int
) -> None:
    assert kind_of(spec) is kind
    assert window_tokens_of(spec) == window_tokens
    assert tokens_per_page_of(spec) == page_tokens
    assert holds_states(spec, "0.attention") is (kind is GroupKind.STATE)


def test_a_compressors_states_are_a_window_that_holds_states() -> None:
    """For the scheduler, the states of a compressor are a sliding window like any other."""
    spec = SlidingWindowMLASpec(block_size=4, sliding_window=8)
    of_compressor, of_attention = cache_groups(
        config(4, (spec, "0.compressor.state_cache"), (spec, "0.swa_cache"))
    )
    assert of_compressor == CacheGroup(GroupKind.WINDOW, 4, 8, holds_states=True)
    assert of_attention == CacheGroup(GroupKind.WINDOW, 4, 8, holds_states=False)


@given(window_tokens=st.integers(1, 60), tokens_per_page=st.integers(1, 20))
def test_a_window_spans_the_pages_of_its_tokens(window_tokens: int, tokens_per_page: int) -> None:
    boundary = 100 * tokens_per_page
    read = {token // tokens_per_page for token in range(boundary - window_tokens + 1, boundary)}
    assert window_pages(window_tokens, tokens_per_page) == len(read)


# The two meanings of `block_size`, and numbers that contradict both of them.


def decide(block_size: int, ratio: int, config_rows: int | None, tensor_rows: int | None) -> int:
    return tokens_per_page(
        block_size, ratio, config_rows=config_rows, tensor_rows=tensor_rows, where="here"
    )


@pytest.mark.parametrize(
    ("block_size", "ratio", "rows", "expected"),
    [
        (256, 4, 64, 256),  # upstream DeepSeek-V4
        (256, 128, 2, 256),
        (128, 4, 128, 512),  # vLLM-Ascend
        (128, 128, 128, 16384),
        (32, 128, 32, 4096),  # vLLM-Ascend; not a multiple of the ratio
        (16, 1, 16, 16),
    ],
)
@pytest.mark.parametrize("knows", ["config", "tensor", "both"])
def test_rows_decide(block_size: int, ratio: int, rows: int, expected: int, knows: str) -> None:
    config_rows = None if knows == "tensor" else rows
    tensor_rows = None if knows == "config" else rows
    assert decide(block_size, ratio, config_rows, tensor_rows) == expected


@pytest.mark.parametrize("scale_dim", [0, 1])
@pytest.mark.parametrize("padded_bytes", [None, 1 << 20])
def test_rows_that_a_spec_declares_are_read_whatever_the_padding(
    scale_dim: int, padded_bytes: int | None
) -> None:
    """The size of the page would also fit the other, larger meaning of ``block_size``."""
    spec = DeclaredMLASpec(
        block_size=256, tokens_per_state=4, scale_dim=scale_dim, page_size_padded=padded_bytes
    )
    assert config_rows_of(spec) == 64
    assert tokens_per_page_of(spec) == 256


@pytest.mark.parametrize(
    ("spec", "found"),
    [
        # The rows of a page contradict the rows of ``block_size``. The name is the other version's.
        (DeclaredMLASpec(block_size=128, tokens_per_state=4, page_rows=128), "2048 bytes"),
        (DeclaredMLASpec(block_size=130, tokens_per_state=4), "32 rows"),
        (DeclaredMLASpec(block_size=128, compress_ratio=4), "tokens_per_state 1"),
        (DeclaredMLASpec(block_size=128, compress_ratio=1, tokens_per_state=4), "compress_ratio 1"),
        (DeclaredMLASpec(block_size=16, tokens_per_state=Fraction(1, 4)), "tokens_per_state 1/4"),
        (DeclaredMLASpec(block_size=16, prefix_cacheable=False), "scratch memory"),
    ],
)
def test_what_a_spec_says_twice_must_agree(spec: object, found: str) -> None:
    with pytest.raises(GroupError, match=found):
        tokens_per_page_of(spec)


def test_scratch_memory_is_of_no_kind() -> None:
    """vLLM 0.30's rings derive from the class of windows."""
    spec = DeclaredMLASpec(block_size=16, prefix_cacheable=False)
    assert kind_of(spec) is GroupKind.OTHER
    with pytest.raises(GroupError, match="found a DeclaredMLASpec"):
        cache_groups(config(4, (spec, "ring")))


@pytest.mark.parametrize(
    ("changes", "found"),
    [
        ({"role": "hisparse_source"}, "found the role hisparse_source"),
        ({"host_resident": True}, "found host_resident"),
        ({"enable_kv_transfer": False}, "found no enable_kv_transfer"),
    ],
)
def test_groups_with_a_pool_of_their_own_are_refused(changes: dict, found: str) -> None:
    made = config(4, (FullAttentionSpec(block_size=16), "a"))
    (group,) = made.kv_cache_groups
    with pytest.raises(GroupError, match=f"^KV cache group 0: .*{found}"):
        cache_groups(replace(made, kv_cache_groups=[replace(group, **changes)]))


def test_without_compression_nothing_has_to_be_known() -> None:
    assert decide(16, 1, None, None) == 16


@pytest.mark.parametrize(
    ("arguments", "numbers"),
    [
        ((128, 4, 128, 32), ("128", "32")),  # config and tensor contradict each other
        ((128, 4, None, 64), ("64", "128")),  # neither meaning
        ((128, 4, None, None), ("128", "512")),  # both meanings
        ((16, 1, None, 8), ("8", "16")),
        ((0, 4, None, None), ("0", "4")),
    ],
)
def test_a_contradiction_names_both_numbers(arguments: tuple, numbers: tuple[str, str]) -> None:
    with pytest.raises(GroupError, match=r"^here: ") as caught:
        decide(*arguments)
    found = re.findall(r"\d+", str(caught.value))
    assert set(numbers) <= set(found)


def test_padding_does_not_make_rows() -> None:
    spec = MLAAttentionSpec(
        block_size=256, head_size=132, dtype=INT8, compress_ratio=4, page_size_padded=8640
    )
    (group,) = cache_groups(config(4, (spec, "indexer")))
    assert group.tokens_per_page == 256


def test_the_scheduler_sees_the_same_as_the_worker() -> None:
    c4 = AscendMLAAttentionSpec(block_size=128, head_size=16, compress_ratio=4)
    indexer = AscendMLAAttentionSpec(
        block_size=128, head_size=8, dtype=INT8, compress_ratio=4, scale_dim=1
    )
    window = SlidingWindowSpec(block_size=128, sliding_window=128)
    worker = config(4, {"attn": c4, "indexer": indexer}, {"swa": window})
    scheduler = config(4, (c4, "attn", "indexer"), (window, "swa"))
    assert cache_groups(worker) == cache_groups(scheduler)
    assert [group.tokens_per_page for group in cache_groups(worker)] == [512, 128]


def test_layers_of_one_group_must_agree() -> None:
    full = FullAttentionSpec(block_size=16)
    with pytest.raises(GroupError, match=r"(?s)layer b: .*16.*32|layer b: .*32.*16"):
        cache_groups(config(4, {"a": full, "b": FullAttentionSpec(block_size=32)}))
