# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vllm-ascend-kvext project
"""transformers' DeepSeek-V4 in float32, rounding where vllm-ascend rounds on an A2.

vllm-ascend rounds keys where it stores them. The keys of attention become bfloat16. The keys and
the queries of the indexer become 8-bit integers after a Hadamard transform.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from scipy.linalg import hadamard
from torch import Tensor
from transformers import AutoConfig, AutoModelForCausalLM
from transformers.models.deepseek_v4 import modeling_deepseek_v4 as modeling

ROWS_AT_A_TIME = 64


class Reference:
    """A model of transformers.

    Args:
        has_yarn_everywhere: Whether layers without a compressor are rotated by YaRN too. DeepSeek
            does not rotate these layers so; vllm-ascend does (``models/deepseek_v4.py``: one
            ``scaling_factor`` for all layers).
        index_topk: The largest number of compressed keys that a token reads; it replaces the
                config's number.
    """

    def __init__(
        self,
        folder: Path,
        patch: pytest.MonkeyPatch,
        *,
        has_yarn_everywhere: bool = True,
        index_topk: int | None = None,
    ) -> None:
        patch.setattr(modeling, "eager_attention_forward", _attend_to_rounded(modeling))
        patch.setattr(modeling.DeepseekV4IndexerScorer, "forward", _quantized_scores)
        config = AutoConfig.from_pretrained(folder)
        ropes = config.rope_parameters
        if has_yarn_everywhere:
            ropes["main"] = {**ropes["compress"], "rope_theta": ropes["main"]["rope_theta"]}
        if index_topk is not None:
            config.index_topk = index_topk
        self._model = AutoModelForCausalLM.from_pretrained(
            folder,
            config=config,
            dtype=torch.float32,
            attn_implementation="eager",
            experts_implementation="eager",
        ).eval()

    @torch.no_grad()
    def logprobs(self, prompt: Sequence[int], reply: Sequence[int]) -> Tensor:
        """The log-probability of every token at each step of a reply.

        The shape is ``[steps, vocabulary]``.
        """
        logits = self._model(torch.tensor([[*prompt, *reply]]), use_cache=False).logits[0]
        return logits[len(prompt) - 1 : -1].log_softmax(-1)


def _attend_to_rounded(module: Any) -> Any:
    attend = module.eager_attention_forward

    def attend_to_rounded(
        layer: Any, query: Tensor, key: Tensor, value: Tensor, *args: Any, **more: Any
    ) -> Any:
        stored = key.bfloat16().to(key.dtype)
        return attend(layer, query, stored, stored, *args, **more)

    return attend_to_rounded


def _quantized_scores(scorer: Any, query: Tensor, keys: Tensor, hidden_states: Tensor) -> Tensor:
    weights = scorer.weights_proj(hidden_states) * scorer.softmax_scale * scorer.weights_scaling
    query, query_scale = _quantized(query)
    keys, key_scale = _quantized(keys)
    factors = (weights.half() * query_scale).float()
    scores = []
    for first in range(0, query.shape[1], ROWS_AT_A_TIME):
        rows = slice(first, first + ROWS_AT_A_TIME)
        by_head = torch.matmul(query[:, rows], keys.transpose(-1, -2).unsqueeze(1)).relu()
        scores.append((by_head * factors[:, rows].unsqueeze(-1)).sum(2))
    return torch.cat(scores, 1) * key_scale.float().unsqueeze(1)


def _quantized(x: Tensor) -> tuple[Tensor, Tensor]:
    size = x.shape[-1]
    turned = x @ torch.tensor(hadamard(size), dtype=x.dtype) * size**-0.5
    scale = turned.abs().amax(-1, keepdim=True) / 127
    return (turned / scale).round(), scale.squeeze(-1).half()
