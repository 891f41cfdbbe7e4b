# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vllm-ascend-kvext project
"""One node: an engine that takes requests while it runs.

    python node.py SOCKET PLAN

``SOCKET`` is that of a listener (`nodes.NodeProcess`). ``PLAN`` is JSON data, see
`scenarios.processes.Plan`. Messages to the node are a method of `Node` and its arguments. Its own
messages are `nodes.Reply` and `nodes.Output`.
"""

from __future__ import annotations

import contextlib
import gc
import json
import os
import sys
import time
import traceback
from multiprocessing.connection import Client, Connection
from pathlib import Path
from typing import Any

TESTS = str(Path(__file__).resolve().parents[2])

IDLE_S = 0.001
"""The time between two steps of an engine that only waits for the other node."""


class Node:
    """An engine and its connection."""

    def __init__(self, connection: Connection, plan: dict[str, Any]) -> None:
        from support.scenarios.connector import Engine

        self._connection = connection
        self._engine = Engine(plan)
        self._llm = self._engine.llm.llm_engine
        self._prompts: dict[str, list[int]] = {}
        self._begun: set[str] = set()
        self.is_ended = False

    def run(self) -> None:
        """Answer messages and step, until the other side is gone or says so."""
        while not self.is_ended:
            has_work = self._engine.scheduler.has_requests()
            while not self.is_ended and self._connection.poll(0 if has_work else None):
                self._answer(*self._connection.recv())
                has_work = self._engine.scheduler.has_requests()
            if has_work and not self.is_ended:
                self._step()

    def _answer(self, method: str, arguments: tuple[Any, ...]) -> None:
        from support.prefill_decode.nodes import Reply

        try:
            found = getattr(self, method)(*arguments)
            self._connection.send(Reply(found))
        except Exception:
            self._connection.send(Reply(None, traceback.format_exc()))

    def _step(self) -> None:
        from support.prefill_decode.nodes import Output
        from support.scenarios.engine import Prompt, answer_of

        outputs = self._llm.step()
        for output in outputs:
            request_id = output.request_id
            if output.finished:
                prompt = Prompt(self._prompts.pop(request_id))
                self._begun.discard(request_id)
                answer = answer_of(prompt, output)
                self._connection.send(Output(request_id, answer))
            elif request_id not in self._begun:
                self._begun.add(request_id)
                self._connection.send(Output(request_id, None))
        if not outputs and not self._engine.scheduler.running:
            time.sleep(IDLE_S)

    # Messages.

    def add(
        self,
        request_id: str,
        prompt: list[int],
        reply_tokens: int,
        params: dict[str, Any] | None,
    ) -> None:
        from support.scenarios.engine import sampling_of

        arguments = None if params is None else {"kv_transfer_params": params}
        self._prompts[request_id] = prompt
        # The engine may shorten its list.
        inputs = {"prompt_token_ids": list(prompt)}
        self._llm.add_request(request_id, inputs, sampling_of(reply_tokens, arguments))

    def abort(self, request_id: str) -> bool:
        """Abort a request. Returns whether it was still there."""
        self._begun.discard(request_id)
        is_known = self._prompts.pop(request_id, None) is not None
        if is_known:
            self._llm.abort_request([request_id])
        return is_known

    def status_of(self, request_id: str) -> str:
        """The status of a request in the scheduler. Empty if it has ended."""
        for request in self._engine.scheduler.requests.values():
            if request.request_id.startswith(f"{request_id}-"):
                return str(request.status.name)
        return ""

    def hold_transfers(self) -> None:
        _transfers().hold()

    def let_transfers_go(self) -> None:
        _transfers().let_go()

    def num_waiting_transfers(self) -> int:
        return int(_transfers().num_waiting)

    def set_fault(self, fault: str) -> None:
        """See `transfer_engine.Fault`."""
        from support.prefill_decode.transfer_engine import Fault

        _transfers().fault = Fault(fault)

    def set_seed(self, seed: int) -> None:
        """Let streams be late from now on, in the order of this seed."""
        from torch_npu import emulation

        emulation.set_seed(seed)

    def load_nothing(self, is_on: bool) -> None:
        """Let loads from host memory succeed without moving anything, or move again."""
        from support.scenarios.engine import load_nothing

        self._engine.core.model_executor.collective_rpc(load_nothing, args=(is_on,))

    def spoil_pages(self) -> None:
        """Reset the prefix cache, and fill all pages with wrong bytes. No request may run."""
        self._engine.spoil_pages()

    def forget(self) -> None:
        """Empty the prefix cache and host memory. No request may run."""
        self._engine.reset(is_host_too=True)

    def counted(self) -> dict[str, int]:
        """All counters since the start: the scheduler's, Mooncake's, and KvextConnector's."""
        counted: dict[str, int] = dict(self._engine.counted)
        if "support.prefill_decode.connectors" in sys.modules:
            counted |= {f"mooncake {name}": n for name, n in _transfers().counted.items()}
        if self._engine.has_connector:
            counted |= self._engine.side.counters.totals()
        return counted

    def left(self) -> dict[str, int]:
        """What is still held for ended requests, also by the sender of KV."""
        left = self._engine.left()
        left["requests"] = len(self._engine.scheduler.requests)
        for tracker in _trackers():
            left["unsent"] = left.get("unsent", 0) + len(tracker.delayed_free_requests)
            left["in process"] = left.get("in process", 0) + len(tracker.reqs_to_process)
        return left

    def is_idle(self) -> bool:
        """Whether there is nothing to do, not even for ended requests."""
        return not self._engine.scheduler.has_requests()

    def end(self) -> None:
        self._engine.shutdown()
        self.is_ended = True


def _transfers() -> Any:
    from support.prefill_decode.transfer_engine import engine_of_process

    return engine_of_process()


def _trackers() -> list[Any]:
    """The books of Mooncake's connector in this process, about requests that it sends or gets."""
    from vllm.distributed import kv_transfer

    if not kv_transfer.has_kv_transfer_group():
        return []
    group = kv_transfer.get_kv_transfer_group()
    workers = [
        getattr(each, "connector_worker", None)
        for each in (group, *getattr(group, "_connectors", ()))
    ]
    threads = [
        getattr(worker, name, None)
        for worker in workers
        for name in ("kv_send_thread", "kv_recv_thread")
    ]
    return [thread.task_tracker for thread in threads if thread is not None]


def main() -> None:
    import vllm.v1.engine.llm_engine  # noqa: F401

    gc.collect()
    gc.freeze()  # Imported modules are no garbage that engines would have to look through.
    connection = Client(sys.argv[1], "AF_UNIX")
    node = Node(connection, json.loads(Path(sys.argv[2]).read_text()))
    from support.prefill_decode.nodes import Reply

    connection.send(Reply("ready"))
    with contextlib.suppress(EOFError):  # The test has ended.
        node.run()
    os._exit(0)  # Threads of Mooncake's connector would not end.


sys.path[:] = [*(path for path in sys.path if path != str(Path(__file__).parent)), TESTS]

if __name__ == "__main__":
    main()
