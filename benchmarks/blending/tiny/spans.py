# SPDX-License-Identifier: Apache-2.0
"""A blended prompt in plain torch: rows of documents computed alone, moved, and in part recomputed.

What is recomputed is chosen before the forward, as a mask of tokens. The forward then computes the
chosen tokens and the question in one pass; every token reads stored rows of what is not chosen.
"""

from __future__ import annotations

import enum
from dataclasses import dataclass

import numpy as np
import torch

from blending.tiny import task
from blending.tiny.model import Rows, Shape, Weights, forward

SINK_TOKENS = 1
"""The beginning-of-sequence token, behind which a document is computed alone."""


class Selector(enum.Enum):
    """What is recomputed of the documents."""

    NOTHING = "plain reuse"
    HEADS = "heads"
    RANDOM = "random"
    DEVIATION = "deviation"
    QUESTION = "question"
    QUESTION_RUNS = "question, runs"


RUN_TOKENS = 4
DEVIATION_LAYER = 1


@dataclass(frozen=True, slots=True)
class Asked:
    """Prompts with one question each.

    Attributes:
        tokens: Sink, documents, question, shape: [prompts, tokens].
        answers: Shape: [prompts].
        num_documents: In each prompt.
    """

    tokens: torch.Tensor
    answers: torch.Tensor
    num_documents: int

    @property
    def segment_tokens(self) -> int:
        return self.num_documents * task.DOCUMENT_TOKENS

    @property
    def segments(self) -> slice:
        """Tokens of the documents."""
        return slice(SINK_TOKENS, SINK_TOKENS + self.segment_tokens)

    def always_fresh(self) -> torch.Tensor:
        """Sink and question, shape: [prompts, tokens]."""
        is_fresh = torch.ones_like(self.tokens, dtype=torch.bool)
        is_fresh[:, self.segments] = False
        return is_fresh


def ask_references(rng: np.random.Generator, num_prompts: int, device: torch.device) -> Asked:
    """Eight documents, and a question about a fact that refers to an earlier one."""
    prompts = task.make_prompts(rng, num_prompts, task.MOST_DOCUMENTS)
    has_reference = prompts.is_reference.any(axis=1)
    chosen = np.where(prompts.is_reference, rng.random(prompts.keys.shape), -1.0).argmax(axis=1)
    rows = np.arange(num_prompts)
    keys, answers = prompts.keys[rows, chosen], prompts.answers[rows, chosen]
    questions = np.stack([np.full_like(keys, task.ASK), keys], axis=1)
    tokens = np.concatenate([prompts.contexts, questions], axis=1)[has_reference]
    return Asked(
        torch.from_numpy(tokens).to(device),
        torch.from_numpy(answers[has_reference]).to(device),
        task.MOST_DOCUMENTS,
    )


def stored_rows(weights: Weights, shape: Shape, asked: Asked, *, moves: bool = True) -> list[Rows]:
    """Rows of each layer: every document computed alone behind the sink, at its place.

    Args:
        weights: Of the model.
        shape: Of the model.
        asked: The prompts. Rows of sink and question are zeros.
        moves: Whether keys are rotated to their new positions.
    """
    documents = asked.tokens[:, asked.segments].reshape(-1, task.DOCUMENT_TOKENS)
    sink = torch.full_like(documents[:, :SINK_TOKENS], task.BOS)
    alone = forward(weights, shape, torch.cat([sink, documents], dim=1)).rows
    numbers = torch.arange(asked.num_documents, device=documents.device)
    by_tokens = (numbers * task.DOCUMENT_TOKENS).repeat_interleave(task.DOCUMENT_TOKENS)
    return [
        _placed(rows, asked, by_tokens if moves else torch.zeros_like(by_tokens)) for rows in alone
    ]


def _placed(alone: Rows, asked: Asked, by_tokens: torch.Tensor) -> Rows:
    num_prompts, num_tokens = asked.tokens.shape
    in_order = Rows(
        *(
            rows[:, SINK_TOKENS:].reshape(num_prompts, asked.segment_tokens, *rows.shape[2:])
            for rows in alone
        )
    ).moved(by_tokens)
    placed = []
    for rows in in_order:
        room = rows.new_zeros(num_prompts, num_tokens, *rows.shape[2:])
        room[:, asked.segments] = rows
        placed.append(room)
    return Rows(*placed)


def question_scores(
    weights: Weights, shape: Shape, asked: Asked, stored: list[Rows], layer: int
) -> torch.Tensor:
    """How much the question attends to each token of the documents, over unrepaired rows.

    Returns:
        Probabilities, summed over heads and the question's tokens, shape: [prompts, tokens].
    """
    passed = forward(
        *(weights, shape, asked.tokens, stored, asked.always_fresh()),
        last_layer=layer,
        keeps_scores=True,
    )
    of_question = passed.scores[layer][:, :, asked.segments.stop :]
    return of_question.softmax(dim=-1).sum(dim=(1, 2))[:, asked.segments]


def deviations(
    weights: Weights, shape: Shape, asked: Asked, stored: list[Rows], layer: int
) -> torch.Tensor:
    """How far stored rows of a layer are from those of a full prefill, shape: [prompts, tokens]."""
    fresh = forward(weights, shape, asked.tokens, last_layer=layer).rows[layer]
    squares = sum(
        (new - old)[:, asked.segments].square().flatten(2).sum(dim=-1)
        for new, old in zip(fresh, stored[layer], strict=True)
    )
    assert isinstance(squares, torch.Tensor)
    return squares


