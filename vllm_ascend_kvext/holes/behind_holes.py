# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vllm-ascend-kvext project
"""Plans how much of a prompt can be loaded from the host tier if the holes in between are computed.

Block hashes are chained. So a block with the right hash holds what this prompt needs, even behind a
hole. Only the holes are computed.
"""

from __future__ import annotations

import bisect
from collections.abc import Sequence

from vllm_ascend_kvext.holes.load_plan import LoadPlan, loaded_spans, spans_within, with_holes
from vllm_ascend_kvext.store.entries import Entry
from vllm_ascend_kvext.store.lookup import Hit
from vllm_ascend_kvext.store.tier import HostTier
from vllm_ascend_kvext.token_range import TokenRange, without


def plan_behind_holes(
    tier: HostTier, hit: Hit, num_tokens: int, min_run_tokens: int
) -> LoadPlan | None:
    """A plan that also loads what is stored behind missing rows; None if that is not worth it.

    If the model has windows or states, a hole is computed from the last boundary at which tails are
    stored. Windows and states that the device has are ignored.

    Args:
        min_run_tokens: A shorter run behind a hole is computed.
    """
    geometry = tier.geometry
    after_tokens = hit.after_tokens
    if after_tokens % geometry.unit_tokens or hit.shortfall is None or not geometry.needs_rows:
        return None
    lookup = tier.lookup(hit.prefix)
    runs = lookup.find_runs(num_tokens - 1, after_tokens)
    if not runs or runs[-1].end_tokens <= hit.boundary_tokens:
        return None
    tails: dict[int, Entry] = {}
    if geometry.needs_tails:
        found = lookup.find_all_tails(runs[-1].end_tokens, after_tokens)
        tails = {entry.piece.end_tokens: entry for entry in found}
    starts = sorted(tails) if geometry.needs_tails else None
    device = [TokenRange(0, after_tokens)] if after_tokens else []
    rows = [*device, *(TokenRange(run.first_tokens, run.end_tokens) for run in runs)]
    computed = plan_spans(num_tokens, rows, starts, min_run_tokens)
    *holes, end = computed
    if not holes or holes[0].first_tokens < after_tokens:
        return None
    boundary_tokens = end.first_tokens
    cached = without([TokenRange(0, num_tokens)], computed)
    stored = (span for run in runs for span in loaded_spans(run.rows))
    loaded = spans_within(stored, cached)
    begins = {boundary_tokens, *(hole.first_tokens for hole in holes)}
    needed = {begin: entry for begin, entry in tails.items() if begin in begins}
    spans = tuple(with_holes(after_tokens, loaded, boundary_tokens))
    return LoadPlan(hit.prefix, after_tokens, boundary_tokens, spans, needed)


def plan_spans(
    num_tokens: int,
    rows: Sequence[TokenRange],
    starts: Sequence[int] | None = None,
    min_run_tokens: int = 0,
) -> tuple[TokenRange, ...]:
    """The spans of a prompt that are computed, ascending. The last span ends with the prompt.

    A computed span reads what lies before it: all rows of full attention, and the windows and
    states of its first token if the model has some. So a span begins only where windows and states
    are cached, or where the span before it ends. A hole may begin earlier than the missing rows::

        rows               [cached    ][hole ][cached        ][hole ][cached   ]
        windows            ^0                      ^                          ^
        computed           [=================]     [================]         [=]

    Each span begins as late as it can. The spans never have more tokens than the rest of a prompt
    from its first missing token on.

    Args:
        rows: Ascending runs of tokens whose rows are cached in all groups of full attention. The
            last token, whose output is wanted, is not in them.
        starts: Tokens, ascending, at which windows and states are cached. The first token of the
            prompt needs no windows or states. None if the model has neither; a span then begins
            anywhere.
        min_run_tokens: A shorter cached run behind a hole is computed with the hole.
    """
    computed: list[TokenRange] = []
    for hole in without([TokenRange(0, num_tokens)], rows):
        after_tokens = computed[-1].end_tokens if computed else 0
        first_tokens = hole.first_tokens
        if starts is not None:
            place = bisect.bisect_right(starts, first_tokens)
            first_tokens = max(after_tokens, starts[place - 1] if place else 0)
        if computed and first_tokens - after_tokens < max(1, min_run_tokens):
            first_tokens = computed.pop().first_tokens
        computed.append(TokenRange(first_tokens, hole.end_tokens))
    return tuple(computed)
