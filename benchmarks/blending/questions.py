# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vllm-ascend-kvext project
"""Generates documents, and prompts that ask about eight of them, each in a new order.

Three kinds of questions:

- *fact*: one sentence of one document has the answer.
- *reference*: a document begins with "It ..."; the end of the document before says what "it" is.
- *cut*: a sentence begins at the end of a document and ends at the beginning of the next.

The document before is another document in every prompt, so the answers to the last two kinds depend
on the order. This module does not know tokens; see `prompts.py`.
"""

from __future__ import annotations

import enum
import itertools
import random
from collections.abc import Sequence
from dataclasses import dataclass

DOCUMENTS_PER_PROMPT = 8


def _words(text: str) -> tuple[str, ...]:
    return tuple(text.split())


_THINGS = _words(
    """
    anchor axe banner barrel basket bell bicycle blanket boat bottle bracelet broom bucket button
    cabinet camera candle canoe carpet chair chest clock coat compass crown cup curtain desk doll
    door drum engine fan fence flag flute fork gate glove guitar hammer harp hat helmet horn hut
    jacket jar kettle kite knife ladder lamp lantern letter lock map mask medal mirror needle oven
    paddle parcel pen piano pillow pipe plate poster pump quilt radio ring robe rope saddle sail
    scarf shield shovel sofa spoon statue stool stove sword table telescope tent throne tower toy
    tractor tray trumpet trunk umbrella vase violin wagon wallet watch wheel whistle window zipper
    """
)
"""The things. Each of them is in one sentence of one document."""

_COLORS = _words("red blue green yellow black white orange purple silver brown pink")
_MATERIALS = _words("copper glass wood silk stone leather paper iron ivory cotton marble")
_PRICES = _words("217 358 461 592 634 785 826 943 179 304 415 526")
_OWNERS = _words("nurse baker pilot teacher lawyer farmer dentist painter tailor soldier")
_CITIES = _words("Lisbon Vienna Toronto Nairobi Oslo Madrid Boston Prague Dublin")
_YEARS = _words("1642 1713 1758 1821 1866 1894 1907 1935 1679 1780 1843")
_FACTS = (
    ("The {thing} is painted {value}.", "What color is the {thing}?", _COLORS),
    ("The {thing} is made of {value}.", "What is the {thing} made of?", _MATERIALS),
    ("The {thing} costs {value} dollars.", "How many dollars does the {thing} cost?", _PRICES),
    ("The {thing} belongs to the {value}.", "To whom does the {thing} belong?", _OWNERS),
    ("The {thing} was found in {value}.", "Where was the {thing} found?", _CITIES),
)
"""The sentence, the question and the values of each fact. An answer begins like the sentence."""

_REMARKS = (
    "The weather was mild for most of that week.",
    "Nobody was surprised to hear about it.",
    "The neighbors had talked about this for quite some time.",
    "It took several months until everything was in order.",
    "A short report about it appeared in the local newspaper.",
    "Most of the visitors came by train and stayed for two days.",
    "The old building near the river was painted again last spring.",
    "There was a small party in the garden when the work was done.",
    "A few photographs of that day can still be seen in the hallway.",
    "The price of bread went up again, and then it went down again.",
    "At the end of the month the shops closed an hour earlier.",
    "Two of the bridges were closed while the road was repaired.",
    "The children collected chestnuts and sold them at the market.",
    "It is said that the winter after that was the coldest in years.",
    "A new clock was ordered, but it arrived only after the holidays.",
)
_NUM_REMARKS = (6, 6, 7, 7, 8, 8, 13)
_FACTS_PER_DOCUMENT = 3
_PASSWORDS = _words("Falcon Tiger Summer Pepper Diamond")


class Kind(enum.Enum):
    """What the answer to a question needs."""

    FACT = "fact"
    REFERENCE = "reference"
    CUT = "cut"


class Role(enum.Enum):
    """How a document begins and ends."""

    PLAIN = "plain"
    CHAINED = "chained"
    """The document begins with "It", and ends with a thing."""

    OPEN = "open"
    """The document ends inside a sentence."""

    CLOSING = "closing"
    """The document begins with the end of a sentence."""


@dataclass(frozen=True, slots=True)
class Question:
    """A question and its answer.

    Attributes:
        begins: The sentence of the answer up to the answer. The model continues it.
    """

    text: str
    begins: str
    answer: str