def choose(
    selector: Selector, scores: torch.Tensor | None, num_documents: int, budget_tokens: int
) -> torch.Tensor:
    """The tokens of the documents that are recomputed.

    Args:
        selector: The rule.
        scores: Of the tokens, shape: [prompts, tokens]; not read by all rules.
        num_documents: In each prompt.
        budget_tokens: How many are chosen.

    Returns:
        Shape: [prompts, tokens], or [1, tokens] where all prompts are alike.
    """
    num_tokens = num_documents * task.DOCUMENT_TOKENS
    if selector is Selector.NOTHING:
        return torch.zeros(1, num_tokens, dtype=torch.bool)
    if selector is Selector.HEADS:
        of_all, more = divmod(budget_tokens, num_documents)
        heads = torch.full((num_documents, 1), of_all)
        heads[:more] += 1
        return (torch.arange(task.DOCUMENT_TOKENS) < heads).reshape(1, -1)
    assert scores is not None
    if selector is Selector.QUESTION_RUNS:
        return _best_runs(scores, num_documents, budget_tokens)
    return _best(scores, budget_tokens)


def _best(scores: torch.Tensor, num_best: int) -> torch.Tensor:
    is_best = torch.zeros_like(scores, dtype=torch.bool)
    return is_best.scatter_(1, scores.topk(num_best, dim=1).indices, True)


def _best_runs(scores: torch.Tensor, num_documents: int, budget_tokens: int) -> torch.Tensor:
    """Runs begin at every fourth token of a document; they are ranked by their highest score."""
    num_runs = -(-task.DOCUMENT_TOKENS // RUN_TOKENS)
    missing = num_runs * RUN_TOKENS - task.DOCUMENT_TOKENS
    by_document = scores.reshape(len(scores), num_documents, task.DOCUMENT_TOKENS)
    padded = torch.nn.functional.pad(by_document, (0, missing), value=-1.0)
    runs = padded.reshape(len(scores), num_documents * num_runs, RUN_TOKENS)
    is_best = _best(runs.amax(dim=-1), budget_tokens // RUN_TOKENS)
    tokens = is_best.repeat_interleave(RUN_TOKENS, dim=1)
    by_document = tokens.reshape(len(scores), num_documents, num_runs * RUN_TOKENS)
    return by_document[:, :, : task.DOCUMENT_TOKENS].flatten(1)


def num_documents(scores: torch.Tensor) -> int:
    """In each prompt. Shape of ``scores``: [prompts, tokens]."""
    return scores.shape[1] // task.DOCUMENT_TOKENS


def heads_of_each(num_documents: int, head_tokens: int) -> torch.Tensor:
    """The first tokens of every document, shape: [1, tokens]."""
    is_head = torch.arange(task.DOCUMENT_TOKENS) < head_tokens
    return is_head.repeat(num_documents)[None]


def runs_of_each(
    scores: torch.Tensor, num_documents: int, ratio: float, run_tokens: int
) -> torch.Tensor:
    """What the connector's selector `question` computes without heads, written down once more.

    Documents are cut into runs; the best run of each is chosen, by the sum of its scores, and then
    the best of the others, for as long as they fit into the budget.

    Args:
        scores: Of the tokens, shape: [prompts, tokens].
        num_documents: In each prompt.
        ratio: Of the documents' tokens; the budget.
        run_tokens: Of a run; the last one of a document may be shorter.

    Returns:
        Shape: [prompts, tokens].
    """
    places = torch.arange(num_documents * task.DOCUMENT_TOKENS)
    document, place = places // task.DOCUMENT_TOKENS, places % task.DOCUMENT_TOKENS
    runs_per_document = -(-task.DOCUMENT_TOKENS // run_tokens)
    run = document * runs_per_document + place // run_tokens
    lengths = run.bincount().tolist()
    chosen = torch.zeros(len(scores), len(lengths), dtype=torch.bool)
    sums = torch.zeros(chosen.shape).index_add_(1, run, scores.cpu())
    best = sums.view(-1, num_documents, runs_per_document).argmax(dim=2)
    chosen.scatter_(1, best + torch.arange(num_documents) * runs_per_document, True)
    for of_prompt, sums_of_prompt in zip(chosen, sums, strict=True):
        left_tokens = int(ratio * len(places))
        left_tokens -= sum(lengths[number] for number in of_prompt.nonzero()[:, 0].tolist())
        for number in sums_of_prompt.argsort(descending=True, stable=True).tolist():
            if not of_prompt[number] and lengths[number] <= left_tokens:
                of_prompt[number] = True
                left_tokens -= lengths[number]
    return chosen[:, run]


def answered(
    weights: Weights, shape: Shape, asked: Asked, stored: list[Rows], is_chosen: torch.Tensor
) -> torch.Tensor:
    """Logits behind the question, shape: [prompts, vocabulary]."""
    is_fresh = asked.always_fresh()
    is_fresh[:, asked.segments] = is_chosen.to(is_fresh.device)
    logits = forward(weights, shape, asked.tokens, stored, is_fresh).logits
    assert logits is not None
    return logits[:, -1]
