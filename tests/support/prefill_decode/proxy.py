# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vllm-ascend-kvext project
"""Sends requests to a prefill node and a decode node, as vLLM-Ascend's proxies do.

The prefill node gets the prompt, and is asked for one token. Its response says where the KV is. The
decode node gets the prompt together with what the response says, and gives the answer.
"""

from __future__ import annotations

import itertools
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from enum import Enum
from multiprocessing.connection import wait
from typing import Any

from support.prefill_decode.nodes import DEADLINE_S, NodeProcess

TO_PREFILL: dict[str, Any] = {
    "do_remote_decode": True,
    "do_remote_prefill": False,
    "remote_engine_id": None,
    "remote_block_ids": None,
    "remote_host": None,
    "remote_port": None,
}
"""What a proxy says to the prefill node."""

_numbers = itertools.count()
"""Of requests. Several proxies may have the same nodes."""


class Phase(Enum):
    """Where a request is."""

    PREFILL = "prefill"
    DECODE = "decode"
    ANSWERING = "answering"
    """The first token of the answer has come."""
    DONE = "done"
    ABORTED = "aborted"


@dataclass
class Asked:
    """One request.

    Attributes:
        answer: The decode node's answer, in the form of `scenarios.answers.Answer`.
        params: What the prefill node has said about its KV.
    """

    request_id: str
    prompt: list[int]
    reply_tokens: int
    phase: Phase = Phase.PREFILL
    answer: dict[str, Any] | None = None
    params: dict[str, Any] | None = None

    @property
    def is_over(self) -> bool:
        return self.phase in (Phase.DONE, Phase.ABORTED)

    @property
    def reply(self) -> list[int]:
        assert self.answer is not None, self
        reply: list[int] = self.answer["reply"]
        return reply


class Proxy:
    """The requests of two nodes.

    Args:
        prefill: None if the other node computes the prompts, too.
    """

    def __init__(self, prefill: NodeProcess | None, decode: NodeProcess) -> None:
        self.prefill = prefill
        self.decode = decode
        self.nodes = [node for node in (prefill, decode) if node is not None]
        self._asked: dict[str, Asked] = {}
        for node in self.nodes:
            node.wait_until_ready()

    def send(self, prompt: Sequence[int], reply_tokens: int = 16) -> Asked:
        """Send a request, and do not wait."""
        asked = Asked(f"r{next(_numbers)}", list(prompt), reply_tokens)
        self._asked[asked.request_id] = asked
        if self.prefill is None:
            self._pass_on(asked, None)
        else:
            self.prefill.call("add", asked.request_id, asked.prompt, 1, TO_PREFILL)
        return asked

    def ask(self, prompts: Iterable[Sequence[int]], reply_tokens: int = 16) -> list[Asked]:
        """Send requests at once, and wait for their answers."""
        sent = [self.send(prompt, reply_tokens) for prompt in prompts]
        self.wait_for(lambda: all(each.is_over for each in sent))
        return sent

    def without_prefill(self) -> Proxy:
        """The decode node alone, with the requests that it has."""
        alone = Proxy(None, self.decode)
        alone._asked = dict(self._asked)
        return alone

    def abort(self, asked: Asked) -> None:
        """The client is gone. The node that has the request is told."""
        if asked.is_over:
            return
        self.nodes[0 if asked.phase is Phase.PREFILL else -1].call("abort", asked.request_id)
        asked.phase = Phase.ABORTED

    def wait_for(self, is_reached: Callable[[], bool], timeout_s: float = DEADLINE_S) -> None:
        """Pass requests on until a condition holds.

        Raises:
            AssertionError: It does not hold in time, or a node has ended.
        """
        deadline_s = time.monotonic() + timeout_s
        while not is_reached():
            if time.monotonic() > deadline_s:
                phases = {each.request_id: each.phase for each in self._asked.values()}
                open_phases = {k: v for k, v in phases.items() if v is not Phase.DONE}
                logs = "\n".join(node.log()[-2500:] for node in self.nodes)
                raise AssertionError(f"nothing more happens: {open_phases}\n{logs}")
            self.pump()

    def wait_until_idle(self, timeout_s: float = DEADLINE_S) -> None:
        """Wait until no node has anything to do."""
        self.wait_for(lambda: all(node.call("is_idle") for node in self.nodes), timeout_s)

    def pump(self, timeout_s: float = 0.05) -> None:
        """Take the outputs that are there, and pass prompts on to the decode node."""
        if not any(node.outputs for node in self.nodes):
            wait([node.connection for node in self.nodes], timeout_s)
        for node in self.nodes:
            node.read(0)
        while self.prefill is not None and self.prefill.outputs:
            output = self.prefill.outputs.popleft()
            if output.answer is not None:
                self._pass_on(self._asked[output.request_id], output.answer["params"])
        while self.decode.outputs:
            output = self.decode.outputs.popleft()
            asked = self._asked[output.request_id]
            if asked.is_over:
                continue
            asked.phase = Phase.ANSWERING if output.answer is None else Phase.DONE
            asked.answer = output.answer

    def _pass_on(self, asked: Asked, params: dict[str, Any] | None) -> None:
        asked.params = params
        if asked.is_over:
            return
        asked.phase = Phase.DECODE
        self.decode.call("add", asked.request_id, asked.prompt, asked.reply_tokens, params)
