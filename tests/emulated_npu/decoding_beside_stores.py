# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vllm-ascend-kvext project
"""Decode on the emulated NPU while stores cannot go on, and count what decoding waits for.

    python decoding_beside_stores.py REPORT MODEL [--seeds N]

While a request decodes, two prompts leave stores behind. It goes on, once while the transfer thread
has not taken a store, and once while the copies of one are enqueued and the thread waits for them.
For each seed of the order in which streams run, the report says how often the model's thread waited
for the transfer thread, and how often other streams waited for an event of the copies. It says the
same for engines in which steps wait for stores on purpose.
"""

from __future__ import annotations

import argparse
import gc
import json
import mmap
import os
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

from late_streams import KINDS, TURNS_TOKENS, LateEngine, run_alone
from support.scenarios.answers import Answer, logprob_error
from support.scenarios.engine import Prompt, answer_of, random_tokens, sampling_of

from vllm_ascend_kvext.connector.worker.worker_side import WorkerSide

POOL_BLOCKS = 40
"""Stores begin at once if a quarter of the pool is free."""

DECODED_TOKENS = 40
MAX_STEPS = 12
"""Steps until a store has begun."""

NUM_FIRST = 2
NUM_LAST = 4
"""What decoding waits for is counted until these tokens are left. A step without any request may
wait for transfers."""

PROMPT_TOKENS = 40


class EventCount:
    """Counts waits of streams for events that the stream of the copies has recorded.

    An event that is recorded again counts for its last stream, as on a device.
    """

    def __init__(self) -> None:
        import torch

        self.num_waits = 0
        self.copy_stream: int | None = None
        self._recorded_by: dict[int, int] = {}  # Streams by the address of the event.
        self._events: list[Any] = []  # So that no address is used twice.
        record, wait = torch.Event.record, torch.Event.wait
        wait_event = torch.Stream.wait_event

        def note_record(event: Any, stream: Any = None) -> None:
            self._events.append(event)
            self._recorded_by[id(event)] = _stream_id(stream)
            record(event, *_given(stream))

        def note_wait(event: Any, stream: Any = None) -> None:
            self._note(event, _stream_id(stream))
            wait(event, *_given(stream))

        def note_wait_event(stream: Any, event: Any) -> None:
            self._note(event, stream.stream_id)
            wait_event(stream, event)

        # Subclasses call these methods of torch's classes.
        from torch_npu.npu import streams

        streams.Event.record = note_record
        streams.Event.wait = note_wait
        streams.Stream.wait_event = note_wait_event

    def _note(self, event: Any, waiting: int) -> None:
        recorded_by = self._recorded_by.get(id(event))
        if recorded_by == self.copy_stream != waiting:
            self.num_waits += 1


def _given(stream: Any) -> tuple[Any, ...]:
    import torch

    return (torch.npu.current_stream() if stream is None else stream,)


def _stream_id(stream: Any) -> int:
    stream_id: int = _given(stream)[0].stream_id
    return stream_id


def _do_nothing() -> None:
    """Stands for a change that is none."""


