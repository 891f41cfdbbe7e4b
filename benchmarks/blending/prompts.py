# SPDX-License-Identifier: Apache-2.0
"""The tokens of documents and prompts. A document has the same tokens wherever it stands."""

from __future__ import annotations

import json
import random
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Protocol

from blending.questions import Asked, Document, Kind, ask, make_documents

SYSTEM = "You answer questions about the given stories with a few words."
MISSING = (0, 1, 2)
"""Documents of a prompt that nobody has stored."""


class Tokenizer(Protocol):
    """Text to tokens and back."""

    def encode(self, text: str) -> list[int]: ...

    def decode(self, tokens: Sequence[int]) -> str: ...


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
        tokens: All of it.
        segments: Of each document, the first token's index and that behind its last.
        kind: Of the question.
        num_missing: Documents that nobody has stored.
        answer: That is right.
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
        prompts: In their order; each is asked once.
    """

    stored: tuple[tuple[int, ...], ...]
    prompts: tuple[Prompt, ...]

    @classmethod
    def join(cls, workloads: Iterable[Workload]) -> Workload:
        """One after the other."""
        found = list(workloads)
        return cls(
            tuple(tokens for each in found for tokens in each.stored),
            tuple(prompt for each in found for prompt in each.prompts),
        )

    def write(self, path: Path) -> None:
        prompts = [{**asdict(prompt), "kind": prompt.kind.value} for prompt in self.prompts]
        path.write_text(json.dumps({"stored": self.stored, "prompts": prompts}) + "\n")

    @classmethod
    def read(cls, path: Path) -> Workload:
        found = json.loads(path.read_text())
        return cls(
            tuple(tuple(tokens) for tokens in found["stored"]),
            tuple(_prompt_of(each) for each in found["prompts"]),
        )


def _prompt_of(found: dict[str, Any]) -> Prompt:
    segments = tuple((start, end) for start, end in found["segments"])
    kind = Kind(found["kind"])
    return Prompt(tuple(found["tokens"]), segments, kind, found["num_missing"], found["answer"])


def make_workload(
    tokenizer: Tokenizer, num_of_kind: int, missing: Sequence[int] = MISSING, seed: int = 0
) -> Workload:
    """Prompts of all kinds.

    Args:
        tokenizer: The model's.
        num_of_kind: Questions of each kind, for each number of missing documents.
        missing: How many documents of a prompt nobody has stored.
        seed: Of the documents, their orders and the questions.
    """
    documents = make_documents(seed)
    tokens = [tuple(tokenizer.encode(" " + each.text)) for each in documents]
    return Workload(
        tuple(tokens[n] for n, document in enumerate(documents) if document.is_stored),
        tuple(_prompts(tokenizer, documents, tokens, num_of_kind, missing, seed)),
    )


def _prompts(
    tokenizer: Tokenizer,
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
                asked = ask(rng, documents, kind, num_missing)
                while asked.documents in seen:
                    asked = ask(rng, documents, kind, num_missing)
                seen.add(asked.documents)
                yield _prompt(tokenizer, head, documents, tokens, asked)


def _prompt(
    tokenizer: Tokenizer,
    head: Sequence[int],
    documents: Sequence[Document],
    tokens: Sequence[tuple[int, ...]],
    asked: Asked,
) -> Prompt:
    found = list(head)
    segments = []
    for number in asked.documents:
        segments.append((len(found), len(found) + len(tokens[number])))
        found += tokens[number]
    question = asked.question
    found += tokenizer.encode(
        f"\n\n{question.text}<|im_end|>\n<|im_start|>assistant\n{question.begins}"
    )
    num_missing = sum(not documents[number].is_stored for number in asked.documents)
    return Prompt(tuple(found), tuple(segments), asked.kind, num_missing, question.answer)
