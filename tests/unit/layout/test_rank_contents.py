# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vllm-ascend-kvext project
"""How many contents the ranks have for a layer, by what the configuration says."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from vllm_ascend_kvext.layout.rank_contents import read_rank_contents


def spec(*bases: str, **values: Any) -> Any:
    """A spec whose class has base classes of these names."""
    made: type = object
    for name in reversed(bases):
        made = type(name, (made,), {})
    found = made()
    for key, value in values.items():
        setattr(found, key, value)
    return found


LATENT = spec("MLAAttentionSpec", "FullAttentionSpec", num_kv_heads=1)
LATENT_WINDOW = spec("SlidingWindowMLASpec", "SlidingWindowSpec", num_kv_heads=1)
ONE_HEAD = spec("FullAttentionSpec", num_kv_heads=1)
ONE_HEAD_WINDOW = spec("SlidingWindowSpec", num_kv_heads=1)
TWO_HEADS = spec("FullAttentionSpec", num_kv_heads=2)
STATE = spec("MambaSpec", num_kv_heads=1)


def model(num_heads: int) -> Any:
    return SimpleNamespace(get_total_num_kv_heads=lambda: num_heads)


def contents(of: Any, num_ranks: int, num_heads: int, draft: Any = None, **config: Any) -> int:
    group = SimpleNamespace(layer_names=["layer"], kv_cache_spec=of)
    config = {
        "parallel_config": SimpleNamespace(tensor_parallel_size=num_ranks),
        "model_config": model(num_heads),
        "speculative_config": draft and SimpleNamespace(draft_model_config=draft),
    } | config
    caches = SimpleNamespace(kv_cache_groups=[group])
    return read_rank_contents(SimpleNamespace(**config), caches)["layer"]


@pytest.mark.parametrize("num_ranks", [1, 2, 4, 8, 16])
@pytest.mark.parametrize("of", [LATENT, LATENT_WINDOW])
def test_latents_are_equal_on_all_ranks(of: Any, num_ranks: int) -> None:
    assert contents(of, num_ranks, 128) == 1


@pytest.mark.parametrize(
    ("of", "num_ranks", "num_heads", "expected"),
    [
        (ONE_HEAD, 16, 2, 2),
        (ONE_HEAD_WINDOW, 16, 2, 2),
        (ONE_HEAD, 8, 1, 1),
        (ONE_HEAD, 8, 8, 8),
        # A head for each rank, and more heads than ranks.
        (TWO_HEADS, 8, 16, 8),
        # Heads that are not divided evenly.
        (ONE_HEAD, 8, 3, 8),
        # States are cut by other heads.
        (STATE, 16, 2, 16),
    ],
)
def test_ranks_have_as_many_contents_as_there_are_heads(
    of: Any, num_ranks: int, num_heads: int, expected: int
) -> None:
    assert contents(of, num_ranks, num_heads) == expected


def test_a_draft_model_with_other_heads_makes_it_unknown_whose_layers_have_how_many() -> None:
    assert contents(ONE_HEAD, 8, 2, draft=model(2)) == 2
    assert contents(ONE_HEAD, 8, 2, draft=model(4)) == 8
    assert contents(LATENT, 8, 2, draft=model(4)) == 1
