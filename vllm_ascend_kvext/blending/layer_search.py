# SPDX-License-Identifier: Apache-2.0
"""Which layer of a model finds what a question asks for.

Asked without any text: random tokens, some of which come a second time at the end. A layer that
retrieves attends from these to the tokens that followed them the first time, as induction heads do
(Olsson et al., arXiv 2209.11895)::

    ... 71 13 [52 88 40] 97 36 ............... [52 88 40]
                  '--'---'-- attended to by ----'--'--'

In SmolLM2-135M, the layer with the largest share, 18 of 30, is also the one that finds the sentence
with the answer to a question most often; so is the second, 17.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from statistics import mean
from typing import TYPE_CHECKING, Any, NamedTuple

from vllm_ascend_kvext.blending.attention_keys import layers_in_order
from vllm_ascend_kvext.blending.errors import BlendingError
from vllm_ascend_kvext.blending.question_selection import attention_scores

if TYPE_CHECKING:
    import torch

MIN_SHARE = 0.1
"""A layer that is chosen has it. In SmolLM2-135M the best one has 0.4 to 0.5, half of all less than
0.03."""

MARGIN_TOKENS = 16
"""Copied tokens do not stand so near to the beginning, or to the copy. What goes to so many first
tokens is not counted: they are attended to whatever is asked for."""


class CopyPrompt(NamedTuple):
    """A prompt that ends with a copy of ``num_copied`` of its tokens, from index ``copied`` on.

    It begins with ``num_first`` tokens that are not random.
    """

    token_ids: tuple[int, ...]
    num_first: int
    copied: int
    num_copied: int


def copy_prompt(
    rng: random.Random,
    first_ids: Sequence[int],
    vocabulary_tokens: int,
    num_tokens: int,
    num_copied_tokens: int,
) -> CopyPrompt:
    """A prompt of ``num_tokens``: ``first_ids``, random tokens, and some of these once more.

    Raises:
        BlendingError: The prompt is too short.
    """
    num_random = num_tokens - len(first_ids) - num_copied_tokens
    num_places = num_random - 2 * MARGIN_TOKENS - num_copied_tokens
    if num_copied_tokens < 1 or num_places < 1:
        raise BlendingError(
            f"prompt: expected at least {2 * MARGIN_TOKENS + 2 * num_copied_tokens + 1} tokens "
            f"behind the first {len(first_ids)}, and a copy of at least one of them, found "
            f"{num_tokens} with a copy of {num_copied_tokens}. Ask for a longer prompt."
        )
    token_ids = [*first_ids, *(rng.randrange(vocabulary_tokens) for _ in range(num_random))]
    first = len(first_ids) + MARGIN_TOKENS + rng.randrange(num_places)
    copy = token_ids[first : first + num_copied_tokens]
    return CopyPrompt((*token_ids, *copy), len(first_ids), first, num_copied_tokens)


def found_share(
    queries: torch.Tensor, keys: torch.Tensor, scale: float, prompt: CopyPrompt
) -> float:
    """How much of what a copy attends to are tokens that follow one of the original's.

    Queries and keys are those of the prompt, rotated, shape: [num_tokens, heads, head_elements].
    The share is of the attention probabilities between the first tokens and the copy.
    """
    num_tokens = len(prompt.token_ids)
    first_of_copy = num_tokens - prompt.num_copied
    scores = attention_scores(queries[first_of_copy:num_tokens], keys[:num_tokens], scale)
    followers = slice(prompt.copied + 1, prompt.copied + prompt.num_copied + 1)
    between = slice(prompt.num_first + MARGIN_TOKENS, first_of_copy)
    total = float(scores[between].sum())
    return float(scores[followers].sum()) / total if total else 0.0


def mean_shares(of_layers: Mapping[str, Sequence[float | None]]) -> dict[int, float]:
    """Means of what prompts have found, by the index of a layer among those that have pages.

    Layers come by name, in the order of the model. One without full attention has no shares, and an
    index all the same.
    """
    means = {}
    for index, shares in enumerate(of_layers.values()):
        found = [share for share in shares if share is not None]
        if found:
            means[index] = mean(found)
    return means


def best_layer(shares: Mapping[int, float]) -> int | None:
    """The layer that attends most to what is asked for; None if none of them does."""
    if not shares:
        return None
    index = max(shares, key=shares.__getitem__)
    return index if shares[index] >= MIN_SHARE else None


class LayerSearchWorker:
    """Reads what the attention modules of a worker's model are called with.

    Part of a worker of vLLM, by ``worker_extension_cls``.
    """

    model_runner: Any
    get_model: Callable[[], Any]

    def kvext_begin_copy(self, *prompt: Any) -> None:
        """The next step computes a prompt, by the values of a ``CopyPrompt``.

        Raises:
            BlendingError: The attention of some layer cannot be read.
        """
        self._kvext_hooks: dict[str, Any] = {}
        config = self.model_runner.vllm_config.compilation_config
        attention = {
            name: config.static_forward_context[name]
            for group in self.model_runner.kv_cache_config.kv_cache_groups
            for name in group.layer_names
        }
        layers = layers_in_order(self.get_model(), attention)
        self._kvext_shares: dict[str, float | None] = dict.fromkeys(layers)
        for name, module in layers.items():
            if getattr(module, "sliding_window", None):
                continue
            scale = getattr(getattr(module, "impl", None), "scale", None)
            if not isinstance(scale, float) or getattr(module, "kv_lora_rank", None) is not None:
                raise BlendingError(
                    f"layer {name}: expected an attention module that is called with queries and "
                    f"keys, found {type(module).__qualname__}. Set blend_check_layer by hand."
                )
            note = partial(_note, self._kvext_shares, CopyPrompt(*prompt), name, scale)
            self._kvext_hooks[name] = module.register_forward_pre_hook(note, with_kwargs=True)

    def kvext_end_copy(self) -> dict[str, float | None]:
        """The share of each layer with full attention by name, in order; None of other layers.

        Raises:
            BlendingError: No step has computed all of the prompt in some layer.
        """
        for name, hook in self._kvext_hooks.items():
            hook.remove()
            if self._kvext_shares[name] is None:
                raise BlendingError(
                    f"layer {name}: expected a step that computes all of a prompt, found shorter "
                    "ones or none. Leave out what shortens steps, such as "
                    "--max-num-batched-tokens."
                )
        return self._kvext_shares


def _note(
    shares: dict[str, float | None],
    prompt: CopyPrompt,
    name: str,
    scale: float,
    module: Any,
    inputs: tuple[Any, ...],
    keywords: Mapping[str, Any],
) -> None:
    """A layer is about to compute its attention."""
    queries, keys = (
        inputs[place] if len(inputs) > place else keywords[keyword]
        for place, keyword in enumerate(("query", "key"))
    )
    if len(queries) < len(prompt.token_ids):
        return  # a step that is not the prompt's
    queries, keys = (each.reshape(len(each), -1, module.head_size) for each in (queries, keys))
    shares[name] = found_share(queries, keys, scale, prompt)
