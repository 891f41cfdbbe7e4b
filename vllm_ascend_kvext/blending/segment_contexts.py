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
from typing import Any, NamedTuple

logger = logging.getLogger("vllm.ascend_kvext.blending")

NUM_DOCUMENTS = 8
MAX_DOCUMENT_TOKENS = 192
"""What was measured: eight documents of 100 to 200 tokens. Of longer ones, the beginnings."""

MAX_CONTEXT_SHARE = 1 / 4
"""Of the longest request. Where less than a document has room, there is no context."""

MAX_SALTS = 1024


class Sink(NamedTuple):
    """What segments are computed behind; keys of what may stand for each other have one space."""

    token_ids: tuple[int, ...]
    space: bytes


class _Context(NamedTuple):
    """The sink of one salt, and those of the documents in it: the others of them."""

    sink: Sink
    of_documents: Mapping[tuple[int, ...], Sink]


class SegmentContexts:
    """The sinks of one engine, by salt. A salt of None and an empty one are the same.

    Args:
        sink_ids: What all segments are computed behind, contexts too.
        max_context_tokens: How long a context may be; 0 for none.
    """

    def __init__(self, sink_ids: Sequence[int], max_context_tokens: int) -> None:
        self.sink_ids = tuple(sink_ids)
        self.max_context_tokens = max_context_tokens
        self._contexts: OrderedDict[str, _Context] = OrderedDict()
        self._documents: OrderedDict[str, dict[tuple[int, ...], None]] = OrderedDict()

    def without_context(self, cache_salt: str | None) -> Sink:
        """The sink of what is stored before there is a context."""
        return self._sink((), cache_salt)

    def of(self, cache_salt: str | None, token_ids: Sequence[int]) -> Sink:
        """The sink of a document that is stored from now on."""
        context = self._contexts.get(cache_salt or "")
        if context is None:
            return self.without_context(cache_salt)
        # Its tokens a second time would be copied: that makes it worse than no context does.
        return context.of_documents.get(tuple(token_ids), context.sink)

    def add(self, token_ids: tuple[int, ...], cache_salt: str | None) -> Sequence[tuple[int, ...]]:
        """A document has been stored; the documents of the context that its salt has now got."""
        salt = cache_salt or ""
        if not self.max_context_tokens or salt in self._contexts:
            return ()
        documents = self._documents.setdefault(salt, {})
        documents[token_ids] = None
        if len(documents) < NUM_DOCUMENTS:
            _forget_oldest(self._documents)
            return ()
        del self._documents[salt]
        sink = self._sink(documents, cache_salt)
        others = {
            each: self._sink([other for other in documents if other != each], cache_salt)
            for each in documents
        }
        self._contexts[salt] = _Context(sink, others)
        _forget_oldest(self._contexts)
        logger.info(
            "KvextConnector: segments of one cache_salt are computed behind its first %d documents "
            "from now on, %d tokens, whose KV the prefix cache keeps.",
            *(len(documents), len(sink.token_ids) - len(self.sink_ids)),
        )
        return tuple(documents)

    def clear(self) -> None:
        """Choose anew."""
        self._contexts.clear()
        self._documents.clear()

    def _sink(self, documents: Iterable[tuple[int, ...]], cache_salt: str | None) -> Sink:
        share = min(MAX_DOCUMENT_TOKENS, self.max_context_tokens // NUM_DOCUMENTS)
        token_ids = (*self.sink_ids, *(token for each in documents for token in each[:share]))
        return Sink(token_ids, key_space(token_ids, cache_salt))


def key_space(sink_ids: Sequence[int], cache_salt: str | None) -> bytes:
    """What the keys of all segments begin with whose rows may stand for each other.

    A salt of None and an empty one are the same, as they are to vLLM.
    """
    facts = ["segment", list(sink_ids), cache_salt or ""]
    return hashlib.sha256(json.dumps(facts).encode()).digest()


def _forget_oldest(of_salts: OrderedDict[str, Any]) -> None:
    if len(of_salts) > MAX_SALTS:
        of_salts.popitem(last=False)
