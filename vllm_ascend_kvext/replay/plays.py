# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vllm-ascend-kvext project
"""Plays all variants in processes of their own, some at a time, and tells how far they are.

A process is a fork of this one: vLLM is imported, and the model planned, once.
"""

from __future__ import annotations

import multiprocessing
import os
import traceback
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from multiprocessing.connection import Connection, wait
from multiprocessing.context import ForkProcess

from vllm_ascend_kvext.errors import KvextError
from vllm_ascend_kvext.replay.variants import Variant, VariantResult

PlayOne = Callable[[Variant, Callable[[int], object]], VariantResult]


@dataclass(slots=True)
class _Running:
    variant: Variant
    process: ForkProcess
    num_ended: int = 0


def play_all(
    variants: Sequence[Variant],
    play_one: PlayOne,
    num_processes: int,
    on_progress: Callable[[int], object],
) -> Iterator[VariantResult]:
    """Play every variant. Results come when they are there, in no order.

    Args:
        play_one: Plays a variant, and calls its second argument with the number of ended requests.
        num_processes: How many processes run at the same time.
        on_progress: Called with the number of requests that have ended in all variants together.
    """
    context = multiprocessing.get_context("fork")
    waiting = list(variants)
    running: dict[Connection, _Running] = {}
    num_before = 0
    try:
        while waiting or running:
            while waiting and len(running) < num_processes:
                variant = waiting.pop(0)
                here, there = context.Pipe(duplex=False)
                process = context.Process(target=_play, args=(variant, play_one, there))
                process.start()
                there.close()
                running[here] = _Running(variant, process)
            for connection in wait(list(running)):
                assert isinstance(connection, Connection)
                of_play = running[connection]
                message = _receive(connection, of_play)
                if isinstance(message, int):
                    of_play.num_ended = message
                else:
                    num_before += of_play.num_ended
                    del running[connection]
                    of_play.process.join()
                    yield message
                on_progress(num_before + sum(each.num_ended for each in running.values()))
    finally:
        for each in running.values():
            each.process.terminate()
            each.process.join()


def _receive(connection: Connection, running: _Running) -> int | VariantResult:
    try:
        message: int | VariantResult = connection.recv()
    except EOFError:
        running.process.join()
        status = running.process.exitcode
        return VariantResult(
            running.variant.name, refusal=f"its process ended with status {status} without a result"
        )
    return message


def _play(variant: Variant, play_one: PlayOne, connection: Connection) -> None:
    """Play one variant in the process of its own."""
    parent = os.getppid()

    def send(num_ended: int) -> None:
        if os.getppid() != parent:  # The command was killed.
            os._exit(1)
        connection.send(num_ended)

    try:
        result = play_one(variant, send)
    except KvextError as error:
        result = VariantResult(variant.name, refusal=str(error))
    except ValueError as error:  # vLLM refuses intervals and layouts by such errors.
        traceback.print_exc()
        result = VariantResult(variant.name, refusal=str(error).splitlines()[0])
    connection.send(result)
    connection.close()
    # What vLLM and torch have registered for the end of a process belongs to the first process.
    os._exit(0)
