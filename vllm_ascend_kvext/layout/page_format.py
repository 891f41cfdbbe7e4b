# SPDX-License-Identifier: Apache-2.0
"""What decides the meaning of bytes in a page, beside the shapes of tensors.

Part of every fingerprint: pages of equal shape and dtype may hold their bytes in another order, or
in another number format.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass
from typing import Any

_CONV_STATE_LAYOUT_VARIABLE = "VLLM_SSM_CONV_STATE_LAYOUT"
_CONV_STATE_LAYOUT_DEFAULT = "SD"
"""``get_conv_state_layout`` in ``vllm/model_executor/layers/mamba/mamba_utils.py``."""


@dataclass(frozen=True, slots=True)
class PageFormat:
    """How the kernels of a worker write pages.

    Attributes:
        device_type: Such as ``cpu`` or ``npu``.
        attention_backends: Names of the backends, sorted.
        instruction_set: For which the CPU backend orders a page; empty on devices.
        cache_dtype: The number format by name, such as ``bfloat16`` or ``fp8_e5m2``: tensors of
            either fp8 are plain bytes.
        conv_state_layout: Which axis of a convolution's state comes first: ``SD`` or ``DS``.
        row_order: ``NZ`` where kernels tile pages, else ``ND``.
    """

    device_type: str
    attention_backends: tuple[str, ...]
    instruction_set: str
    cache_dtype: str
    conv_state_layout: str
    row_order: str

    def describe(self) -> dict[str, Any]:
        """As it enters a fingerprint."""
        return asdict(self)


def read_page_format(
    vllm_config: Any,
    *,
    device_type: str,
    attention_backends: Iterable[str],
    instruction_set: str,
    has_nz_pages: bool,
    environ: Mapping[str, str],
) -> PageFormat:
    """The format of a worker's pages.

    Args:
        vllm_config: vLLM's ``VllmConfig``.
        device_type: Of the registered tensors.
        attention_backends: Names of the backends of all layers, in any order.
        instruction_set: What the CPU attention backend has chosen; empty on devices.
        has_nz_pages: Whether any layer has tiled pages, see ``WorkerConfig``.
        environ: Of the process, once vLLM's platform has set its defaults.
    """
    cache_dtype = str(vllm_config.cache_config.cache_dtype)
    if cache_dtype == "auto":
        cache_dtype = str(vllm_config.model_config.dtype).removeprefix("torch.")
    return PageFormat(
        device_type=device_type,
        attention_backends=tuple(sorted(set(attention_backends))),
        instruction_set=instruction_set,
        cache_dtype=cache_dtype,
        conv_state_layout=environ.get(_CONV_STATE_LAYOUT_VARIABLE) or _CONV_STATE_LAYOUT_DEFAULT,
        row_order="NZ" if has_nz_pages else "ND",
    )
