# SPDX-License-Identifier: Apache-2.0
"""What segments are computed behind: with ``segment_context``, other documents of their salt.

Behind other documents, the KV of one comes nearer to what it is in a prompt of documents: nearest
behind about as many as stand before it there. So it is stored behind none, a few and many. The
first documents of a salt become its contexts, and stay that: a segment behind another context is
another segment. See ``docs/blending_contexts.md``.
"""

from __future__ import annotations

import hashlib
import json
import logging
from collections import OrderedDict
from collections.abc import Iterable, Mapping, Sequence
from typing import Generic, NamedTuple, TypeVar

logger = logging.getLogger("vllm.ascend_kvext.blending")

FEW_DOCUMENTS, NUM_DOCUMENTS = 2, 8
MAX_DOCUMENT_TOKENS = 192
"""What was measured: two and eight documents of 100 to 200 tokens. Of longer ones, the
beginnings."""

MAX_CONTEXT_SHARE = 1 / 4
"""Of the longest request."""

MAX_SALTS = 128
"""So many salts have a context, and as many some documents of one, which are kept as a whole."""


class Sink(NamedTuple):
    """What segments are computed behind; keys of what may stand for each other have one space."""

    token_ids: tuple[int, ...]
    space: bytes
    num_documents: int = 0


Beginning = tuple[int, ...]
Document = TypeVar("Document")


class SegmentContexts(Generic[Document]):
    """The sinks of one engine, by salt. A salt of None and an empty one are the same.

    Args:
        sink_ids: What all segments are computed behind, contexts too.
        max_request_tokens: How long a segment and what stands before it may be; 0 for no contexts.
        min_tokens: Shorter documents are none for a context.
    """

    def __init__(
        self, sink_ids: Sequence[int], max_request_tokens: int = 0, min_tokens: int = 1
    ) -> None:
        self.sink_ids = tuple(sink_ids)
        self._max_request_tokens, self._min_tokens = max_request_tokens, min_tokens
        max_context_tokens = int(max_request_tokens * MAX_CONTEXT_SHARE)
        self._beginning_tokens = min(MAX_DOCUMENT_TOKENS, max_context_tokens // NUM_DOCUMENTS)
        self._contexts: OrderedDict[str, _Context] = OrderedDict()
        self._documents: OrderedDict[str, dict[Beginning, Document]] = OrderedDict()

    def without_context(self, cache_salt: str | None) -> Sink:
        """The sink of what clients store, and of all before there is a context."""
        return self._sink((), cache_salt)

    def sinks(
        self, cache_salt: str | None, token_ids: Sequence[int], num_before: int = 0
    ) -> list[Sink]:
        """All sinks of a document, the best ones for its place first.

        That is the shortest context with at least the ``num_before`` documents that stand before
        it in a prompt, then longer ones, then shorter ones.
        """
        found = [self.without_context(cache_salt)]
        context = self._contexts.get(cache_salt or "")
        if context is not None:
            self._contexts.move_to_end(cache_salt or "")
            # Its tokens a second time would be copied: that makes it worse than no context does.
            sinks = context.of_documents.get(self._beginning(token_ids), context.sinks)
            max_tokens = self._max_request_tokens - len(token_ids)
            found += [each for each in sinks if len(each.token_ids) < max_tokens]
        first = next(
            (place for place, each in enumerate(found) if each.num_documents >= num_before),
            len(found),
        )
        return found[first:] + found[:first][::-1]

    def add(
        self, token_ids: Sequence[int], cache_salt: str | None, document: Document
    ) -> Sequence[Document]:
        """A document has been stored; what is to be stored behind a context from now on.

        That is the document or, where it has completed the context, all of those in it.
        """
        salt = cache_salt or ""
        if not self._beginning_tokens:
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
        context = _Context(
            self._sinks(documents, cache_salt),
            {
                each: self._sinks([other for other in documents if other != each], cache_salt)
                for each in documents
            },
        )
        self._contexts[salt] = context
        if len(self._contexts) > MAX_SALTS:
            self._contexts.popitem(last=False)
        logger.info(
            "KvextConnector: segments of one cache_salt are computed again behind %d and %d of its "
            "first documents from now on, %d tokens at most, whose KV the prefix cache keeps.",
            *(FEW_DOCUMENTS, NUM_DOCUMENTS),
            len(context.sinks[-1].token_ids) - len(self.sink_ids),
        )
        return tuple(documents.values())

    def clear(self) -> None:
        """Choose anew."""
        self._contexts.clear()
        self._documents.clear()

    def _beginning(self, token_ids: Sequence[int]) -> Beginning:
        return tuple(token_ids[: self._beginning_tokens])

    def _sinks(self, documents: Iterable[Beginning], cache_salt: str | None) -> tuple[Sink, ...]:
        """A sink of a few, and one of all of some documents."""
        chosen = list(documents)
        return (
            self._sink(chosen[:FEW_DOCUMENTS], cache_salt),
            self._sink(chosen, cache_salt),
        )

    def _sink(self, documents: Sequence[Beginning], cache_salt: str | None) -> Sink:
        token_ids = (*self.sink_ids, *(token for each in documents for token in each))
        return Sink(token_ids, key_space(token_ids, cache_salt), len(documents))


class _Context(NamedTuple):
    """The sinks of one salt, and, by their beginnings, those of the documents in it: the others."""

    sinks: tuple[Sink, ...]
    of_documents: Mapping[Beginning, tuple[Sink, ...]]


def key_space(sink_ids: Sequence[int], cache_salt: str | None) -> bytes:
    """What the keys of all segments begin with whose rows may stand for each other.

    A salt of None and an empty one are the same, as they are to vLLM.
    """
    facts = ["segment", list(sink_ids), cache_salt or ""]
    return hashlib.sha256(json.dumps(facts).encode()).digest()
