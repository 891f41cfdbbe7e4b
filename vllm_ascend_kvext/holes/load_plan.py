# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vllm-ascend-kvext project
"""A plan of where the KV of a prompt comes from: the device, a load, or computing.

A plan is made once, when the prompt is looked up. It then decides which entries are pinned, how
many blocks are needed, what workers load, and which holes are computed. Its spans ascend without a
gap::

    tokens      0 ── after_tokens ──────────────────────────────── boundary_tokens ── end
    spans       (device) [loaded  ][computed][loaded    ][computed][loaded        ] (computed)

Tails are loaded where computing begins: at the boundary, and at the holes of models with windows.
The module does not know why a span is loaded or computed.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

from vllm_ascend_kvext.store.entries import Entry
from vllm_ascend_kvext.store.lookup import Hit, StoredRows
from vllm_ascend_kvext.store.prefix import Prefix
from vllm_ascend_kvext.token_range import TokenRange, union


class Span(NamedTuple):
    """Consecutive tokens of a prompt.

    Attributes:
        entry: The entry whose rows are loaded; None if they are only computed.
        entry_tokens: Tokens of the entry's prefix before the first of these rows.
        is_computed: Whether the rows are computed. If the span also has an entry, the entry's rows
            are loaded first, are compared with the question, and are then computed anew.
        is_exact: True if the rows come from another prefix, but equal those that this prompt would
            compute.
    """

    first_tokens: int
    end_tokens: int
    entry: Entry | None = None
    entry_tokens: int = 0
    is_computed: bool = False
    is_exact: bool = False

    @property
    def num_tokens(self) -> int:
        return self.end_tokens - self.first_tokens


@dataclass(frozen=True)
class LoadPlan:
    """The plan of one prompt. All of it is exact; an extension may have plans of a subclass.

    Attributes:
        spans: The spans from ``after_tokens`` to ``boundary_tokens``. Empty if the model has no
            rows.
        tails: The tails that are loaded, by boundary.
    """

    prefix: Prefix
    after_tokens: int
    boundary_tokens: int
    spans: tuple[Span, ...]
    tails: Mapping[int, Entry]

    @property
    def num_tokens(self) -> int:
        """The tokens between those on the device and the boundary."""
        return self.boundary_tokens - self.after_tokens

    @property
    def exact_tokens(self) -> int:
        """The number of tokens whose rows are the prompt's own.

        Later rows belong to other prefixes, or are computed behind such rows.
        """
        return self.boundary_tokens

    @property
    def is_exact(self) -> bool:
        """Whether all of it is the prompt's own prefix."""
        return self.exact_tokens == self.boundary_tokens

    @property
    def num_window_blocks(self) -> int:
        """The further blocks for windows that an extension's plan needs before the request runs."""
        return 0

    @cached_property
    def entries(self) -> tuple[Entry, ...]:
        """Everything that is read, once each: rows in ascending order, then tails.

        Before each tails come those that they continue.
        """
        rows = [span.entry for span in self.spans if span.entry is not None]
        tails = [each for entry in self.tails.values() for each in entry.chain]
        return tuple(dict.fromkeys((*rows, *tails)))

    @cached_property
    def holes(self) -> tuple[TokenRange, ...]:
        """The runs of tokens computed before the boundary, ascending, as few as possible."""
        return union(
            TokenRange(span.first_tokens, span.end_tokens)
            for span in self.spans
            if span.is_computed
        )

    @property
    def hole_tokens(self) -> int:
        return sum(hole.num_tokens for hole in self.holes)

    @property
    def loaded_tokens(self) -> int:
        return self.num_tokens - self.hole_tokens

    @property
    def num_bytes(self) -> int:
        """Bytes in host memory of all that is read."""
        return sum(entry.num_bytes for entry in self.entries)

    @property
    def exact_spans(self) -> Iterator[Span]:
        """Loaded rows of the prompt's own prefix."""
        for span in self.spans:
            if not span.is_computed and span.first_tokens < self.exact_tokens:
                yield span


def plan_of_hit(hit: Hit) -> LoadPlan:
    """The plan that stops at the first gap."""
    tails = {} if hit.tails is None else {hit.boundary_tokens: hit.tails}
    return LoadPlan(
        hit.prefix,
        hit.after_tokens,
        hit.boundary_tokens,
        tuple(loaded_spans(hit.run.rows)),
        tails,
    )


def loaded_spans(rows: Iterable[StoredRows]) -> Iterator[Span]:
    """Spans of rows that are loaded to where they were stored."""
    for entry, first_tokens, end_tokens in rows:
        yield Span(first_tokens, end_tokens, entry, first_tokens)


def with_holes(first_tokens: int, loaded: Iterable[Span], end_tokens: int) -> Iterator[Span]:
    """Loaded spans, ascending, and computed spans between them and up to the end."""
    for span in loaded:
        if first_tokens < span.first_tokens:
            yield Span(first_tokens, span.first_tokens, is_computed=True)
        yield span
        first_tokens = span.end_tokens
    if first_tokens < end_tokens:
        yield Span(first_tokens, end_tokens, is_computed=True)


def spans_within(spans: Iterable[Span], ranges: Sequence[TokenRange]) -> Iterator[Span]:
    """The parts of loaded spans that lie in some ranges.

    Spans and ranges ascend, and are disjoint. There may be thousands of them.
    """
    num_behind = 0  # Ranges that end before the span.
    for span in spans:
        while num_behind < len(ranges) and ranges[num_behind].end_tokens <= span.first_tokens:
            num_behind += 1
        for index in range(num_behind, len(ranges)):
            run = ranges[index]
            if span.end_tokens <= run.first_tokens:
                break
            if run.first_tokens <= span.first_tokens and span.end_tokens <= run.end_tokens:
                yield span
                break
            first = max(span.first_tokens, run.first_tokens)
            end = min(span.end_tokens, run.end_tokens)
            entry_tokens = span.entry_tokens + first - span.first_tokens
            yield span._replace(first_tokens=first, end_tokens=end, entry_tokens=entry_tokens)
