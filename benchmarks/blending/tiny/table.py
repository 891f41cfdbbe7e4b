# SPDX-License-Identifier: Apache-2.0
"""What blending costs the tiny models, in plain torch.

    python benchmarks/blending/tiny/table.py [--variant V] [--seed S] [--questions N] [--weights F]

Asked are facts that refer to an earlier document, eight documents in a prompt. A number is the
share of right answers. The layer whose scores choose for the question is calibrated on other
prompts.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import torch

ROOT = Path(__file__).parents[3]
sys.path[0] = str(ROOT / "benchmarks")

from blending.tiny import spans, task  # noqa: E402
from blending.tiny.model import (  # noqa: E402
    SEEDS,
    VARIANTS,
    Rows,
    Shape,
    Variant,
    Weights,
    load,
    weights_path,
)
from blending.tiny.spans import Asked, Selector  # noqa: E402

RATIOS = (0.10, 0.15, 0.25)
CALIBRATION_SEED = 1_000_000
QUESTION_SEED = 2_000_000
CALIBRATION_QUESTIONS = 256
COMPARED = (
    Selector.HEADS,
    Selector.RANDOM,
    Selector.DEVIATION,
    Selector.QUESTION,
    Selector.QUESTION_RUNS,
)


class Model:
    """A trained model and questions to it.

    Args:
        variant: Of the model.
        seed: Of the model.
        num_questions: Asked.
        folder: With the weights; None: the shipped ones.
        device: That torch runs on.
    """

    def __init__(
        self,
        variant: Variant,
        seed: int,
        num_questions: int,
        folder: Path | None = None,
        device: torch.device | None = None,
    ) -> None:
        device = device or torch.device("cpu")
        self.shape = Shape(variant)
        loaded = load(variant, seed, folder)
        self.weights: Weights = {name: each.to(device) for name, each in loaded.items()}
        self._device = device
        self._seed = seed
        self.asked, self.stored = self._ask(QUESTION_SEED, num_questions)

    def _ask(self, first_seed: int, num_questions: int) -> tuple[Asked, list[Rows]]:
        rng = np.random.default_rng(first_seed + self._seed)
        asked = spans.ask_references(rng, num_questions, self._device)
        return asked, spans.stored_rows(self.weights, self.shape, asked)

    def full(self) -> float:
        """Everything is computed."""
        everything = torch.ones_like(self.asked.tokens[:, self.asked.segments], dtype=torch.bool)
        return self._share_right(self.asked, self.stored, everything)

    def unmoved(self) -> float:
        """Plain reuse, without rotating the keys."""
        stored = spans.stored_rows(self.weights, self.shape, self.asked, moves=False)
        nothing = spans.choose(Selector.NOTHING, None, self.asked.num_documents, 0)
        return self._share_right(self.asked, stored, nothing)

    def plain(self) -> float:
        return self.blended(Selector.NOTHING, 0.0, 0)

    def calibrate(self, ratio: float = RATIOS[0]) -> list[float]:
        """By layer, the share of right answers on other prompts when its scores choose."""
        asked, stored = self._ask(CALIBRATION_SEED, CALIBRATION_QUESTIONS)
        return [
            self._blended(asked, stored, Selector.QUESTION, ratio, layer)
            for layer in range(self.shape.layers)
        ]

    def blended(self, selector: Selector, ratio: float, check_layer: int) -> float:
        return self._blended(self.asked, self.stored, selector, ratio, check_layer)

    def _blended(
        self, asked: Asked, stored: list[Rows], selector: Selector, ratio: float, layer: int
    ) -> float:
        chosen = spans.choose(
            selector,
            self._scores(asked, stored, selector, layer),
            asked.num_documents,
            round(ratio * asked.segment_tokens),
        )
        return self._share_right(asked, stored, chosen)

    def _scores(
        self, asked: Asked, stored: list[Rows], selector: Selector, layer: int
    ) -> torch.Tensor | None:
        if selector is Selector.RANDOM:
            generator = torch.Generator().manual_seed(self._seed)
            return torch.rand(len(asked.tokens), asked.segment_tokens, generator=generator)
        if selector is Selector.DEVIATION:
            layer = spans.DEVIATION_LAYER
            return spans.deviations(self.weights, self.shape, asked, stored, layer)
        if selector in (Selector.QUESTION, Selector.QUESTION_RUNS):
            return spans.question_scores(self.weights, self.shape, asked, stored, layer)
        return None

    def _share_right(self, asked: Asked, stored: list[Rows], chosen: torch.Tensor) -> float:
        logits = spans.answered(self.weights, self.shape, asked, stored, chosen)
        return (logits.argmax(dim=-1) == asked.answers).float().mean().item()


HEAD = f"{'model':10} {'n':>5} {'full':>5} {'unmoved':>8} {'plain':>6} | {'budget':>6} " + " ".join(
    f"{selector.value:>14}" for selector in COMPARED
)


@torch.inference_mode()
def lines(model: Model, name: str, ratios: Sequence[float] = RATIOS) -> list[str]:
    """Of one model."""
    by_layer = model.calibrate()
    layer = max(range(len(by_layer)), key=by_layer.__getitem__)
    ends = (
        f"{name:10} {len(model.asked.answers):5} {model.full():5.2f} {model.unmoved():8.2f} "
        f"{model.plain():6.2f} | "
    )
    found = []
    for number, ratio in enumerate(ratios):
        cells = [model.blended(selector, ratio, layer) for selector in COMPARED]
        first = ends if number == 0 else " " * (len(ends) - 2) + "| "
        found.append(first + f"{ratio:6.0%} " + " ".join(f"{cell:14.2f}" for cell in cells))
    shares = ", ".join(f"{share:.2f}" for share in by_layer)
    found.append(f"{'':10} scores of layer {layer}; by layer at {ratios[0]:.0%}: {shares}")
    return found


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--variant", action="append", choices=VARIANTS)
    parser.add_argument("--seed", action="append", type=int)
    parser.add_argument("--questions", type=int, default=512)
    parser.add_argument("--weights", type=Path, help="folder; by default the shipped ones")
    parser.add_argument("--shipped", action="store_true", help="only models with shipped weights")
    arguments = parser.parse_args()
    print(f"of {task.MOST_DOCUMENTS} documents with {task.DOCUMENT_TOKENS} tokens each\n{HEAD}")
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    for variant in arguments.variant or VARIANTS:
        for seed in arguments.seed or SEEDS[variant]:
            if arguments.shipped and not weights_path(variant, seed).is_file():
                continue
            model = Model(variant, seed, arguments.questions, arguments.weights, device)
            print(*lines(model, f"{variant}-{seed}"), sep="\n", flush=True)


if __name__ == "__main__":
    main()
