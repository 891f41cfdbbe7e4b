# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vllm-ascend-kvext project
"""The sinks that segments are computed behind. With ``context``, they have documents of their salt.

The KV of a document that is computed behind other documents is nearer to its KV in a prompt of
documents. The KV is nearest with about as many documents before the document as in the prompt, and
with the common beginning of prompts before them. So a document is stored behind no other document,
behind a few, and behind many. The first documents of a salt become its contexts, and stay its
contexts. Once the common beginning of the salt's prompts is known, it is put before these
documents. The same text behind another context is another segment. See
``docs/blending_contexts.md``.
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

logger = logging.getLogger("vllm.ascend_kvext.segments")

FEW_DOCUMENTS = 2
"""The number of documents in the smaller context of a salt. Two documents were measured."""

NUM_DOCUMENTS = 8
"""The number of documents in the larger context of a salt. Eight documents were measured."""

MAX_DOCUMENT_TOKENS = 256
"""The maximum length of a document in a context. Documents of 100 to 200 tokens were measured. If a
document is longer, only its beginning is taken, which is worse."""

NUM_PROMPTS = 4
"""The number of prompts that are compared to find their common beginning. Their first segments have
to differ, because the turns of one chat have the same user's text before their first segment."""

MIN_BEGINNING_TOKENS = 16
"""The minimum length of a common beginning, in addition to the sink of all segments. A shorter
beginning is not worth a computation."""

MAX_BEGINNING_TOKENS = 2048
"""The maximum length of a common beginning."""

MAX_DOCUMENTS_SHARE = 1 / 2
"""The maximum length of all documents in a context, as a share of the longest request."""

MAX_BEGINNING_SHARE = 1 / 4
"""The maximum length of a common beginning, as a share of the longest request."""

MAX_SALTS = 128
"""The maximum number of salts with contexts. The same maximum holds for salts with documents of an
unfinished context, and for salts whose prompts are compared. Documents of an unfinished context are
kept whole."""


class Sink(NamedTuple):
    """The tokens that a segment is computed behind.

    ``space`` is the key space of segments behind this sink; see ``key_space``. Behind a sink that
    ``is_past``, nothing more is stored.
    """

    token_ids: tuple[int, ...]
    space: bytes
    num_documents: int = 0
    has_context: bool = False
    is_past: bool = False


Beginning = tuple[int, ...]
Document = TypeVar("Document")


class SegmentContexts(Generic[Document]):
    """The sinks of one engine, by salt. A salt of None and an empty salt are the same.

    Args:
        sink_ids: The sink without a context, which all segments have.
        max_request_tokens: The maximum length of a segment and its sink; 0 for no contexts.
        min_tokens: The minimum length of a document in a context.
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
        self._max_request_tokens = max_request_tokens
        self._min_tokens = min_tokens
        max_documents_tokens = int(max_request_tokens * MAX_DOCUMENTS_SHARE)
        self._document_tokens = min(MAX_DOCUMENT_TOKENS, max_documents_tokens // NUM_DOCUMENTS)
        self._max_beginning_tokens = 0
        if reads_prompts:
            max_beginning_tokens = int(max_request_tokens * MAX_BEGINNING_SHARE)
            self._max_beginning_tokens = min(MAX_BEGINNING_TOKENS, max_beginning_tokens)
        self._contexts: OrderedDict[str, list[_Context]] = OrderedDict()  # the latest first
        self._documents: OrderedDict[str, dict[Beginning, Document]] = OrderedDict()
        self._prompts: OrderedDict[str, _Prompts] = OrderedDict()

    def without_context(self, cache_salt: str | None) -> Sink:
        """The sink of clients' segments, and of all segments while there is no context."""
        return Sink(self.sink_ids, key_space(self.sink_ids, cache_salt))

    def sinks(
        self, cache_salt: str | None, token_ids: Sequence[int], num_before: int = 0
    ) -> list[Sink]:
        """All sinks of a document, the best sinks for its place in a prompt first.

        ``num_before`` documents stand before it in the prompt. Sinks with at least as many
        documents come first, from the fewest to the most. Then come sinks with fewer documents,
        from the most to the fewest.
        """
        found: list[Sink] = []
        salt = cache_salt or ""
        contexts = self._contexts.get(salt, ())
        if contexts:
            self._contexts.move_to_end(salt)
            max_tokens = self._max_request_tokens - len(token_ids)
            beginning = self._beginning(token_ids)
        for context in contexts:
            # A context must not have the document itself. The model would then copy the document's
            # tokens, which is worse than no context.
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
        """Note the beginning of a prompt with segments."""
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
        """Note a stored document; returns the documents to be stored behind contexts now.

        These are the document itself or, if it has completed a context, all documents in the
        context.
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
        """Forget all contexts, so that they are chosen anew."""
        for each in (self._contexts, self._documents, self._prompts):
            each.clear()

    def _first_ids(self, salt: str) -> tuple[int, ...]:
        """The tokens that the contexts of a salt begin with."""
        prompts = self._prompts.get(salt)
        min_tokens = len(self.sink_ids) + MIN_BEGINNING_TOKENS
        if prompts is None or len(prompts.segments) < NUM_PROMPTS:
            return self.sink_ids
        return prompts.common_ids if len(prompts.common_ids) >= min_tokens else self.sink_ids

    def _context(self, documents: Sequence[Beginning], salt: str) -> _Context:
        first_ids = self._first_ids(salt)
        sink = cache(partial(self._sink, first_ids, salt))  # Most documents share most sinks.
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
            len(first_ids),
            FEW_DOCUMENTS,
            NUM_DOCUMENTS,
            len(context.sinks[-1].token_ids),
        )
        return context

    def _beginning(self, token_ids: Sequence[int]) -> Beginning:
        return tuple(token_ids[: self._document_tokens])

    def _sinks(
        self, sink: Callable[[tuple[Beginning, ...]], Sink], documents: Sequence[Beginning]
    ) -> tuple[Sink, ...]:
        """Sinks of no, few and all documents. The sink of clients is left out."""
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
    """The common beginning of prompts of a salt. Their first ``segments`` differ."""

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
    """The sinks of one salt.

    ``of_documents`` has the sinks of the documents in the context, by their beginnings. The sinks
    of such a document consist of the other documents.
    """

    first_ids: tuple[int, ...]
    sinks: tuple[Sink, ...]
    of_documents: Mapping[Beginning, tuple[Sink, ...]]


def _as_past(context: _Context) -> _Context:
    """The same context, behind which nothing more is stored. Stored segments are still reused."""
    return context._replace(
        sinks=tuple(each._replace(is_past=True) for each in context.sinks),
        of_documents={
            document: tuple(each._replace(is_past=True) for each in sinks)
            for document, sinks in context.of_documents.items()
        },
    )


def key_space(sink_ids: Sequence[int], cache_salt: str | None) -> bytes:
    """The hash that the keys of all segments behind one sink and with one salt are derived from.

    A salt of None and an empty salt are the same, as they are to vLLM.
    """
    facts = ["segment", list(sink_ids), cache_salt or ""]
    return hashlib.sha256(json.dumps(facts).encode()).digest()
