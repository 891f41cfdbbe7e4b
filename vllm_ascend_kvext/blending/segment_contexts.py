# SPDX-License-Identifier: Apache-2.0
"""What segments are computed behind: with ``segment_context``, other documents of their salt.

Behind other documents, the KV of one comes nearer to what it is in a prompt of documents: see
``docs/blending.md``. The first ones of a salt become its context, and stay that: a segment behind
another context is another segment.
"""

from __future__ import annotations

import hashlib
import json
import logging
from collections import OrderedDict
from collections.abc import Iterable, Mapping, Sequence
from typing import Generic, NamedTuple, TypeVar

logger = logging.getLogger("vllm.ascend_kvext.blending")

NUM_DOCUMENTS = 8
MAX_DOCUMENT_TOKENS = 192
"""What was measured: eight documents of 100 to 200 tokens. Of longer ones, the beginnings."""

MAX_CONTEXT_SHARE = 1 / 4
"""Of the longest request."""

MAX_SALTS, MAX_UNFINISHED = 128, 32
"""So many salts have a context, or some documents of one, which are kept as a whole."""


class Sink(NamedTuple):
    """What segments are computed behind; keys of what may stand for each other have one space."""

    token_ids: tuple[int, ...]
    space: bytes


class _Context(NamedTuple):
    """The sink of one salt, and, by their beginnings, those of the documents in it: the others."""

    sink: Sink
    of_documents: Mapping[tuple[int, ...], Sink]


Document = TypeVar("Document")


class SegmentContexts(Generic[Document]):
    """The sinks of one engine, by salt. A salt of None and an empty one are the same.

    Args:
        sink_ids: What all segments are computed behind, contexts too.
        max_context_tokens: How long a context may be; 0 for none.
        min_tokens: Shorter documents are none for a context.
    """

    def __init__(
        self, sink_ids: Sequence[int], max_context_tokens: int = 0, min_tokens: int = 1
    ) -> None:
        self.sink_ids = tuple(sink_ids)
        self.max_context_tokens, self._min_tokens = max_context_tokens, min_tokens
        self._contexts: OrderedDict[str, _Context] = OrderedDict()
        self._documents: OrderedDict[str, dict[tuple[int, ...], Document]] = OrderedDict()

    def without_context(self, cache_salt: str | None) -> Sink:
        """The sink of what clients store, and of all before there is a context."""
        return self._sink((), cache_salt)

    def of(self, cache_salt: str | None, token_ids: Sequence[int]) -> Sink:
        """The sink of a document that the engine stores from now on."""
        context = self._contexts.get(cache_salt or "")
        if context is None:
            return self.without_context(cache_salt)
        self._contexts.move_to_end(cache_salt or "")
        # Its tokens a second time would be copied: that makes it worse than no context does.
        return context.of_documents.get(self._beginning(token_ids), context.sink)

    def add(
        self, token_ids: Sequence[int], cache_salt: str | None, document: Document
    ) -> Sequence[Document]:
        """A document has been stored; what is to be stored behind a context from now on.

        That is the document or, where it has completed the context, all of those in it.
        """
        salt = cache_salt or ""
        if not self.max_context_tokens:
            return ()
        if salt in self._contexts:
            return (document,)
        if len(token_ids) < self._min_tokens:
            return ()
        documents = self._documents.setdefault(salt, {})
        documents[self._beginning(token_ids)] = document
        self._documents.move_to_end(salt)
        if len(documents) < NUM_DOCUMENTS:
            if len(self._documents) > MAX_UNFINISHED:
                self._documents.popitem(last=False)
            return ()
        del self._documents[salt]
        others = {
            each: self._sink([other for other in documents if other != each], cache_salt)
            for each in documents
        }
        context = _Context(self._sink(documents, cache_salt), others)
        self._contexts[salt] = context
        if len(self._contexts) > MAX_SALTS:
            self._contexts.popitem(last=False)
        logger.info(
            "KvextConnector: segments of one cache_salt are computed behind its first %d documents "
            "from now on, %d tokens, whose KV the prefix cache keeps.",
            *(len(documents), len(context.sink.token_ids) - len(self.sink_ids)),
        )
        return tuple(documents.values())

    def clear(self) -> None:
        """Choose anew."""
        self._contexts.clear()
        self._documents.clear()

    def _beginning(self, token_ids: Sequence[int]) -> tuple[int, ...]:
        share = min(MAX_DOCUMENT_TOKENS, self.max_context_tokens // NUM_DOCUMENTS)
        return tuple(token_ids[:share])

    def _sink(self, documents: Iterable[tuple[int, ...]], cache_salt: str | None) -> Sink:
        token_ids = (*self.sink_ids, *(token for each in documents for token in each))
        return Sink(token_ids, key_space(token_ids, cache_salt))


def key_space(sink_ids: Sequence[int], cache_salt: str | None) -> bytes:
    """What the keys of all segments begin with whose rows may stand for each other.

    A salt of None and an empty one are the same, as they are to vLLM.
    """
    facts = ["segment", list(sink_ids), cache_salt or ""]
    return hashlib.sha256(json.dumps(facts).encode()).digest()
