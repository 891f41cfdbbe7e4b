# SPDX-License-Identifier: Apache-2.0
"""What segments are computed behind: with ``segment_context``, other documents of their salt.

Behind other documents, the KV of one comes nearer to what it is in a prompt of documents: nearest
behind about as many as stand before it there, and behind what stands before all of them. So it is
stored behind none, a few and many. The first documents of a salt become its contexts, and stay
that; what its prompts begin with comes before them once it is known. A segment behind another
context is another segment. See ``docs/blending_contexts.md``.
"""

from __future__ import annotations

import hashlib
import json
import logging
from collections import OrderedDict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache, partial
from itertools import chain, takewhile
from typing import Generic, NamedTuple, TypeVar

from vllm_ascend_kvext.token_range import TokenRange

logger = logging.getLogger("vllm.ascend_kvext.blending")

FEW_DOCUMENTS, NUM_DOCUMENTS = 2, 8
MAX_DOCUMENT_TOKENS = 256
"""What was measured: two and eight documents of 100 to 200 tokens. Of longer ones, the beginnings,
which is worse."""

NUM_PROMPTS = 4
"""So many, whose first segments differ, are compared for what they begin with: the turns of one
chat begin with what its user has said."""

MIN_BEGINNING_TOKENS, MAX_BEGINNING_TOKENS = 16, 2048
"""More than what segments are computed behind anyway. Shorter ones are not worth a computation."""

MAX_DOCUMENTS_SHARE, MAX_BEGINNING_SHARE = 1 / 2, 1 / 4
"""Of the longest request."""

MAX_SALTS = 128
"""So many salts have contexts, as many some documents of one, which are kept as a whole, and of as
many it is known what prompts begin with."""


class Sink(NamedTuple):
    """What segments are computed behind; keys of what may stand for each other have one space.

    Behind one that ``is_past`` nothing is stored any more.
    """

    token_ids: tuple[int, ...]
    space: bytes
    num_documents: int = 0
    has_context: bool = False
    is_past: bool = False


Beginning = tuple[int, ...]
Document = TypeVar("Document")


