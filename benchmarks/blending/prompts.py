# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vllm-ascend-kvext project
"""Makes the tokens of documents and prompts. A document has the same tokens in every prompt."""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from blending.questions import Document, Kind, ask, make_documents

SYSTEM = "You answer questions about the given stories with a few words."
MISSING = (0, 1, 2)
"""The numbers of documents of a prompt that were not stored before."""


class FolderTokenizer:
    """The tokenizer of a model folder. It reads special tokens of the text, and adds none."""

    def __init__(self, folder: Path) -> None:
        from tokenizers import Tokenizer as Found

        self._found: Any = Found.from_file(str(folder / "tokenizer.json"))

    def encode(self, text: str) -> list[int]:
        return list(self._found.encode(text, add_special_tokens=False).ids)

    def decode(self, tokens: Sequence[int]) -> str:
        return str(self._found.decode(list(tokens), skip_special_tokens=True))


@dataclass(frozen=True, slots=True)
class Prompt:
    """One prompt.

    Attributes:
        segments: For each document, the index of its first token and the index behind its last
            token.
        num_missing: The number of its documents that were not stored before.
    """

    tokens: tuple[int, ...]
    segments: tuple[tuple[int, int], ...]
    kind: Kind
    num_missing: int
    answer: str


@dataclass(frozen=True, slots=True)
class Workload:
    """The documents and prompts of all modes.

    Attributes:
        stored: The tokens of each document that is stored first.
    """

    stored: tuple[tuple[int, ...], ...]
    prompts: tuple[Prompt, ...]


def make_workload(
    tokenizer: FolderTokenizer,
    num_of_kind: int,
    missing: Sequence[int] = MISSING,
    seeds: Sequence[int] = (0,),
) -> Workload:
    """Make prompts with questions of all kinds.

    Args:
        num_of_kind: The number of questions of each kind, per seed and number of missing documents.
        missing: The numbers of documents of a prompt that are not stored before.
        seeds: The seeds of the documents, their orders and the questions.
    """
    stored: list[tuple[int, ...]] = []
    prompts: list[Prompt] = []
    for seed in seeds:
        documents = make_documents(seed)
        tokens = [tuple(tokenizer.encode(" " + each.text)) for each in documents]
        stored += [tokens[n] for n, document in enumerate(documents) if document.is_stored]
        prompts += _prompts(tokenizer, documents, tokens, num_of_kind, missing, seed)
    return Workload(tuple(stored), tuple(prompts))


def _prompts(
    tokenizer: FolderTokenizer,
    documents: Sequence[Document],
    tokens: Sequence[tuple[int, ...]],
    num_of_kind: int,
    missing: Sequence[int],
    seed: int,
) -> Iterator[Prompt]:
    rng = random.Random(seed + 1)
    head = tokenizer.encode(f"<|im_start|>system\n{SYSTEM}<|im_end|>\n<|im_start|>user\nStories:")
    seen: set[tuple[int, ...]] = set()
    for _ in range(num_of_kind):
        for num_missing in missing:
            for kind in Kind:
                order, question = ask(rng, documents, kind, num_missing)
                while order in seen:
                    order, question = ask(rng, documents, kind, num_missing)
                seen.add(order)
                found = list(head)
                segments = []
                for number in order:
                    segments.append((len(found), len(found) + len(tokens[number])))
                    found += tokens[number]
                found += tokenizer.encode(
                    f"\n\n{question.text}<|im_end|>\n<|im_start|>assistant\n{question.begins}"
                )
                yield Prompt(tuple(found), tuple(segments), kind, num_missing, question.answer)
