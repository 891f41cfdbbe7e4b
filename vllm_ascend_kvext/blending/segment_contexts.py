# SPDX-License-Identifier: Apache-2.0
"""What segments are computed behind: with ``segment_context``, other documents of their salt.

Behind what prompts begin with, and other documents, the KV of one comes nearer to what it is in a
prompt: nearest behind about as many as stand before it there. So it is stored behind none, a few
and many. What the first prompts of a salt have in common before their documents, and its first
documents, become its contexts, and stay that: a segment behind another context is another segment.
See ``docs/blending_contexts.md``.
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

logger = logging.getLogger("vllm.ascend_kvext.blending")

FEW_DOCUMENTS, NUM_DOCUMENTS = 2, 8
MAX_DOCUMENT_TOKENS = 256
"""What was measured: two and eight documents of 100 to 200 tokens. Of longer ones, the beginnings,
which is worse."""

NUM_PROMPTS = 4
"""So many are compared with each other: one may begin with what only its user has said."""

MAX_BEGINNING_TOKENS = 2048
MAX_DOCUMENTS_SHARE, MAX_BEGINNING_SHARE = 1 / 2, 1 / 4
"""Of the longest request."""

MAX_SALTS, MAX_WAITING_DOCUMENTS = 128, 64
"""So many salts have a context, and as many wait for one, each with so many of its documents."""


class Sink(NamedTuple):
    """What segments are computed behind; keys of what may stand for each other have one space."""

    token_ids: tuple[int, ...]
    space: bytes
    num_documents: int = 0
    has_context: bool = False


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
        self._num_prompts = NUM_PROMPTS if reads_prompts else 0
        max_documents_tokens = int(max_request_tokens * MAX_DOCUMENTS_SHARE)
        self._document_tokens = min(MAX_DOCUMENT_TOKENS, max_documents_tokens // NUM_DOCUMENTS)
        self._max_beginning_tokens = min(
            MAX_BEGINNING_TOKENS, int(max_request_tokens * MAX_BEGINNING_SHARE)
        )
        self._contexts: OrderedDict[str, _Context] = OrderedDict()
        self._waiting: OrderedDict[str, _Waiting[Document]] = OrderedDict()

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
        context = self._contexts.get(cache_salt or "")
        if context is not None:
            self._contexts.move_to_end(cache_salt or "")
            # Its tokens a second time would be copied: that makes it worse than no context does.
            sinks = context.of_documents.get(self._beginning(token_ids), context.sinks)
            max_tokens = self._max_request_tokens - len(token_ids)
            found = [each for each in sinks if len(each.token_ids) < max_tokens]
        found.append(self.without_context(cache_salt))
        return sorted(
            found,
            key=lambda each: (
                each.num_documents < num_before,
                abs(each.num_documents - num_before),
            ),
        )

    def note_prompt(
        self, token_ids: Sequence[int], first_tokens: int, cache_salt: str | None
    ) -> Sequence[Document]:
        """A prompt has come, whose first segment begins at ``first_tokens``.

        Returns:
            What is to be stored behind contexts from now on, as `add` does.
        """
        salt = cache_salt or ""
        if not self._document_tokens or salt in self._contexts:
            return ()
        waiting = self._wait(salt)
        if waiting.num_prompts < self._num_prompts:
            waiting.add_prompt(token_ids[: min(first_tokens, self._max_beginning_tokens)])
        return self._complete(salt, waiting)

    def add(
        self, token_ids: Sequence[int], cache_salt: str | None, document: Document
    ) -> Sequence[Document]:
        """A document has been stored; what is to be stored behind contexts from now on.

        That is the document or, where it has completed the contexts, all that were waiting.
        """
        salt = cache_salt or ""
        if not self._document_tokens:
            return ()
        if salt in self._contexts:
            return (document,)
        if len(token_ids) < self._min_tokens:
            return ()
        waiting = self._wait(salt)
        beginning = self._beginning(token_ids)
        if beginning in waiting.documents or len(waiting.documents) < MAX_WAITING_DOCUMENTS:
            waiting.documents[beginning] = document
        return self._complete(salt, waiting)

    def clear(self) -> None:
        """Choose anew."""
        self._contexts.clear()
        self._waiting.clear()

    def _wait(self, salt: str) -> _Waiting[Document]:
        waiting = self._waiting.setdefault(salt, _Waiting())
        self._waiting.move_to_end(salt)
        if len(self._waiting) > MAX_SALTS:
            self._waiting.popitem(last=False)
        return waiting

    def _complete(self, salt: str, waiting: _Waiting[Document]) -> Sequence[Document]:
        """Make the contexts of a salt, if all that they need is there."""
        num_documents = len(waiting.documents)
        if num_documents < NUM_DOCUMENTS or waiting.num_prompts < self._num_prompts:
            return ()
        del self._waiting[salt]
        first_ids = waiting.common_ids if self._num_prompts else ()
        if len(first_ids) <= len(self.sink_ids):
            first_ids = self.sink_ids
        documents = list(waiting.documents)[:NUM_DOCUMENTS]
        others = {each: [other for other in documents if other != each] for each in documents}
        sink = cache(partial(self._sink, first_ids, salt))  # Most documents share most of them.
        self._contexts[salt] = context = _Context(
            self._sinks(sink, documents),
            {each: self._sinks(sink, of_each) for each, of_each in others.items()},
        )
        if len(self._contexts) > MAX_SALTS:
            self._contexts.popitem(last=False)
        logger.info(
            "KvextConnector: segments of one cache_salt are computed again from now on: behind the "
            "%d tokens that its prompts begin with, and %d and %d of its first documents, %d "
            "tokens at most, whose KV the prefix cache keeps.",
            *(len(first_ids), FEW_DOCUMENTS, NUM_DOCUMENTS),
            len(context.sinks[-1].token_ids),
        )
        return tuple(waiting.documents.values())

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
class _Waiting(Generic[Document]):
    """What is known of a salt without contexts: documents, and how all prompts so far begin."""

    documents: dict[Beginning, Document] = field(default_factory=dict)
    common_ids: tuple[int, ...] = ()
    num_prompts: int = 0

    def add_prompt(self, ids: Sequence[int]) -> None:
        if self.num_prompts:
            pairs = zip(self.common_ids, ids, strict=False)
            ids = [each for each, _ in takewhile(lambda pair: pair[0] == pair[1], pairs)]
        self.common_ids = tuple(ids)
        self.num_prompts += 1


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
