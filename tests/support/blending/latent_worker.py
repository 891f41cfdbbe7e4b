# SPDX-License-Identifier: Apache-2.0
"""A worker with pages of latents, that stores segments and blends prompts without an engine.

What an engine's scheduler and worker do to a segment, in their order, by the same code: places in
the store, rows out of the pages, the plan of a prompt, rows into other pages. Then the model
computes what the plan does not reuse.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch

from support.blending.latent_model import (
    DeepseekScalingRotaryEmbedding,
    LatentModel,
    LatentPages,
    PageFormat,
)
from support.blending.latent_oracle import frequencies
from support.blending.latent_weights import Sizes, Weights
from support.layout.fakes import AscendMLAAttentionSpec, MLAAttentionSpec, config
from vllm_ascend_kvext.blending.attention_keys import LayerKeys, read_layer_keys
from vllm_ascend_kvext.blending.blend_plan import BlendPlan, behind_head, plan_blend
from vllm_ascend_kvext.blending.device_token_pages import DeviceTokenPages, PlacedPlane
from vllm_ascend_kvext.blending.segment_mover import SegmentMover
from vllm_ascend_kvext.blending.segment_rows import SegmentLayout, SegmentRows
from vllm_ascend_kvext.blending.segment_store import SegmentStore, rows_to_load
from vllm_ascend_kvext.blending.segments import Segment
from vllm_ascend_kvext.blending.token_pages import TokenPlane
from vllm_ascend_kvext.connector.worker_segments import placed_planes
from vllm_ascend_kvext.holes.span_plan import Run
from vllm_ascend_kvext.layout.build import build_layout
from vllm_ascend_kvext.layout.model import LayoutGroup, RowAddressing
from vllm_ascend_kvext.layout.transfer_plan import TablePart
from vllm_ascend_kvext.layout.views import storage_tensors
from vllm_ascend_kvext.layout.worker_config import WorkerConfig
from vllm_ascend_kvext.store.counters import Refusal
from vllm_ascend_kvext.store.lookup import PlacedRows
from vllm_ascend_kvext.store.prefix import TierGeometry
from vllm_ascend_kvext.store.tier import HostTier
from vllm_ascend_kvext.transfer.pools import Pools

NUM_PAGES, BLOCK_TOKENS = 80, 8
CHUNK_TOKENS, UNIT_TOKENS = 16, 4
"""A segment is stored in several sections."""
HOST_BYTES = 1 << 20
STAGING_BYTES = 11 * 400
"""Of some tokens: a load takes several calls."""
MOST_TOKENS = 400

ChangePlanes = Callable[[PlacedPlane], PlacedPlane]
ChangeRows = Callable[[SegmentRows], SegmentRows]
Tokens = Sequence[int]


class Blended(NamedTuple):
    """A prompt that was answered.

    Attributes:
        plan: What of it was reused and computed; None if nothing was reused.
        log_probabilities: Behind each token that was computed. shape: [tokens, vocabulary].
        table: Its pages.
    """

    plan: BlendPlan | None
    log_probabilities: torch.Tensor
    table: list[int]


class LatentWorker:
    """One model, its pages, and a host buffer.

    Args:
        weights: Of the model.
        sizes: Of the model.
        page_format: How its rows lie.
        sink_ids: Token ids that segments are computed behind.
        change_planes: What is known of a plane, made wrong.
    """

    def __init__(
        self,
        weights: Weights,
        sizes: Sizes,
        page_format: PageFormat,
        sink_ids: Sequence[int],
        change_planes: ChangePlanes = lambda placed: placed,
    ) -> None:
        self.pages = LatentPages(page_format, sizes, NUM_PAGES, BLOCK_TOKENS)
        rotary = DeepseekScalingRotaryEmbedding(sizes, frequencies(sizes), 2 * MOST_TOKENS)
        self._model = LatentModel(weights, sizes, rotary, self.pages)
        self._random = random.Random(5)
        names, keys = _read_keys(rotary, sizes)
        kv_caches = {
            name: tensors[0] if len(tensors) == 1 else tuple(tensors)
            for name, tensors in zip(names, self.pages.of_layers, strict=True)
        }
        is_ascend = page_format is PageFormat.TWO_TENSORS
        spec = (AscendMLAAttentionSpec if is_ascend else MLAAttentionSpec)(
            block_size=BLOCK_TOKENS, head_size=sizes.rank + sizes.rope, dtype=torch.float32
        )
        layout = build_layout(
            config(NUM_PAGES, (spec, *names)),
            kv_caches,
            WorkerConfig(),
            addressing=RowAddressing.TOKENS,
        )
        (group,) = layout.groups
        planes_of = placed_planes if is_ascend else _joined_planes
        planes = [
            change_planes(plane) for name in names for plane in planes_of(name, keys[name], group)
        ]
        token_pages = DeviceTokenPages(
            planes,
            {group.scheduler_group: group.tokens_per_page},
            layout.num_pages,
            Pools.of(storage_tensors(layout, kv_caches)),
        )
        segment_layout = SegmentLayout(
            tuple(plane.row_bytes for plane in token_pages.planes), "of this worker"
        )
        host = torch.zeros(HOST_BYTES, dtype=torch.uint8)
        self._mover = SegmentMover(token_pages, host, segment_layout, staging_bytes=STAGING_BYTES)
        tier = HostTier(HOST_BYTES, TierGeometry(CHUNK_TOKENS, UNIT_TOKENS, needs_tails=False))
        self._store = SegmentStore(tier, segment_layout, "of this worker", sink_ids)

    def store(self, token_ids: Tokens) -> None:
        """Compute a segment alone, behind the sink, and store it; then its pages are gone."""
        prompt = [*self._store.sink_ids, *token_ids]
        table = self._new_table(len(prompt))
        self._model.compute(prompt, torch.arange(len(prompt)), table)
        prefix = self._store.prefix(token_ids, None)
        entries = self._store.begin_store(prefix)
        assert not isinstance(entries, Refusal)
        rows = [self._store.rows_of(prefix, entry, token_ids) for entry in entries]
        self._mover.store(rows, [TablePart(0, tuple(table))])
        for entry in entries:
            self._store.finish_store(prefix, entry)
        self.pages.forget(table)

    def blend(
        self,
        token_ids: Tokens,
        segments: Sequence[Segment],
        head_tokens: int,
        *,
        step_tokens: int = MOST_TOKENS,
        change_rows: ChangeRows = lambda rows: rows,
        found_for: Callable[[Tokens], Tokens] = lambda token_ids: token_ids,
    ) -> Blended:
        """Answer a prompt.

        Args:
            token_ids: Of it.
            segments: Where they stand in it.
            head_tokens: Of each segment that are computed.
            step_tokens: At most, that one step computes.
            change_rows: What is loaded, made wrong.
            found_for: Another segment whose rows are taken, of the same length.
        """
        table = self._new_table(len(token_ids))
        found: list[PlacedRows] = []
        candidates: list[Run] = []
        for segment in segments:
            prefix = self._store.prefix(found_for(token_ids[slice(*segment)]), None)
            rows = self._store.find(prefix, segment.first_tokens)
            stored_tokens = rows[-1].end_tokens - segment.first_tokens if rows else 0
            run = behind_head(segment, stored_tokens, head_tokens)
            if run is not None:
                found += rows
                candidates.append(run)
        plan = plan_blend(len(token_ids), 0, candidates, least_run_tokens=4)
        spans = [Run(0, len(token_ids))]
        if plan is not None:
            spans = [*plan.holes, Run(plan.resume_tokens, len(token_ids))]
            loads = [rows_to_load(rows) for run in plan.reused for rows in _cut(found, run)]
            self._mover.load([change_rows(rows) for rows in loads], [TablePart(0, tuple(table))])
        computed = torch.cat([torch.arange(*span) for span in spans])
        answers = [
            self._model.compute([token_ids[position] for position in step.tolist()], step, table)
            for step in computed.split(step_tokens)
        ]
        return Blended(plan, torch.cat(answers), table)

    def _new_table(self, num_tokens: int) -> list[int]:
        """Pages in any order, of which nothing is known; page 0 is the null page."""
        num_pages = -(-num_tokens // BLOCK_TOKENS)
        table = self._random.sample(range(1, NUM_PAGES), k=num_pages)
        self.pages.forget(table)
        return table


def _read_keys(rotary: torch.nn.Module, sizes: Sizes) -> tuple[list[str], dict[str, LayerKeys]]:
    """What the package makes of the model's modules."""
    model = torch.nn.Module()
    model.layers = torch.nn.ModuleList()
    attention: dict[str, Any] = {}
    for index in range(sizes.layers):
        layer = torch.nn.Module()
        layer.rotary_emb = rotary
        layer.mla_attn = torch.nn.Module()
        layer.mla_attn.kv_lora_rank, layer.mla_attn.qk_rope_head_dim = sizes.rank, sizes.rope
        model.layers.append(layer)
        attention[f"model.layers.{index}.mla_attn"] = layer.mla_attn
    dtypes = dict.fromkeys(attention, torch.float32)
    return list(attention), read_layer_keys(model, attention, dtypes)


def _joined_planes(name: str, keys: LayerKeys, group: LayoutGroup) -> list[PlacedPlane]:
    """The plane of a layer whose row is a latent with what is rotated behind it."""
    (plane,) = (plane for plane in group.planes if plane.layer_name == name)
    signature = keys.signature
    of_tokens = TokenPlane(
        name, group.scheduler_group, 1, signature.head_elements, signature.dtype, signature
    )
    assert of_tokens.row_bytes == plane.row_bytes
    return [
        PlacedPlane(
            of_tokens,
            plane.storage,
            plane.base_bytes,
            plane.page_stride_bytes,
            plane.region_offset_bytes,
        )
    ]


def _cut(found: Sequence[PlacedRows], run: Run) -> list[PlacedRows]:
    """What of the rows lies in a run."""
    return [
        rows._replace(
            first_tokens=first,
            end_tokens=end,
            entry_tokens=rows.entry_tokens + first - rows.first_tokens,
        )
        for rows in found
        if (first := max(rows.first_tokens, run.first_tokens))
        < (end := min(rows.end_tokens, run.end_tokens))
    ]