class SegmentContexts(Generic[Document]):
    """The sinks of one engine, by salt. A salt of None and an empty one are the same.

    Args:
        sink_ids: What all segments are computed behind.
        max_request_tokens: How long a segment and what stands before it may be; 0 for no contexts.
        min_tokens: Shorter documents are none for a context.
        reads_prompts: Whether contexts begin like prompts, instead of with ``sink_ids``.
    """

    def __init__(
        self,
        sink_ids: Sequence[int],
        max_request_tokens: int = 0,
        min_tokens: int = 1,
        reads_prompts: bool = True,
    ) -> None:
        self.sink_ids = tuple(sink_ids)
        self._max_request_tokens, self._min_tokens = max_request_tokens, min_tokens
        max_documents_tokens = int(max_request_tokens * MAX_DOCUMENTS_SHARE)
        self._document_tokens = min(MAX_DOCUMENT_TOKENS, max_documents_tokens // NUM_DOCUMENTS)
        max_beginning_tokens = int(max_request_tokens * MAX_BEGINNING_SHARE) * reads_prompts
        self._max_beginning_tokens = min(MAX_BEGINNING_TOKENS, max_beginning_tokens)
        self._contexts: OrderedDict[str, list[_Context]] = OrderedDict()  # the latest first
        self._documents: OrderedDict[str, dict[Beginning, Document]] = OrderedDict()
        self._prompts: OrderedDict[str, _Prompts] = OrderedDict()

    def without_context(self, cache_salt: str | None) -> Sink:
        """The sink of what clients store, and of all before there is a context."""
        return Sink(self.sink_ids, key_space(self.sink_ids, cache_salt))

    def sinks(
        self, cache_salt: str | None, token_ids: Sequence[int], num_before: int = 0
    ) -> list[Sink]:
        """All sinks of a document, the best ones for its place first.

        That is the one with the fewest documents that has the ``num_before`` that stand before it
        in a prompt, then those with more, then those with fewer.
        """
        found: list[Sink] = []
        salt = cache_salt or ""
        contexts = self._contexts.get(salt, ())
        if contexts:
            self._contexts.move_to_end(salt)
            max_tokens = self._max_request_tokens - len(token_ids)
            beginning = self._beginning(token_ids)
        for context in contexts:
            # Its tokens a second time would be copied: that makes it worse than no context does.
            sinks = context.of_documents.get(beginning, context.sinks)
            found += [each for each in sinks if len(each.token_ids) < max_tokens]
        found.append(self.without_context(cache_salt))
        return sorted(
            found,
            key=lambda each: (
                each.num_documents < num_before,
                abs(each.num_documents - num_before),
            ),
        )

    def note_prompt(
        self, token_ids: Sequence[int], first_segment: TokenRange, cache_salt: str | None
    ) -> None:
        """A prompt with segments has come."""
        salt = cache_salt or ""
        if not self._max_beginning_tokens:
            return
        prompts = self._prompts.setdefault(salt, _Prompts())
        self._prompts.move_to_end(salt)
        if len(self._prompts) > MAX_SALTS:
            self._prompts.popitem(last=False)
        if len(prompts.segments) == NUM_PROMPTS:
            return
        num_tokens = min(first_segment.first_tokens, self._max_beginning_tokens)
        prompts.add(token_ids[:num_tokens], self._beginning(token_ids[slice(*first_segment)]))
        contexts = self._contexts.get(salt)
        if contexts and contexts[0].first_ids == self.sink_ids != self._first_ids(salt):
            latest = self._context(list(contexts[0].of_documents), salt)
            self._contexts[salt] = [latest, _as_past(contexts[0])]

    def add(
        self, token_ids: Sequence[int], cache_salt: str | None, document: Document
    ) -> Sequence[Document]:
        """A document has been stored; what is to be stored behind a context from now on.

        That is the document or, where it has completed the context, all of those in it.
        """
        salt = cache_salt or ""
        if not self._document_tokens:
            return ()
        if salt in self._contexts:
            return (document,)
        if len(token_ids) < self._min_tokens:
            return ()
        documents = self._documents.setdefault(salt, {})
        documents[self._beginning(token_ids)] = document
        self._documents.move_to_end(salt)
        if len(documents) < NUM_DOCUMENTS:
            if len(self._documents) > MAX_SALTS:
                self._documents.popitem(last=False)
            return ()
        del self._documents[salt]
        self._contexts[salt] = [self._context(list(documents), salt)]
        if len(self._contexts) > MAX_SALTS:
            self._contexts.popitem(last=False)
        return tuple(documents.values())

    def clear(self) -> None:
        """Choose anew."""
        for each in (self._contexts, self._documents, self._prompts):
            each.clear()

    def _first_ids(self, salt: str) -> tuple[int, ...]:
        """What contexts of a salt begin with."""
        prompts = self._prompts.get(salt)
        min_tokens = len(self.sink_ids) + MIN_BEGINNING_TOKENS
        if prompts is None or len(prompts.segments) < NUM_PROMPTS:
            return self.sink_ids
        return prompts.common_ids if len(prompts.common_ids) >= min_tokens else self.sink_ids

    def _context(self, documents: Sequence[Beginning], salt: str) -> _Context:
        first_ids = self._first_ids(salt)
        sink = cache(partial(self._sink, first_ids, salt))  # Most documents share most of them.
        others = {each: [other for other in documents if other != each] for each in documents}
        context = _Context(
            first_ids,
            self._sinks(sink, documents),
            {each: self._sinks(sink, of_each) for each, of_each in others.items()},
        )
        logger.info(
            "KvextConnector: segments of one cache_salt are computed again from now on: behind %d "
            "tokens before all documents, and %d and %d of its first documents, %d tokens at most, "
            "whose KV the prefix cache keeps.",
            *(len(first_ids), FEW_DOCUMENTS, NUM_DOCUMENTS),
            len(context.sinks[-1].token_ids),
        )
        return context

    def _beginning(self, token_ids: Sequence[int]) -> Beginning:
        return tuple(token_ids[: self._document_tokens])

    def _sinks(
        self, sink: Callable[[tuple[Beginning, ...]], Sink], documents: Sequence[Beginning]
    ) -> tuple[Sink, ...]:
        """A sink of no documents, unless it is what clients have, one of a few, one of all."""
        parts = (documents[:number] for number in (0, FEW_DOCUMENTS, len(documents)))
        found = [sink(tuple(part)) for part in parts]
        return tuple(each for each in found if each.token_ids != self.sink_ids)

    @staticmethod
    def _sink(
        first_ids: tuple[int, ...], cache_salt: str, documents: tuple[Beginning, ...]
    ) -> Sink:
        token_ids = (*first_ids, *chain(*documents))
        return Sink(token_ids, key_space(token_ids, cache_salt), len(documents), has_context=True)


@dataclass(slots=True)
class _Prompts:
    """What prompts of a salt have in common before their first ``segments``, which differ."""

    segments: set[Beginning] = field(default_factory=set)
    common_ids: tuple[int, ...] = ()

    def add(self, ids_before: Sequence[int], segment: Beginning) -> None:
        if segment in self.segments:
            return
        if self.segments:
            pairs = zip(self.common_ids, ids_before, strict=False)
            ids_before = [each for each, _ in takewhile(lambda pair: pair[0] == pair[1], pairs)]
        self.common_ids = tuple(ids_before)
        self.segments.add(segment)


class _Context(NamedTuple):
    """The sinks of one salt, and, by their beginnings, those of the documents in it: the others."""

    first_ids: tuple[int, ...]
    sinks: tuple[Sink, ...]
    of_documents: Mapping[Beginning, tuple[Sink, ...]]


def _as_past(context: _Context) -> _Context:
    """Behind which nothing is stored any more; what is stored is of use."""
    return context._replace(
        sinks=tuple(each._replace(is_past=True) for each in context.sinks),
        of_documents={
            document: tuple(each._replace(is_past=True) for each in sinks)
            for document, sinks in context.of_documents.items()
        },
    )


def key_space(sink_ids: Sequence[int], cache_salt: str | None) -> bytes:
    """What the keys of all segments begin with whose rows may stand for each other.

    A salt of None and an empty one are the same, as they are to vLLM.
    """
    facts = ["segment", list(sink_ids), cache_salt or ""]
    return hashlib.sha256(json.dumps(facts).encode()).digest()
