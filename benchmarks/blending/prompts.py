# SPDX-License-Identifier: Apache-2.0
"""The tokens of documents and prompts. A document has the same tokens wherever it stands."""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from blending.questions import Document, Kind, ask, make_documents

SYSTEM = "You answer questions about the given stories with a few words."
MISSING = (0, 1, 2)
"""Documents of a prompt that nobody has stored."""


class FolderTokenizer:
    """That of a model folder; special tokens are read where the text has them, none are added."""

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
        segments: Of each document, the first token's index and that behind its last.
        num_missing: How many of its documents nobody has stored.
    """

    tokens: tuple[int, ...]
    segments: tuple[tuple[int, int], ...]
    kind: Kind
    num_missing: int
    answer: str


@dataclass(frozen=True, slots=True)
class Workload:
    """What every mode is asked.

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
    """Prompts of all kinds.

    Args:
        num_of_kind: Questions of each kind, for each seed and number of missing documents.
        missing: How many documents of a prompt nobody has stored.
        seeds: Of the documents, their orders and the questions.
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
