# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vllm-ascend-kvext project
"""Compares questions with the keys of segments while a worker's model computes.

The attention implementation of one layer is watched. When it is called, the layer's keys have been
written. A compiled model calls it as an eager model does: vLLM calls it in an operator that the
compiler does not look into (``vllm.model_executor.layers.attention``). This module does not import
vLLM.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from vllm_ascend_kvext.errors import BlendingError, ConnectorError
from vllm_ascend_kvext.segments.keys.attention_keys import LayerKeys
from vllm_ascend_kvext.segments.keys.rotary import torch_dtype
from vllm_ascend_kvext.segments.messages import ProbeJob
from vllm_ascend_kvext.segments.question_selection import Scores, attention_scores
from vllm_ascend_kvext.segments.token_rows import TokenPages, slots_of

if TYPE_CHECKING:
    import torch

logger = logging.getLogger("vllm.ascend_kvext.segments")

CHECK_DEPTH = 3, 5
"""The default depth of the check layer, as a fraction of the model's layers. Of the 30 layers of
SmolLM2-135M, layer 18 is by far the best at finding the answer to a question."""


@dataclass(frozen=True, slots=True)
class CheckLayer:
    """The layer at which questions are compared, and the scale of its attention's products.

    ``impl`` is vLLM's ``AttentionImpl``. Its ``forward`` takes the module first, and then queries.
    """

    name: str
    impl: Any
    scale: float


def check_layer_of(
    compilation: Any, layers: Mapping[str, LayerKeys], index: int | None
) -> CheckLayer:
    """Choose the check layer. ``layers`` are layers with own pages, in the model's order.

    ``index`` is the place of the check layer among ``layers``. If it is None, the layer with full
    attention that is nearest to `CHECK_DEPTH` is chosen. ``compilation`` is vLLM's
    ``CompilationConfig``.

    Raises:
        BlendingError: Questions cannot be compared in this model, or not at this layer.
    """
    names = list(layers)
    full = [
        place
        for place, name in enumerate(names)
        # Latents cannot be compared with queries as they are passed to the attention.
        if not layers[name].window_tokens and layers[name].has_values
    ]
    if index is None:
        if not full:
            raise BlendingError(
                "segments: selector: question: expected a layer with full attention and keys of "
                f"its own, found windows or latents in all {len(names)}. Set selector to heads."
            )
        wanted = CHECK_DEPTH[0] * len(names) // CHECK_DEPTH[1]
        index = min(full, key=lambda place: abs(place - wanted))
    if index not in full:
        raise BlendingError(
            f"segments: check_layer: expected one of the layers with full attention, {full}, found "
            f"{index}. Correct it, or leave it out for the default."
        )
    attention = compilation.static_forward_context[names[index]]
    _check_is_called(compilation, attention)
    scale = getattr(getattr(attention, "impl", None), "scale", None)
    if not isinstance(scale, float):
        raise BlendingError(
            f"layer {names[index]}: expected an attention module with a scale, found "
            f"{type(attention).__qualname__} with {scale!r}. Set selector to heads."
        )
    return CheckLayer(names[index], attention.impl, scale)


def _check_is_called(compilation: Any, attention: Any) -> None:
    """Refuse models that do not call the attention implementation in steps that compute prompts."""
    if compilation.mode and getattr(attention, "use_direct_call", False):
        raise BlendingError(
            "segments: selector: question: expected attention that is not compiled with the model, "
            "so that queries can be read while it runs, found compilation mode "
            f"{compilation.mode!s}. Serve with --enforce-eager, or set selector to heads."
        )
    captured = compilation.cudagraph_mode
    if captured is not None and captured.mixed_mode().name == "FULL":
        raise BlendingError(
            "segments: selector: question: expected attention of prompts that no graph captures, "
            f"so that queries can be read while it runs, found cudagraph_mode {captured!s}. Set "
            "it to FULL_AND_PIECEWISE or PIECEWISE, serve with --enforce-eager, or set "
            "selector to heads."
        )


class QuestionProbe:
    """The probes of one worker at one layer. The model's thread calls all methods.

    ``slots_of_step`` returns the slots of the tokens that the layer is computing, in their order.
    Negative slots belong to no token. A reset replaces ``pages`` by other pages with the same rows.
    """

    def __init__(
        self, layer: CheckLayer, pages: TokenPages, slots_of_step: Callable[[], torch.Tensor]
    ) -> None:
        self._layer = layer
        self._slots_of_step = slots_of_step
        self._jobs: tuple[ProbeJob, ...] = ()
        self._scores: dict[str, Scores] = {}
        self.pages = pages
        self._plane = next(
            index
            for index, plane in enumerate(pages.planes)
            if plane.layer_name == layer.name and plane.keys is not None
        )
        self._compute = layer.impl.forward
        layer.impl.forward = self._compute_and_see

    def begin_step(self, jobs: Sequence[ProbeJob]) -> None:
        """The next forward computes the rows of these probes."""
        self._jobs = tuple(jobs)
        self._scores = {}

    def end_step(self) -> dict[str, Scores | None]:
        """The scores since `begin_step`, by row; None for a row that was not compared."""
        jobs = self._jobs
        self._jobs = ()
        return {job.row_id: self._scores.get(job.row_id) for job in jobs}

    def shutdown(self) -> None:
        """Stop watching the layer. Idempotent."""
        watched = vars(self._layer.impl)
        if watched.get("forward") == self._compute_and_see:  # A later probe may watch it now.
            del watched["forward"]

    def _compute_and_see(self, module: Any, query: torch.Tensor, *others: Any, **more: Any) -> Any:
        output = self._compute(module, query, *others, **more)
        if self._jobs:
            try:
                self._compare(query)
            except Exception:  # Other requests need this forward. The row has no scores then.
                logger.exception("A question was not compared with its segments")
        return output

    def _compare(self, queries: torch.Tensor) -> None:
        import torch

        pages = self.pages
        plane = pages.planes[self._plane]
        tokens_per_page = pages.tokens_per_page[plane.group]
        slots_of_step = self._slots_of_step().cpu().numpy()
        order = np.argsort(slots_of_step, kind="stable")
        heads = queries.reshape(len(queries), -1, plane.head_elements)
        for job in self._jobs:
            table = job.block_ids[plane.group]
            of_pages = table, tokens_per_page, pages.num_pages
            what = f"probe {job.row_id}"
            own = slots_of(what, job.tokens.first_tokens, job.tokens.end_tokens, *of_pages)
            places = np.searchsorted(slots_of_step, own, sorter=order)
            rows = order[np.minimum(places, len(order) - 1)]
            if not np.array_equal(slots_of_step[rows], own):
                raise ConnectorError(
                    f"probe {job.row_id}: expected a row of this step, found tokens that it does "
                    "not compute. The scheduler has to plan rows and probes for the same step."
                )
            slots = slots_of(what, 0, job.tokens.end_tokens, *of_pages)
            stored = pages.read_plane(self._plane, slots)
            keys = (
                torch.from_numpy(stored)
                .view(torch_dtype(plane.dtype))
                .reshape(len(slots), plane.num_heads, plane.head_elements)
            )
            of_row = heads[torch.from_numpy(rows).to(heads.device)]
            scores = attention_scores(of_row, keys.to(heads.device), self._layer.scale)
            scores = scores.cpu().numpy()
            self._scores[job.row_id] = np.concatenate(
                [scores[each.first_tokens : each.end_tokens] for each in job.scored]
            )
