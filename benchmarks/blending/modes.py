# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vllm-ascend-kvext project
"""The modes of serving a prompt: the options of vLLM and of the connector."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from common.cpu_engine import kvext_config


@dataclass(frozen=True, slots=True)
class Mode:
    """One way to serve.

    Attributes:
        options: Keys of the option ``segments``; None: no connector.
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
        """The connector's configuration for vLLM; None for no connector.

        Args:
            host_gib: The size of host memory.
            sink_ids: The tokens that documents are stored behind; None for the default.
        """
        if self.options is None:
            return None
        sink = {} if sink_ids is None else {"sink": list(sink_ids)}
        return kvext_config(host_memory_gib=host_gib, segments={**self.options, **sink})


def heads(name: str, num_tokens: int) -> Mode:
    options = {"selector": "heads", "head_tokens": num_tokens, "context": False}
    return Mode(name, options=options)


def _question(name: str, ratio: float) -> Mode:
    options = {"selector": "question", "head_tokens": 16, "ratio": ratio, "context": False}
    return Mode(name, options=options)


def _behind_text(mode: Mode) -> Mode:
    return replace(mode, name=f"{mode.name}, text", has_text_sink=True)


def behind_context(mode: Mode) -> Mode:
    """The same mode, with documents also stored behind some of the first documents."""
    options = {**(mode.options or {}), "context": True}
    return replace(mode, name=f"{mode.name}, context", options=options)


FULL = Mode("full recompute", prefix_caching=False)
PREFIX_CACHING = Mode("prefix caching")
PLAIN = heads("plain reuse", 0)
HEADS_16 = heads("heads 16", 16)
DEFAULT = Mode("default", options={})

MODES: Mapping[str, Mode] = {
    mode.name: mode
    for mode in (
        FULL,
        PREFIX_CACHING,
        PLAIN,
        heads("heads 8", 8),
        HEADS_16,
        heads("heads 32", 32),
        _question("question 5 %", 0.05),
        _question("question 10 %", 0.10),
        _question("question 20 %", 0.20),
        _behind_text(PLAIN),
        _behind_text(HEADS_16),
        behind_context(HEADS_16),
        behind_context(_question("question 10 %", 0.10)),
        DEFAULT,
    )
}
