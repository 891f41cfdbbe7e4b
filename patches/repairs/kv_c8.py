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

With this repair, attention of a P node computes all steps without quantized KV. Other attention
computes as in an engine without a connector.
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
    if config.kv_transfer_config is None:
        wrapped(layer)
    elif config.kv_transfer_config.is_kv_consumer:
        method.is_kv_producer = False
        wrapped(layer)
        without_connector = copy.copy(config)
        without_connector.kv_transfer_config = None
        layer.impl.vllm_config = without_connector
    else:
        attention_of_floats = type(layer.impl)
        wrapped(layer)
        layer.impl.__class__ = attention_of_floats


_METHODS = "vllm_ascend.quantization.methods"
_METHOD = "kv_c8:AscendC8KVCacheAttentionMethod.create_weights"
_patch = partial(
    Patch,
    feature="c8-beside-connectors",
    wrapper=quantize_as_without_a_connector,
    why="With KV in 8 bits (C8) and a connector of role kv_both or kv_consumer, vLLM-Ascend's "
    "attention returns from some steps without a result. Requests answer wrong.",
    retire_when="`AscendC8AttentionBackendImpl.forward` has a result for every step, whatever the "
    "role of the connector",
    relies_on=("vllm_ascend.attention.attention_v1:AscendC8AttentionBackendImpl.forward",),
    when_imported=True,
)

PATCHES = (
    _patch(id="KVX-190", target=f"{_METHODS}.{_METHOD}", vllm=BEFORE_0_30),
    _patch(id="KVX-191", target=f"{_METHODS}.kv_cache.{_METHOD}", vllm=SINCE_0_30),
)
