# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vllm-ascend-kvext project
"""``vllm_ascend/quantization/methods/kv_cache/kv_c8.py``: 8-bit KV beside a KV connector.

The checkpoint of a dense model may have scales for keys and values in 8 bits (C8). Beside a
connector, vLLM-Ascend's attention computes only the steps that a P or D node usually has: prompts
of a P node, with KV that is not quantized, and steps of a D node with one token for each request.
It returns from any other step without a result, and the model goes on with whatever is in the
buffer. In an engine of role ``kv_both`` these are the decode steps. On a D node these are the steps
with a prompt, as after a failed transfer. On a P node these are steps with one token for each
request, as for a prompt of which the prefix cache has the rest.

With this repair, a step of a P node that has no result computes without quantized KV, as its other
steps do. Other attention computes as in an engine without a connector.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from functools import partial
from typing import Any

from vllm_ascend_kvext.patching.declaration import BEFORE_0_30, SINCE_0_30, Patch


def quantize_as_without_a_connector(
    wrapped: Callable[[Any], None], method: Any, layer: Any
) -> None:
    """Create the parameters of a layer whose keys and values are kept in 8 bits.

    Args:
        method: ``AscendC8KVCacheAttentionMethod``.
        layer: A layer of attention. ``impl.forward`` asks its own configuration for a connector.
    """
    from vllm.config import get_current_vllm_config

    config = get_current_vllm_config()
    transfer = config.kv_transfer_config
    attention = getattr(layer, "impl", None)
    if transfer is None or attention is None:
        wrapped(layer)
    elif transfer.is_kv_consumer:
        method.is_kv_producer = False
        wrapped(layer)
        without_connector = copy.copy(config)
        without_connector.kv_transfer_config = None
        attention.vllm_config = without_connector
    else:
        compute_floats = attention.forward
        wrapped(layer)
        attention.forward = partial(_compute_any_step, attention.forward, compute_floats)


def _compute_any_step(
    compute: Callable[..., Any], compute_floats: Callable[..., Any], *args: Any, **kwargs: Any
) -> Any:
    """Compute a step of a P node; without quantized KV where upstream has no result.

    Upstream has written nothing then. What it has computed from the scales, which
    ``MooncakeLayerwiseConnector`` reads, stays.
    """
    found = compute(*args, **kwargs)
    return compute_floats(*args, **kwargs) if found is None else found


_METHODS = "vllm_ascend.quantization.methods"
_METHOD = "kv_c8:AscendC8KVCacheAttentionMethod.create_weights"
_patch = partial(
    Patch,
    feature="c8-beside-connectors",
    wrapper=quantize_as_without_a_connector,
    why="With KV in 8 bits (C8) and a connector, vLLM-Ascend's attention returns from some steps "
    "without a result. Requests answer wrong.",
    retire_when="`AscendC8AttentionBackendImpl.forward` has a result for every step, whatever the "
    "role of the connector",
    relies_on=("vllm_ascend.attention.attention_v1:AscendC8AttentionBackendImpl.forward",),
    when_imported=True,
)

PATCHES = (
    _patch(id="KVX-190", target=f"{_METHODS}.{_METHOD}", vllm=BEFORE_0_30),
    _patch(id="KVX-191", target=f"{_METHODS}.kv_cache.{_METHOD}", vllm=SINCE_0_30),
)
