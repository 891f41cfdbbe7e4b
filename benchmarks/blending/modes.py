# SPDX-License-Identifier: Apache-2.0
"""How a prompt is served: what vLLM and the connector are told."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any


@dataclass(frozen=True, slots=True)
class Mode:
    """One way to serve.

    Attributes:
        name: As printed.
        prefix_caching: vLLM's.
        options: Of the connector, beyond those that all have; None: no connector.
        has_text_sink: Whether documents are stored behind a text, see ``sink_text``, and not only
            behind the token for the beginning of a sequence.
    """

    name: str
    prefix_caching: bool = True
    options: Mapping[str, Any] | None = None
    has_text_sink: bool = False

    @property
    def blends(self) -> bool:
        return self.options is not None

    def kv_transfer_config(
        self, host_gib: float, sink_ids: Sequence[int] | None = None
    ) -> dict[str, Any] | None:
        """For vLLM.

        Args:
            host_gib: Host memory of the connector.
            sink_ids: What documents are stored behind; None: the connector's default.
        """
        if self.options is None:
            return None
        extra = {"host_memory_gib": host_gib, "blending": True, **self.options}
        if sink_ids is not None:
            extra["segment_sink"] = list(sink_ids)
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


def _behind_text(mode: Mode) -> Mode:
    return replace(mode, name=f"{mode.name}, text", has_text_sink=True)


HEADS_16_TEXT = _behind_text(HEADS_16)
QUESTION_10_TEXT = _behind_text(QUESTION_10)

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
        _behind_text(PLAIN),
        HEADS_16_TEXT,
        QUESTION_10_TEXT,
    )
}
