# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vllm-ascend-kvext project
"""Which ranks have the same KV."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from vllm_ascend_kvext.shared_tier.engine_identity import num_equal_ranks

LATENT, HEADS = SimpleNamespace(use_mla=True), SimpleNamespace(use_mla=False)


@pytest.mark.parametrize(
    ("model", "draft", "has_states", "expected"),
    [
        (LATENT, None, False, 4),
        (LATENT, LATENT, False, 4),
        (LATENT, HEADS, False, 1),
        (LATENT, None, True, 1),
        (HEADS, None, False, 1),
    ],
    ids=["latent", "latent draft", "draft with heads", "recurrent states", "heads"],
)
def test_ranks_are_equal_where_all_layers_have_a_latent(
    model: Any, draft: Any, has_states: bool, expected: int
) -> None:
    config = SimpleNamespace(
        model_config=model,
        parallel_config=SimpleNamespace(tensor_parallel_size=4),
        speculative_config=draft and SimpleNamespace(draft_model_config=draft),
    )
    groups: Any = [SimpleNamespace(is_snapshot=False), SimpleNamespace(is_snapshot=has_states)]
    assert num_equal_ranks(config, groups) == expected