@dataclass(frozen=True, slots=True)
class Document:
    """One text.

    Attributes:
        is_stored: Whether its KV is stored before the first prompt. Other documents are missing.
        role: How the document begins and ends.
        questions: The questions that it answers alone.
        begins_with: The value at its beginning, which belongs to the document before it.
        ends_with: The thing at its end, which belongs to the next document.
    """

    text: str
    is_stored: bool
    role: Role
    questions: tuple[Question, ...]
    begins_with: str = ""
    ends_with: str = ""


_STORED = {Role.PLAIN: 6, Role.CHAINED: 8, Role.OPEN: 3, Role.CLOSING: 3}
_NOT_STORED = {Role.PLAIN: 3, Role.CHAINED: 3, Role.OPEN: 2, Role.CLOSING: 2}
_IN_PROMPT = {Role.PLAIN: 2, Role.CHAINED: 4, Role.OPEN: 1, Role.CLOSING: 1}


def make_documents(seed: int = 0) -> list[Document]:
    """Make all documents."""
    rng = random.Random(seed)
    things = list(_THINGS)
    rng.shuffle(things)
    documents = []
    for role, num_stored in _STORED.items():
        for number in range(num_stored + _NOT_STORED[role]):
            documents.append(_document(rng, role, number, number < num_stored, things))
    return documents


def _document(
    rng: random.Random, role: Role, number: int, is_stored: bool, things: list[str]
) -> Document:
    """Make one document. Its things are taken out of the list."""
    sentences = []
    questions = []
    for sentence, question, values in rng.choices(_FACTS, k=_FACTS_PER_DOCUMENT):
        words = {"thing": things.pop(), "value": rng.choice(values)}
        sentences.append(sentence.format(**words))
        begins = sentence.partition(" {value}")[0].format(**words)
        questions.append(Question(question.format(**words), begins, words["value"]))
    sentences += rng.sample(_REMARKS, rng.choice(_NUM_REMARKS))
    rng.shuffle(sentences)
    begins_with = ends_with = ""
    if role is Role.CHAINED:
        begins_with = _YEARS[number]
        ends_with = things.pop()
        sentences.insert(0, f"It was bought in the year {begins_with}.")
        sentences.append(f"The last thing on this list is the {ends_with}.")
    elif role is Role.OPEN:
        ends_with = things.pop()
        sentences.append(f"The password for the {ends_with} is")
    elif role is Role.CLOSING:
        begins_with = _PASSWORDS[number]
        sentences.insert(0, f"{begins_with}.")
    text = " ".join(sentences)
    return Document(text, is_stored, role, tuple(questions), begins_with, ends_with)


def ask(
    rng: random.Random, documents: Sequence[Document], kind: Kind, num_missing: int = 0
) -> tuple[tuple[int, ...], Question]:
    """The numbers of a prompt's documents, in a new order, and its question.

    Args:
        num_missing: The number of its documents that were not stored before.
    """
    numbers = {
        role: _sample(rng, documents, role, is_stored=True, count=count)
        for role, count in _IN_PROMPT.items()
    }
    parts = [numbers[Role.CHAINED], numbers[Role.OPEN] + numbers[Role.CLOSING]]
    parts += [[number] for number in numbers[Role.PLAIN]]
    rng.shuffle(parts)
    order = [number for part in parts for number in part]
    for place in rng.sample(range(len(order)), num_missing):
        role = documents[order[place]].role
        taken = set(order)
        while order[place] in taken:
            (order[place],) = _sample(rng, documents, role, is_stored=False, count=1)
    return tuple(order), _question(rng, documents, order, kind)


def _sample(
    rng: random.Random, documents: Sequence[Document], role: Role, *, is_stored: bool, count: int
) -> list[int]:
    fitting = [
        number
        for number, each in enumerate(documents)
        if each.role is role and each.is_stored is is_stored
    ]
    return rng.sample(fitting, count)


def _question(
    rng: random.Random, documents: Sequence[Document], order: Sequence[int], kind: Kind
) -> Question:
    if kind is Kind.FACT:
        return rng.choice(documents[rng.choice(order)].questions)
    role = Role.CHAINED if kind is Kind.REFERENCE else Role.CLOSING
    pairs = [
        (documents[before], documents[after])
        for before, after in itertools.pairwise(order)
        if documents[after].role is role and documents[before].ends_with
    ]
    before, after = rng.choice(pairs)
    thing = before.ends_with
    value = after.begins_with
    if kind is Kind.REFERENCE:
        begins = f"The {thing} was bought in the year"
        return Question(f"In which year was the {thing} bought?", begins, value)
    return Question(
        f"What is the password for the {thing}?", f"The password for the {thing} is", value
    )
