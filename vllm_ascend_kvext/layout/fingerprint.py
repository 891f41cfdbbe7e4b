# SPDX-License-Identifier: Apache-2.0
"""One text for everything that decides what stored bytes mean; part of the key of stored KV.

Two workers with equal fingerprints can load each other's chunks. What a restart may change without
changing stored bytes is left out: addresses, page strides, the number of pages.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from typing import Any

from vllm_ascend_kvext.layout.errors import LayoutError
from vllm_ascend_kvext.layout.model import KVLayout, LayoutGroup, StatePolicy
from vllm_ascend_kvext.transfer.schema import HOST_ALIGNMENT_BYTES

FORMAT = 1
"""Raise when chunks are arranged differently: ``rows``, ``host_layout``."""


def layout_fingerprint(
    layout: KVLayout,
    *,
    model: Mapping[str, Any],
    parallel: Mapping[str, Any],
    states: StatePolicy = StatePolicy.EXACT,
    page_format: str | None = None,
) -> str:
    """SHA-256 as 64 hexadecimal digits; equal across processes and orders of mappings.

    Args:
        layout: Groups, planes and their sizes.
        model: What the values depend on: name, revision, quantization and so on; values that JSON
            has.
        parallel: Sizes and this worker's ranks: tensor, pipeline, context parallel.
        states: What becomes of state groups.
        page_format: Whatever decides the order of bytes inside a packed page: platform, backend,
            instruction set.

    Raises:
        LayoutError: If pages are packed and ``page_format`` is missing, or a value is of a type
            that has no canonical text.
    """
    packed = [p.layer_name for g in layout.groups for p in g.planes if p.is_packed]
    if packed and not page_format:
        raise LayoutError(
            f"fingerprint: {len(packed)} planes are packed, the first is of layer {packed[0]}, and "
            "page_format is not given; name the platform, attention backend and instruction set"
        )
    description = {
        "format": FORMAT,
        "host_alignment_bytes": HOST_ALIGNMENT_BYTES,
        "groups": [_describe(group) for group in layout.groups],
        "model": model,
        "parallel": parallel,
        "states": states.value,
        "page_format": page_format if packed else None,
    }
    return hashlib.sha256(_canonical(description).encode()).hexdigest()


def _describe(group: LayoutGroup) -> dict[str, Any]:
    return {
        "scheduler_group": group.scheduler_group,
        "kind": group.kind.value,
        "holds_states": group.holds_states,
        "tokens_per_page": group.tokens_per_page,
        "tokens_per_row": group.tokens_per_row,
        "window_tokens": group.window_tokens,
        "restart_tokens": group.restart_tokens,
        "planes": [
            [plane.layer_name, plane.row_bytes, plane.dtype, plane.is_packed]
            for plane in group.planes
        ],
    }


def _canonical(description: Mapping[str, Any]) -> str:
    _check_keys(description, "fingerprint")
    try:
        return json.dumps(
            description, sort_keys=True, separators=(",", ":"), ensure_ascii=True, allow_nan=False
        )
    except (TypeError, ValueError) as error:
        raise LayoutError(
            f"fingerprint: expected numbers, texts, booleans, None, lists and mappings ({error}); "
            "turn other values into text"
        ) from error


def _check_keys(value: Any, where: str) -> None:
    """JSON would turn other keys into texts, and make 1 and "1" one."""
    if isinstance(value, Mapping):
        for key, item in value.items():
            if not isinstance(key, str):
                raise LayoutError(
                    f"{where}: key {key!r} is a {type(key).__name__}, expected a text; "
                    "turn it into one"
                )
            _check_keys(item, f"{where}.{key}")
    elif isinstance(value, (list, tuple)):
        for index, item in enumerate(value):
            _check_keys(item, f"{where}[{index}]")
