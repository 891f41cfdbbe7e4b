# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vllm-ascend-kvext project
"""One row of the table: a trace in every variant, behind a small pool.

Each variant has the same pool. Host memory is a share of what the trace leaves in an endless tier.
"""

from __future__ import annotations

import contextlib
import gc
from collections.abc import Iterator, Sequence
from unittest import mock

from host_tier.engine import Engine, host_memory
from host_tier.pages import pages_of
from host_tier.pools import small_pool
from host_tier.serving import Serving
from retention.layouts import get_layout
from support.connector.held import held_by

from holes.results import Result, Row, Variant
from holes.traces import trace_named
from vllm_ascend_kvext.store import eviction
from vllm_ascend_kvext.store.reuse import Reuse

ENDLESS_BYTES = 1 << 50
"""The size of an endless tier, more than a trace stores. It is only counted, and not allocated."""

MAX_ENTRIES = 1 << 30
"""More entries than a tier has."""


class Bench:
    """A trace on a layout, served within ``host_tier.cells.installed``.

    Args:
        layout_name: See ``get_layout``.
        trace_name: See ``trace_named``.
        scale: A factor on the size of the trace.
        store_policy: See ``StorePolicy``.
    """

    def __init__(self, layout_name: str, trace_name: str, scale: float, store_policy: str) -> None:
        self.layout = get_layout(layout_name)
        self.trace = trace_named(trace_name, scale * self.layout.thinning, self.layout.stretch)
        self.num_blocks = small_pool(self.layout, self.trace)
        self._scale = scale
        self._store_policy = store_policy

    def rows(self, shares: Sequence[float]) -> Iterator[Row]:
        """Serve the trace in every variant.

        Args:
            shares: Sizes of host memory, as shares of what an endless tier holds in the end.
        """
        alone = self.serve(Variant.ALONE, 0)
        endless = self.serve(Variant.PREFIX, ENDLESS_BYTES)
        for share in shares:
            host_bytes = int(share * endless.held_bytes)
            row = Row(
                self.layout.name, self.trace.name, self._scale, share, self.num_blocks, host_bytes
            )
            row.num_requests = len(self.trace.requests)
            row.prompt_tokens = self.trace.num_prompt_tokens
            row.endless = endless
            row.results[Variant.ALONE] = alone
            for variant in Variant:
                if variant is not Variant.ALONE:
                    row.results[variant] = self.serve(variant, host_bytes)
            yield row

    def serve(self, variant: Variant, host_bytes: int) -> Result:
        """Serve the trace in one variant with some host memory."""
        host = None
        if variant is not Variant.ALONE:
            pages = pages_of(self.layout.name, self.num_blocks)
            host = host_memory(
                pages,
                host_bytes,
                "all" if variant is Variant.LRU else self._store_policy,
                variant is Variant.HOLES,
            )
        gc.collect()
        engine = Engine(self.layout, self.num_blocks, host)
        unit_tokens = self.layout.hash_block_tokens
        with _latest_use() if variant is Variant.LRU else contextlib.nullcontext():
            outcome = Serving(engine, self.trace, unit_tokens, unit_tokens).run()
        result = Result(
            outcome.computed_tokens,
            outcome.computed_pairs,
            outcome.hole_tokens,
            num_preemptions=outcome.num_preemptions,
            scheduler_s=outcome.scheduler_s,
        )
        side = engine.side
        if side is not None:
            tier = side.counters.tier
            result.held_bytes = tier.bytes_held
            result.stored_bytes = sum(tier.stored_bytes.values())
            result.refusals = {why.value: n for why, n in tier.refused_stores.items() if n}
            result.num_leaks = side.references.num_references + len(held_by(side).pinned_ids)
        return result


@contextlib.contextmanager
def _latest_use() -> Iterator[None]:
    """Evict the least recently used of all entries. No option of the tier does this."""
    with (
        mock.patch.object(Reuse, "density", lambda *_: 0.0),
        mock.patch.object(eviction, "NUM_SAMPLED", MAX_ENTRIES),
    ):
        yield