class Decoding:
    """A request that decodes while stores cannot go on."""

    def __init__(self, engine: LateEngine) -> None:
        self.engine = engine
        self.prompt = Prompt(random_tokens(random.Random("decoding"), PROMPT_TOKENS))
        self.expected = self._decode(_do_nothing, _do_nothing)
        self.events = EventCount()
        self.events.copy_stream = engine.worker_side._runner.fence._stream().stream_id

    def _decode(
        self, after_the_first: Callable[[], None], before_the_last: Callable[[], None]
    ) -> Answer:
        """Ask the request. Call a function after its first tokens, and one before its last."""
        engine = self.engine.engine
        engine.add_request("decoding", self.prompt.inputs, sampling_of(DECODED_TOKENS))
        calls = {DECODED_TOKENS - NUM_LAST: before_the_last, NUM_FIRST: after_the_first}
        while True:
            for output in engine.step():
                if output.request_id != "decoding":
                    continue
                num_tokens = len(output.outputs[0].token_ids)
                while calls and num_tokens >= min(calls):
                    calls.pop(min(calls))()
                if output.finished:
                    return Answer(**answer_of(self.prompt, output))

    def run(self, seed: int, is_enqueued: bool) -> dict[str, Any]:
        """Count beside stores that wait for the thread, or whose first copies are enqueued."""
        from torch_npu import emulation

        late, gate = self.engine, self.engine.gate
        thread = late.worker_side._thread
        found: dict[str, Any] = {}
        emulation.set_seed(seed)
        gate.close(random.Random(seed))
        self.events.num_waits = 0
        gate._pace = (0,)  # The thread goes on only when the model's thread waits for it.

        def leave_stores() -> None:
            for number, text in enumerate(late.conversations[:2]):
                prompt = Prompt(text[: TURNS_TOKENS[0]])
                late.engine.add_request(f"stored {number}", prompt.inputs, sampling_of(1))
            for _ in range(MAX_STEPS):
                if thread._stores and not late.scheduler.waiting:
                    break
                late.engine.step()
            while is_enqueued and not gate.counted["batched copies"] and gate.go_on():
                gate.counted["steps of the thread"] -= 1  # The model's thread did not ask for it.
            found["copies enqueued"] = gate.counted["batched copies"]

        def count() -> None:
            found["stores under way"] = len(thread._stores) + thread._num_running
            found["waits for the thread"] = gate.counted["steps of the thread"]
            found["waits of streams"] = self.events.num_waits

        answer = self._decode(leave_stores, count)
        found["tokens"] = len(answer.reply)
        found["difference"] = logprob_error(answer, self.expected)
        gate.open()
        late.finish()
        emulation.set_seed(None)
        return found


def have_steps_wait_for_stores() -> None:
    """Control: a step ends when no store is under way."""
    end_step = WorkerSide.end_step

    def wait_and_end(self: WorkerSide, *args: Any, **more: Any) -> Any:
        with self._thread._changed:
            self._thread._changed.wait_for(
                lambda: not (self._thread._stores or self._thread._num_running)
            )
        return end_step(self, *args, **more)

    WorkerSide.end_step = wait_and_end  # type: ignore[method-assign]


def have_streams_wait_for_copies(copy_stream: Any) -> None:
    """Control: the model's stream waits for the copies that are enqueued."""
    import torch

    end_of_forward = WorkerSide.end_of_forward

    def wait_and_end(self: WorkerSide, *args: Any, **more: Any) -> Any:
        torch.npu.current_stream().wait_stream(copy_stream)
        return end_of_forward(self, *args, **more)

    WorkerSide.end_of_forward = wait_and_end  # type: ignore[method-assign]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("report", type=Path)
    parser.add_argument("model")
    parser.add_argument("--seeds", type=int, default=4)
    options = parser.parse_args()
    # Copies of this process go on with the engine, so they need its host memory, too.
    setattr(mmap, "MADV_DONTFORK", mmap.MADV_DOFORK)  # noqa: B010
    late = LateEngine(options.model, KINDS["windows"]._replace(pool_blocks=POOL_BLOCKS))
    decoding = Decoding(late)
    copy_stream = late.worker_side._runner.fence._stream()
    gc.freeze()  # Copies of this process share these objects.

    def runs(before: Callable[[], None] = _do_nothing) -> list[dict[str, Any]]:
        def run(seed: int, is_enqueued: bool) -> dict[str, Any]:
            before()
            return decoding.run(seed, is_enqueued)

        return [
            run_alone(lambda seed=seed, enqueued=is_enqueued: run(seed, enqueued))  # type: ignore[misc]
            for seed in range(options.seeds)
            for is_enqueued in (False, True)
        ]

    report = {
        "as it is": runs(),
        "steps wait for stores": runs(have_steps_wait_for_stores),
        "streams wait for copies": runs(lambda: have_streams_wait_for_copies(copy_stream)),
    }
    options.report.write_text(json.dumps(report))
    os._exit(0)  # A shutdown could wait for something that a failure has left.


if __name__ == "__main__":
    main()
