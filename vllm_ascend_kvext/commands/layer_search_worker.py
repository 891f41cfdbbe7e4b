# SPDX-License-Identifier: Apache-2.0
"""What ``check-layer`` adds to a worker of vLLM, by ``worker_extension_cls``."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

from vllm_ascend_kvext.blending.attention_keys import layers_in_order
from vllm_ascend_kvext.blending.errors import BlendingError
from vllm_ascend_kvext.blending.layer_search import CopyPrompt, found_share


class LayerSearchWorker:
    """Reads what the attention modules of a worker's model are called with."""

    model_runner: Any
    get_model: Callable[[], Any]

    def kvext_begin_copy(self, *prompt: Any) -> None:
        """The next step computes a prompt.

        Args:
            prompt: The values of a ``CopyPrompt``.

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
        """The share of each layer with full attention; see ``found_share``. None of others.

        Returns:
            By name, in the order of the model: with pipeline parallelism, of this stage's layers.

        Raises:
            BlendingError: No step has computed all of the prompt in some layer.
        """
        for name, hook in self._kvext_hooks.items():
            hook.remove()
            if self._kvext_shares[name] is None:
                raise BlendingError(
                    f"layer {name}: expected a step that computes all of a prompt, found shorter "
                    "ones or none. Leave what shortens steps out of --engine, such as "
                    "max_num_batched_tokens, and what captures or compiles the model."
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
