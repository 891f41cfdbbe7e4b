# SPDX-License-Identifier: Apache-2.0
"""How the tiny models are served by the engine, and what each mode recomputes, for plain torch."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch

from blending.modes import FULL, PREFIX_CACHING, Mode
from blending.tiny import spans
from blending.tiny.model import WINDOW_TOKENS, Variant

Choose = Callable[[torch.Tensor], torch.Tensor]
"""From the question's scores of the documents' tokens, shape: [prompts, tokens], to those that are
recomputed, shape: the same, or [1, tokens] where all prompts are alike."""

QUESTION_RATIO = 0.10
COMMON_OPTIONS: Mapping[str, Any] = {
    # Documents are short.
    "blend_min_tokens": 1,
    "blend_across_windows": True,
}


@dataclass(frozen=True, slots=True)
class ServedMode:
    """One way to serve.

    Attributes:
        mode: For the engine.
        choose: The tokens of the documents that are recomputed.
        variants: Of models that it is for.
    """

    mode: Mode
    choose: Choose
    variants: tuple[Variant, ...] = ("full", "window")

    def at_layer(self, check_layer: int) -> ServedMode:
        """With the layer at which questions are compared, where they are."""
        options = self.mode.options
        if options is None or options["blend_selector"] != "question":
            return self
        told = {**options, "blend_check_layer": check_layer}
        return replace(self, mode=replace(self.mode, options=told))

    @property
    def check_layer(self) -> int | None:
        """None: questions are not compared."""
        options = self.mode.options
        return None if options is None else options.get("blend_check_layer")


def _everything(scores: torch.Tensor) -> torch.Tensor:
    return torch.ones(1, scores.shape[1], dtype=torch.bool)


def _heads(name: str, head_tokens: int) -> ServedMode:
    options = {**COMMON_OPTIONS, "blend_selector": "heads", "blend_head_tokens": head_tokens}
    return ServedMode(Mode(name, options=options), _choose_heads(head_tokens))


def _choose_heads(head_tokens: int) -> Choose:
    def choose(scores: torch.Tensor) -> torch.Tensor:
        return spans.heads_of_each(spans.num_documents(scores), head_tokens)

    return choose


def _question(run_tokens: int) -> ServedMode:
    def choose(scores: torch.Tensor) -> torch.Tensor:
        num_documents = spans.num_documents(scores)
        return spans.runs_of_each(scores, num_documents, QUESTION_RATIO, run_tokens)

    options = {
        **COMMON_OPTIONS,
        "blend_selector": "question",
        "blend_head_tokens": 0,
        "blend_ratio": QUESTION_RATIO,
        "blend_run_tokens": run_tokens,
    }
    name = f"question {QUESTION_RATIO:.0%}, runs of {run_tokens}"
    return ServedMode(Mode(name, options=options), choose)


def _behind_windows() -> ServedMode:
    """The default for models with windows: what a window reads across a border is computed."""
    options = {
        **COMMON_OPTIONS,
        "blend_selector": "heads",
        "blend_head_tokens": 0,
        "blend_across_windows": False,
    }
    mode = Mode("heads as long as windows", options=options)
    return ServedMode(mode, _choose_heads(WINDOW_TOKENS - 1), ("window",))


SERVED_MODES: tuple[ServedMode, ...] = (
    ServedMode(FULL, _everything),
    ServedMode(PREFIX_CACHING, _everything),
    _heads("plain reuse", 0),
    _heads("heads 2", 2),
    _heads("heads 4", 4),
    _question(4),
    _heads("heads 7", 7),
    _question(8),
    _behind_windows(),
)
"""Next to each other: those that compute about as many tokens. A document has 15."""
