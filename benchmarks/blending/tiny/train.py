# SPDX-License-Identifier: Apache-2.0
"""Train the tiny models.

    python benchmarks/blending/tiny/train.py [--variant V] [--seed S] [--out FOLDER]

Options may be repeated; left out, they stand for all variants and their seeds. First the model
learns to copy: random tokens that repeat, until 9 in 10 of what can be known are right. Without
that it never learns the task. Then the task, from one document to eight: one more whenever 98 % of
the answers are right.

A model that has not learned eight documents in `MOST_STEPS` is given up. Those that take longer
spread what a reference refers to over several tokens, or look references up when they are asked;
blending then damages something else than one token. Of the seeds 0 to 5, three with full attention
learn it in time (2, 3, 5), and three with MLA (2, 4, 5); with windows all of 0 to 2 do.

On a CPU a model takes from four minutes on; on a GPU, which is used where torch finds one, one. The
weights differ from one kind of machine to the other.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Iterator, Mapping
from pathlib import Path

import numpy as np
import torch
from torch.nn import functional

ROOT = Path(__file__).parents[3]
# Instead of this folder, whose modules are not to be found by their short names.
sys.path[0] = str(ROOT / "benchmarks")

from blending.tiny import task  # noqa: E402
from blending.tiny.model import SEEDS, VARIANTS, Shape, Variant, forward, initial_weights  # noqa: E402

BATCH = 64
QUESTIONS_PER_PROMPT = 8
PERIODS = (8, 64)
COPIED_TOKENS = 128
MOST_STEPS: Mapping[Variant, int] = {"full": 1100, "window": 1100, "mla": 1400}
LAST_STEPS = 400
"""With all documents, after the last one was learned; the learning rate falls to nothing."""

NOTHING = -100
"""Where nothing is to be predicted."""

COPIES = 0.90
ANSWERS = 0.98
LEARNING_RATE = 3e-3
WARM_UP_STEPS = 50


class Trainer:
    """One model.

    Args:
        variant: How its layers attend.
        seed: Of its weights and its data.
        device: That torch runs on.
    """

    def __init__(self, variant: Variant, seed: int, device: torch.device) -> None:
        self.shape = Shape(variant)
        self._rng = np.random.default_rng(seed)
        self._device = device
        initial = initial_weights(self.shape, seed)
        self.weights = {name: each.to(device).requires_grad_() for name, each in initial.items()}
        matrices = [each for each in self.weights.values() if each.dim() > 1]
        norms = [each for each in self.weights.values() if each.dim() == 1]
        self._optimizer = torch.optim.AdamW(
            [{"params": matrices, "weight_decay": 0.01}, {"params": norms, "weight_decay": 0.0}],
            betas=(0.9, 0.98),
        )
        self.num_steps = 0

    def step(self, tokens: np.ndarray, wanted: np.ndarray, factor: float) -> float:
        """Train on some tokens, given all before them.

        Args:
            tokens: Shape: [prompts, tokens].
            wanted: What each token is to predict, or `NOTHING`, shape: [prompts, tokens].
            factor: On the learning rate.

        Returns:
            The share of the predictions that came out right.
        """
        logits = forward(self.weights, self.shape, torch.from_numpy(tokens).to(self._device)).logits
        assert logits is not None
        labels = torch.from_numpy(wanted).to(self._device)
        loss = functional.cross_entropy(
            logits.flatten(0, 1), labels.flatten(), ignore_index=NOTHING
        )
        self._optimizer.zero_grad(set_to_none=True)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(self.weights.values(), 1.0)
        warm_up = min(1.0, (self.num_steps + 1) / WARM_UP_STEPS)
        for group in self._optimizer.param_groups:
            group["lr"] = LEARNING_RATE * warm_up * factor
        self._optimizer.step()
        self.num_steps += 1
        is_right = logits.argmax(dim=-1) == labels
        return (is_right.sum() / (labels != NOTHING).sum()).item()

    def copy(self, factor: float = 1.0) -> float:
        tokens, is_told = task.make_repeats(self._rng, BATCH, PERIODS, COPIED_TOKENS)
        wanted = np.full_like(tokens, NOTHING)
        wanted[:, :-1] = np.where(is_told, tokens, NOTHING)[:, 1:]
        return self.step(tokens, wanted, factor)

    def answer(self, num_documents: int, factor: float = 1.0) -> float:
        prompts = task.make_prompts(self._rng, BATCH, num_documents)
        return self.step(*asked(self._rng, prompts), factor)


def asked(rng: np.random.Generator, prompts: task.Prompts) -> tuple[np.ndarray, np.ndarray]:
    """Prompts with several questions and their answers, for `Trainer.step`."""
    num_prompts, num_facts = prompts.keys.shape
    num_questions = min(QUESTIONS_PER_PROMPT, num_facts)
    chosen = rng.random((num_prompts, num_facts)).argsort(axis=1)[:, :num_questions]
    keys = np.take_along_axis(prompts.keys, chosen, 1)
    answers = np.take_along_axis(prompts.answers, chosen, 1)
    questions = np.stack([np.full_like(keys, task.ASK), keys, answers], axis=2)
    contexts = prompts.contexts
    tokens = np.concatenate([contexts, questions.reshape(num_prompts, -1)], axis=1)
    wanted = np.full_like(tokens, NOTHING)
    wanted[:, contexts.shape[1] + 1 :: 3] = answers
    return tokens, wanted


def train(variant: Variant, seed: int, device: torch.device) -> Iterator[str]:
    """Lines about the progress; the last value of the generator is the trainer.

    Raises:
        RuntimeError: The model has not learned it in `MOST_STEPS`.
    """
    trainer = Trainer(variant, seed, device)
    right = 0.0
    while right < COPIES:
        right = 0.9 * right + 0.1 * trainer.copy()
        _refuse_too_many(trainer, "copying")
    yield f"copies after {trainer.num_steps} steps"
    for num_documents in range(1, task.MOST_DOCUMENTS + 1):
        right = 0.0
        while right < ANSWERS:
            right = 0.9 * right + 0.1 * trainer.answer(num_documents)
            _refuse_too_many(trainer, f"{num_documents} documents")
        yield f"{num_documents} documents after {trainer.num_steps} steps"
    for step in range(LAST_STEPS):
        right = 0.95 * right + 0.05 * trainer.answer(task.MOST_DOCUMENTS, 1 - step / LAST_STEPS)
    yield f"{right:.1%} of the answers right after {trainer.num_steps} steps"
    return trainer


def _refuse_too_many(trainer: Trainer, what: str) -> None:
    most_steps = MOST_STEPS[trainer.shape.variant]
    if trainer.num_steps > most_steps:
        raise RuntimeError(
            f"{trainer.shape.variant}: {what} not learned in {most_steps} steps; try another seed"
        )


def save(trainer: Trainer, path: Path) -> None:
    from safetensors.torch import save_file

    path.parent.mkdir(parents=True, exist_ok=True)
    found = {name: each.detach().cpu().half() for name, each in trainer.weights.items()}
    save_file(found, path, metadata={"format": "pt"})


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--variant", action="append", choices=VARIANTS)
    parser.add_argument("--seed", action="append", type=int)
    parser.add_argument("--out", type=Path, default=Path(__file__).parent / "weights")
    arguments = parser.parse_args()
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    for variant in arguments.variant or VARIANTS:
        for seed in arguments.seed or SEEDS[variant]:
            began_s = time.monotonic()
            progress = train(variant, seed, device)
            while True:
                try:
                    line = next(progress)
                except StopIteration as end:
                    save(end.value, arguments.out / f"{variant}-{seed}.safetensors")
                    break
                print(f"{variant}-{seed} [{time.monotonic() - began_s:.0f} s] {line}", flush=True)


if __name__ == "__main__":
    main()
