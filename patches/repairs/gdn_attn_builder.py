# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vllm-ascend-kvext project
"""``vllm_ascend/ops/gdn_attn_builder.py``: the last tokens of a prompt are no drafts.

vLLM-Ascend 0.23.0 chooses decode graphs by shape. So it takes the rest of a prompt that is as long
as a decode with drafts for such a decode, all of whose drafts were accepted. The layer then goes on
from the state behind the last draft of the step before. A prompt has no such state: its state is
where a decode that has accepted no draft finds its own.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from vllm_ascend_kvext.patching.declaration import BEFORE_0_30, Patch

if TYPE_CHECKING:
    import torch


def leave_prompts_alone(
    wrapped: Callable[..., tuple[torch.Tensor, torch.Tensor | None]],
    builder: Any,
    common_attn_metadata: Any,
    spec_sequence_masks_cpu: torch.Tensor,
    num_accepted_tokens: torch.Tensor | None,
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Take no prompt for a decode, unless a decode graph may be replayed for this step."""
    if builder.vllm_config.compilation_config.cudagraph_mode.has_full_cudagraphs():
        return wrapped(common_attn_metadata, spec_sequence_masks_cpu, num_accepted_tokens)
    return spec_sequence_masks_cpu, num_accepted_tokens


_BUILDER = "vllm_ascend.ops.gdn_attn_builder:AscendGDNAttentionMetadataBuilder"

PATCHES = (
    Patch(
        id="KVX-328",
        target=f"{_BUILDER}._fold_spec_sized_prefill_chunks_into_spec",
        feature="accepted-drafts",
        vllm=BEFORE_0_30,
        wrapper=leave_prompts_alone,
        why="vLLM-Ascend 0.23.0 computes the rest of a prompt that is as long as a decode with "
        "drafts as such a decode, and goes on from a state that is not the request's.",
        retire_when="0.23.0 is not supported any more: 0.30.0rc2 does not do so",
        when_imported=True,
    ),
)
