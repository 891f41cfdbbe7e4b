# SPDX-License-Identifier: Apache-2.0
"""How a prompt is served: what vLLM and the connector are told."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True, slots=True)
class Mode:
    """One way to serve.

    Attributes:
        name: As printed.
        prefix_caching: vLLM's.
        options: Of the connector, beyond those that all have; None: no connector.
    """

    name: str
    prefix_caching: bool = True
    options: Mapping[str, Any] | None = None

    @property
    def blends(self) -> bool:
        return self.options is not None

    def kv_transfer_config(self, host_gib: float) -> dict[str, Any] | None:
        """For vLLM.

        Args:
            host_gib: Host memory of the connector.
        """
        if self.options is None:
            return None
        extra = {"host_memory_gib": host_gib, "blending": True, **self.options}
        return {
            "kv_connector": "KvextConnector",
            "kv_role": "kv_both",
            "kv_connector_module_path": "vllm_ascend_kvext.connector",
            "kv_connector_extra_config": extra,
        }


def _heads(num_tokens: int) -> Mapping[str, Any]:
    return {"blend_selector": "heads", "blend_head_tokens": num_tokens}


def _question(ratio: float) -> Mapping[str, Any]:
    return {"blend_selector": "question", "blend_ratio": ratio}


FULL = Mode("full recompute", prefix_caching=False)
PREFIX_CACHING = Mode("prefix caching")
PLAIN = Mode("plain reuse", options=_heads(0))
HEADS_16 = Mode("heads 16", options=_heads(16))
QUESTION_10 = Mode("question 10 %", options=_question(0.10))

MODES: Mapping[str, Mode] = {
    mode.name: mode
    for mode in (
        FULL,
        PREFIX_CACHING,
        PLAIN,
        Mode("heads 8", options=_heads(8)),
        HEADS_16,
        Mode("heads 32", options=_heads(32)),
        Mode("question 5 %", options=_question(0.05)),
        QUESTION_10,
        Mode("question 20 %", options=_question(0.20)),
    )
}
