# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vllm-ascend-kvext project
"""Random conversations on two nodes: clients leave, transfers fail, and device caches are lost."""

from __future__ import annotations

import random
from collections import Counter
from dataclasses import dataclass, field

from support.prefill_decode.proxy import Asked, Phase, Proxy
from support.prefill_decode.transfer_engine import Fault
from support.scenarios.engine import random_tokens

MAX_PROMPT_TOKENS = 1400
SHARED_TOKENS = 200
"""The tokens with which every second conversation begins."""
REQUESTS_PER_WAVE = 12
FAULTS = (Fault.NONE, Fault.NONE, Fault.FAILS, Fault.HALF)
"""What happens to the transfers of a wave; one of these."""


@dataclass
class Conversations:
    """A run.

    Attributes:
        done: The requests that were answered.
        happened: The number of requests by their fate, and of waves by what happened to them.
    """

    proxy: Proxy
    seed: int
    done: list[Asked] = field(default_factory=list)
    happened: Counter[str] = field(default_factory=Counter)

    def __post_init__(self) -> None:
        self._rng = random.Random(self.seed)
        self._shared = random_tokens(self._rng, SHARED_TOKENS)
        self._histories: list[list[int]] = []

    def run(self, num_requests: int) -> None:
        """Send requests in waves, until so many have been sent."""
        num_sent = 0
        while num_sent < num_requests:
            num_wave = min(REQUESTS_PER_WAVE, num_requests - num_sent)
            self._lose_device_caches()
            self._wave(num_wave)
            num_sent += num_wave

    def _lose_device_caches(self) -> None:
        self.proxy.wait_until_idle()
        for node in self.proxy.nodes:
            if self._rng.random() < 0.5:
                self.happened[f"{node.name} lost its device's cache"] += 1
                node.call("spoil_pages")

    def _wave(self, num_requests: int) -> None:
        rng = self._rng
        decode = self.proxy.nodes[1]
        fault = rng.choice(FAULTS)
        self.happened[f"transfers: {fault.value}"] += 1
        decode.call("set_fault", fault.value)
        if is_held := rng.random() < 0.3:
            decode.call("hold_transfers")
        waiting = [self._next_prompt() for _ in range(num_requests)]
        running: list[Asked] = []
        leaving: dict[str, int] = {}
        num_rounds = 0
        while waiting or running:
            num_rounds += 1
            if waiting and rng.random() < 0.8:
                running.append(self.proxy.send(waiting.pop(), rng.choice((8, 100, 250))))
                if rng.random() < 0.35:
                    leaving[running[-1].request_id] = num_rounds + rng.randrange(60)
            self.proxy.pump(0.005)
            if num_rounds == 60 and is_held:
                decode.call("let_transfers_go")
            for each in running:
                if leaving.get(each.request_id) == num_rounds and not each.is_over:
                    self._abort(each)
            self._note_ended(running)
            running = [each for each in running if not each.is_over]
        decode.call("let_transfers_go")
        decode.call("set_fault", Fault.NONE.value)

    def _next_prompt(self) -> list[int]:
        rng = self._rng
        if self._histories and rng.random() < 0.6:
            history = self._histories.pop(rng.randrange(len(self._histories)))
        else:
            history = list(self._shared) if rng.random() < 0.5 else []
        return [*history, *random_tokens(rng, rng.randint(10, 200))]

    def _abort(self, asked: Asked) -> None:
        where = asked.phase.value
        if asked.phase is Phase.DECODE:
            where = self.proxy.nodes[1].call("status_of", asked.request_id)
        self.happened[f"aborted: {where}"] += 1
        self.proxy.abort(asked)

    def _note_ended(self, running: list[Asked]) -> None:
        for each in running:
            if each.phase is not Phase.DONE:
                continue
            self.done.append(each)
            self.happened["answered"] += 1
            history = [*each.prompt, *each.reply]
            if len(history) < MAX_PROMPT_TOKENS:
                self._histories.append(history)
