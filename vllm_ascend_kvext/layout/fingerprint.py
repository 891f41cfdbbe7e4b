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
from vllm_ascend_kvext.layout.page_format import PageFormat
from vllm_ascend_kvext.transfer.schema import HOST_ALIGNMENT_BYTES

FORMAT = 3
"""Raise when chunks are arranged differently: ``rows``, ``row_map``, ``host_arrangement``."""


def layout_fingerprint(
    layout: KVLayout,
    *,
    model: Mapping[str, Any],
    parallel: Mapping[str, Any],
    page_format: PageFormat,
    states: StatePolicy = StatePolicy.EXACT,
) -> str:
    """SHA-256 as 64 hexadecimal digits; equal across processes and orders of mappings.

    Args:
        layout: Groups, planes and their sizes.
        model: What the values depend on: name, revision, quantization and so on; values that JSON
            has.
        parallel: Sizes and this worker's ranks: tensor, pipeline, context parallel.
        page_format: What decides the meaning of bytes in a page beside shapes and dtypes.
        states: What becomes of state groups.

    Raises:
        LayoutError: If a value is of a type that has no canonical text.
    """
    description = {
        "format": FORMAT,
        "host_alignment_bytes": HOST_ALIGNMENT_BYTES,
        "groups": [_describe(group) for group in layout.groups],
        "model": model,
        "parallel": parallel,
        "states": states.value,
        "page_format": page_format.describe(),
    }
    return hashlib.sha256(_canonical(description).encode()).hexdigest()


def _describe(group: LayoutGroup) -> dict[str, Any]:
    return {
        "scheduler_group": group.scheduler_group,
        "kind": group.kind.value,
        "holds_states": group.holds_states,
        "compress_ratio": group.compress_ratio,
        "tokens_per_page": group.tokens_per_page,
        "tokens_per_row": group.tokens_per_row,
        "window_tokens": group.window_tokens,
        "restart_tokens": group.restart_tokens,
        "planes": [
            [
                plane.layer_name,
                plane.row_bytes,
                plane.dtype,
                plane.is_packed,
                plane.is_replicated,
                plane.axes,
            ]
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
