# SPDX-License-Identifier: Apache-2.0
"""What segments are computed behind: other documents of their salt, as soon as some are stored.

Behind other documents, the KV of one comes nearer to what it is in a prompt of documents: see
``docs/blending.md``. The first ones of a salt become its context, and stay that: a segment behind
another context is another segment.
"""

from __future__ import annotations

import hashlib
import json
import logging
from collections import OrderedDict
from collections.abc import Sequence
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


class SegmentContexts:
    """The sinks of one engine, by salt.

    Args:
        sink_ids: What all segments are computed behind, contexts too.
        max_context_tokens: How long a context may be; 0 for none.
    """

    def __init__(self, sink_ids: Sequence[int], max_context_tokens: int) -> None:
        self.sink_ids = tuple(sink_ids)
        self.max_context_tokens = max_context_tokens
        self._sinks: OrderedDict[str, Sink] = OrderedDict()
        self._documents: OrderedDict[str, dict[tuple[int, ...], None]] = OrderedDict()

    def first_of(self, cache_salt: str | None) -> Sink:
        """The sink without a context."""
        return Sink(self.sink_ids, key_space(self.sink_ids, cache_salt))

    def of(self, cache_salt: str | None) -> Sink:
        """The sink of what is stored from now on. A salt of None and an empty one are the same."""
        return self._sinks.get(cache_salt or "") or self.first_of(cache_salt)

    def add(self, token_ids: tuple[int, ...], cache_salt: str | None) -> Sequence[tuple[int, ...]]:
        """A document has been stored; the documents of the context that its salt has now got."""
        salt = cache_salt or ""
        if not self.max_context_tokens or salt in self._sinks:
            return ()
        documents = self._documents.setdefault(salt, {})
        documents[token_ids] = None
        if len(documents) < NUM_DOCUMENTS:
            _forget_oldest(self._documents)
            return ()
        share = min(MAX_DOCUMENT_TOKENS, self.max_context_tokens // NUM_DOCUMENTS)
        context = [token for each in documents for token in each[:share]]
        with_context = (*self.sink_ids, *context)
        self._sinks[salt] = Sink(with_context, key_space(with_context, cache_salt))
        del self._documents[salt]
        _forget_oldest(self._sinks)
        logger.info(
            "KvextConnector: segments of one cache_salt are computed behind its first %d documents "
            "from now on, %d tokens, whose KV the prefix cache keeps. segment_sink chooses another "
            "text.",
            *(len(documents), len(context)),
        )
        return tuple(documents)

    def clear(self) -> None:
        """Choose anew."""
        self._sinks.clear()
        self._documents.clear()


def key_space(sink_ids: Sequence[int], cache_salt: str | None) -> bytes:
    """What the keys of all segments begin with whose rows may stand for each other.

    A salt of None and an empty one are the same, as they are to vLLM.
    """
    facts = ["segment", list(sink_ids), cache_salt or ""]
    return hashlib.sha256(json.dumps(facts).encode()).digest()


def _forget_oldest(of_salts: OrderedDict[str, Any]) -> None:
    if len(of_salts) > MAX_SALTS:
        of_salts.popitem(last=False)
