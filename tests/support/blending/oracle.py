# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vllm-ascend-kvext project
"""Computes a blended prompt in plain torch. The module knows neither vLLM nor the package.

The models are those of transformers. Only their attention is replaced: ours keeps keys and values
by position, and does the masking itself. A blended prompt takes three passes::

    each segment behind   sink, segment     at positions 0, 1, ...; its keys and values are kept
    rotation              kept keys         turned back to position 0, and to where they are reused
    the prompt            what is computed  at its positions, in one pass: each token sees all that
                                            is reused or computed before it, within its window

Rotations and attention are computed in float64, all else in float32.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import torch
from transformers import AttentionInterface, AutoModelForCausalLM

_ATTENTION = "keys and values by position"


@dataclass(slots=True)
class _Rows:
    """The rows of one layer, by position. The rows of some tokens are not known.

    Shape of the rotated keys and of the values: [key heads, tokens, head elements]. dtype: float64.
    Shape of ``are_known``: [tokens].
    """

    keys: torch.Tensor
    values: torch.Tensor
    are_known: torch.Tensor


class Reused(NamedTuple):
    """Tokens of a prompt whose keys and values come from a ``segment`` that was computed alone.

    The segment is given by its first and end token in the prompt. ``num_before`` segments precede
    it.
    """

    first_tokens: int
    end_tokens: int
    segment: tuple[int, int]
    num_before: int = 0


class _Turns(NamedTuple):
    """The rotations of one layer. dtype: float64, shape: [positions, pairs]."""

    cosines: torch.Tensor
    sines: torch.Tensor


class Oracle:
    """One model. A prompt with its reply has at most ``max_tokens``.

    ``sinks`` are pairs: a number of documents, and tokens. They ascend by the number. A segment is
    computed behind the first sink with at least as many documents as stand before the segment in
    the prompt. If there is no such sink, it is computed behind the last one.
    """

    def __init__(
        self, folder: Path, sinks: Sequence[tuple[int, Sequence[int]]], max_tokens: int
    ) -> None:
        AttentionInterface.register(_ATTENTION, _attend)
        self._model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
        self._model.set_attn_implementation(_ATTENTION)
        self._sinks = [(num_documents, list(sink_ids)) for num_documents, sink_ids in sinks]
        self._layers = [layer.self_attn for layer in self._model.model.layers]
        self._behind: dict[tuple[int, ...], list[_Rows]] = {}
        self._turns = self._read_turns(max_tokens)

    def log_probabilities(
        self, prompt: Sequence[int], reply: Sequence[int], reused: Sequence[Reused] = ()
    ) -> torch.Tensor:
        """The log-probabilities of each token of a given reply, and of all other tokens in its
        place.

        The ``reused`` tokens are disjoint. All other tokens are computed, except for the last token
        of the reply.

        Returns:
            dtype: float32, shape: [reply tokens, vocabulary].
        """
        logits = self._compute_missing([*prompt, *reply[:-1]], reused)
        return torch.log_softmax(logits[-len(reply) :].float(), dim=-1)

    def scores(
        self, prompt: Sequence[int], reused: Sequence[Reused], num_asked: int, layer: int
    ) -> torch.Tensor:
        """How much the last tokens of a prompt attend to each token at a layer, summed over all
        heads.

        Returns:
            dtype: float64, shape: [prompt tokens].
        """
        self._compute_missing(prompt, reused)
        found: torch.Tensor = self._layers[layer].weights[:, -num_asked:].sum(dim=(0, 1))
        return found

    def _compute_missing(self, token_ids: Sequence[int], reused: Sequence[Reused]) -> torch.Tensor:
        rows = self._no_rows(len(token_ids))
        for each in reused:
            self._place(rows, token_ids, each)
        missing = (~rows[0].are_known).nonzero().flatten()
        return self._compute(torch.tensor(token_ids)[missing], missing, rows)

    def _place(self, rows: Sequence[_Rows], prompt: Sequence[int], reused: Reused) -> None:
        first, end = reused.segment
        sink_ids = next(
            (tokens for number, tokens in self._sinks if number >= reused.num_before),
            self._sinks[-1][1],
        )
        segment = self._compute_behind(sink_ids, prompt[first:end])
        new = torch.arange(reused.first_tokens, reused.end_tokens)
        old = new - first + len(sink_ids)
        for of_prompt, of_segment, turns in zip(rows, segment, self._turns, strict=True):
            of_prompt.keys[:, new] = _turned(
                _turned(of_segment.keys[:, old], turns, old, is_back=True), turns, new
            )
            of_prompt.values[:, new] = of_segment.values[:, old]
            of_prompt.are_known[new] = True

    def _compute_behind(self, sink_ids: Sequence[int], token_ids: Sequence[int]) -> list[_Rows]:
        """Compute a segment behind a sink, from position 0 on."""
        key = (*sink_ids, *token_ids)
        if key not in self._behind:
            rows = self._no_rows(len(key))
            self._compute(torch.tensor(key), torch.arange(len(key)), rows)
            self._behind[key] = rows
        return self._behind[key]

    def _no_rows(self, num_tokens: int) -> list[_Rows]:
        heads = self._model.config.num_key_value_heads
        shapes = [(heads, num_tokens, layer.head_dim) for layer in self._layers]
        return [
            _Rows(
                torch.full(shape, torch.nan, dtype=torch.float64),
                torch.full(shape, torch.nan, dtype=torch.float64),
                torch.zeros(num_tokens, dtype=torch.bool),
            )
            for shape in shapes
        ]

    @torch.no_grad()
    def _compute(
        self, token_ids: torch.Tensor, positions: torch.Tensor, rows: Sequence[_Rows] | None
    ) -> torch.Tensor:
        """Compute one pass. Keys and values go to ``rows``.

        Without ``rows``, no token sees another.
        """
        for index, layer in enumerate(self._layers):
            layer.positions = positions
            layer.rows = None if rows is None else rows[index]
        found = self._model(
            input_ids=token_ids[None], position_ids=positions[None], use_cache=False
        )
        logits: torch.Tensor = found.logits[0]
        return logits

    def _read_turns(self, num_positions: int) -> list[_Turns]:
        """The rotations of queries and keys that the model passes to its layers."""
        turns: list[_Turns] = []

        def keep(module: Any, args: Any, named: dict[str, Any]) -> None:
            cosines, sines = (each[0].double() for each in named["position_embeddings"])
            half = cosines.shape[-1] // 2
            if torch.equal(
                cosines[:, :half], cosines[:, half:]
            ):  # Cosines repeat for each half of a head.
                cosines = cosines[:, :half]
                sines = sines[:, :half]
            turns.append(_Turns(cosines, sines))

        hooks = [layer.register_forward_pre_hook(keep, with_kwargs=True) for layer in self._layers]
        self._compute(torch.ones(num_positions, dtype=int), torch.arange(num_positions), None)
        for hook in hooks:
            hook.remove()
        return turns


def _turned(
    keys: torch.Tensor, turns: _Turns, positions: torch.Tensor, is_back: bool = False
) -> torch.Tensor:
    """Rotate keys by their positions, or rotate them back to position 0.

    The two halves of a head form pairs. If the model scales cosines and sines, the factor stays.
    """
    cosines = turns.cosines[positions]
    sines = turns.sines[positions]
    length = (cosines**2 + sines**2).sqrt()
    cosines = cosines / length
    sines = sines / length
    if is_back:
        sines = -sines
    pairs = cosines.shape[-1]
    left, right, rest = keys.split([pairs, pairs, keys.shape[-1] - 2 * pairs], dim=-1)
    return torch.cat([left * cosines - right * sines, right * cosines + left * sines, rest], dim=-1)


def _attend(
    module: Any,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    *,
    scaling: float,
    sliding_window: int | None = None,
    s_aux: torch.Tensor | None = None,
    **more: Any,
) -> tuple[torch.Tensor, None]:
    """The attention function that transformers calls. shapes: [1, heads, tokens, head elements].

    Returns:
        shape: [1, tokens, heads, head elements].
    """
    rows: _Rows | None = module.rows
    if rows is None:
        return torch.zeros_like(query).transpose(1, 2), None
    positions = module.positions
    rows.keys[:, positions] = key[0].double()
    rows.values[:, positions] = value[0].double()
    rows.are_known[positions] = True
    seen = torch.arange(len(rows.are_known))
    is_seen = seen <= positions[:, None]
    if sliding_window is not None:
        is_seen &= seen > positions[:, None] - sliding_window
    assert rows.are_known[is_seen.any(dim=0)].all()
    heads_per_key = query.shape[1] // key.shape[1]
    keys = rows.keys.repeat_interleave(heads_per_key, dim=0)
    values = rows.values.repeat_interleave(heads_per_key, dim=0)
    scores = query[0].double() @ keys.transpose(1, 2) * scaling
    scores = scores.masked_fill(~is_seen, -torch.inf)
    if s_aux is not None:
        sinks = s_aux.double()[:, None, None].expand(-1, len(positions), 1)
        scores = torch.cat([scores, sinks], dim=-1)
    module.weights = weights = scores.softmax(dim=-1)[..., : len(seen)]
    return (weights @ values.nan_to_num()).to(query.dtype).transpose(0, 1)[None], None
