# SPDX-License-Identifier: Apache-2.0
"""The two meanings of ``block_size``, and what contradicts both."""

from __future__ import annotations

import re
from functools import partial

import pytest
from support.layout.fakes import (
    INT8,
    AscendMLAAttentionSpec,
    FullAttentionSpec,
    MLAAttentionSpec,
    SlidingWindowSpec,
    config,
    tensor,
)

from vllm_ascend_kvext.groups.errors import GroupError
from vllm_ascend_kvext.groups.specs import read_cache_groups
from vllm_ascend_kvext.groups.tokens_per_page import tokens_per_page
from vllm_ascend_kvext.layout.build import build_layout
from vllm_ascend_kvext.layout.worker_config import WorkerConfig

build = partial(build_layout, worker=WorkerConfig())


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


ASCEND = AscendMLAAttentionSpec(block_size=128, head_size=16, compress_ratio=4)
UPSTREAM = MLAAttentionSpec(block_size=256, head_size=16, compress_ratio=4)


@pytest.mark.parametrize(("spec", "rows"), [(ASCEND, 128), (UPSTREAM, 64)])
def test_config_and_tensor_agree_on_either_stack(spec: MLAAttentionSpec, rows: int) -> None:
    layout = build(config(4, (spec, "attn")), {"attn": tensor(4, rows, 1, 16)})
    (group,) = layout.groups
    assert (group.tokens_per_row, group.rows_per_page) == (4, rows)


@pytest.mark.parametrize(("spec", "rows"), [(ASCEND, 32), (UPSTREAM, 256)])
def test_a_tensor_with_the_other_meaning_is_refused(spec: MLAAttentionSpec, rows: int) -> None:
    expected = 128 if spec is ASCEND else 64
    with pytest.raises(GroupError) as caught:
        build(config(4, (spec, "attn")), {"attn": tensor(4, rows, 1, 16)})
    assert {str(rows), str(expected)} <= set(re.findall(r"\d+", str(caught.value)))


def test_padding_does_not_make_rows() -> None:
    spec = MLAAttentionSpec(
        block_size=256, head_size=132, dtype=INT8, compress_ratio=4, page_size_padded=8640
    )
    (group,) = read_cache_groups(config(4, (spec, "indexer")), 1)
    assert group.tokens_per_page == 256


def test_the_scheduler_sees_the_same_as_the_worker() -> None:
    c4 = ASCEND
    indexer = AscendMLAAttentionSpec(
        block_size=128, head_size=8, dtype=INT8, compress_ratio=4, scale_dim=1
    )
    window = SlidingWindowSpec(block_size=128, sliding_window=128)
    worker = config(4, {"attn": c4, "indexer": indexer}, {"swa": window})
    scheduler = config(4, (c4, "attn", "indexer"), (window, "swa"))
    assert read_cache_groups(worker, 1) == read_cache_groups(scheduler, 1)
    assert [group.tokens_per_page for group in read_cache_groups(worker, 1)] == [512, 128]


def test_layers_of_one_group_must_agree() -> None:
    full = FullAttentionSpec(block_size=16)
    with pytest.raises(GroupError, match=r"(?s)layer b: .*16.*32|layer b: .*32.*16"):
        read_cache_groups(config(4, {"a": full, "b": FullAttentionSpec(block_size=32)}), 1)
