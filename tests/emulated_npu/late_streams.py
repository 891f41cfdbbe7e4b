# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vllm-ascend-kvext project
"""Serve prompts on the emulated NPU in orders of kernels and copies that seeds choose.

Each seed runs in a copy of one engine's process. Every answer is compared with the answer of a
device that is never late.

    python late_streams.py REPORT MODEL --first 0 --seeds 20 [--kind KIND] [--graphs MODE]
        [--without NAME ...]

A seed decides which requests are sent and when, which batched copies fail, in which order the
streams of the device run, and how far the transfer thread gets while the model's thread goes on.
So a seed that fails can be replayed alone. ``--without`` then removes protections of the connector,
one at a time (`late_protections.PROTECTIONS`), and reports the first seed that fails without each.
"""

from __future__ import annotations

import argparse
import gc
import hashlib
import json
import mmap
import multiprocessing
import os
import random
import signal
import sys
import time
import traceback
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from types import MappingProxyType
from typing import Any, NamedTuple

sys.path.append(str(Path(__file__).parents[1]))

import kimi_model
import late_protections
import transfer_gate
from emulated_plans import SLEEPING, connector, graphs
from support.scenarios import connector as scenarios
from support.scenarios import eight_bit_pages
from support.scenarios.answers import NPU_TOLERANCE, Answer, logprob_error
from support.scenarios.engine import STORED, Prompt, answer_of, random_tokens, sampling_of
from support.states import latents_by_block

BLOCK_TOKENS = 128
STAGED_TOKENS = (16, 64, 1024)
"""Sizes of the staging of segments, one by seed: less than a segment, or all segments."""
HOST_MEMORY_GIB = 1.5 / 1024
"""Host memory holds about half of the tokens that the requests have."""
REPLY_TOKENS = 5
TURNS_TOKENS = (254, 382, 510)
"""Prompt lengths. The answers continue in the next block, for which there may be no room."""
NUM_CONVERSATIONS = 5
DOCUMENTS_TOKENS = (150, 190, 230)
ORDERS = ((0, 1), (1, 0), (2, 0))
WAVES = 2
GRAPH_SIZES = {
    "FULL_DECODE_ONLY": (1, 2, 5),
    "PIECEWISE": (1, 2, 5, 64, 128, 256),
    "FULL_AND_PIECEWISE": (1, 2, 5, 64, 128, 256),
}
"""The numbers of tokens of graphs, by mode. Pieces are captured for steps with prompts, too."""
HANGS_S = 120
"""A seed that takes longer than this is reported as one that hangs."""
MAX_WITHOUT_S = 600
FORK = multiprocessing.get_context("fork")

ENGINE = {
    "block_size": BLOCK_TOKENS,
    "max_model_len": 896,
    "max_num_seqs": 5,
    "max_num_batched_tokens": 256,
}


class Kind(NamedTuple):
    """A kind of models.

    Attributes:
        pool_blocks: Blocks of the pool, in which two of the requests below fit. vLLM takes no
            fewer for a context of this length.
        has_segments: Whether documents are stored, and reused elsewhere.
        sleeps: Whether the engine sleeps. vLLM-Ascend 0.23.0 does not wake up correctly with a
            model that has experts.
        mixes_latents: Whether states share memory with latents, see `latents_by_block`.
        has_drafts: Whether the model is a Kimi-K3 with its draft layer.
        is_quantized: Whether weights and keys have 8 bits. Answers then depend on their tokens
            alone, see `eight_bit_pages.compute_exactly`.
        engine: Arguments of ``LLM`` in addition to `ENGINE`.
    """

    pool_blocks: int
    has_segments: bool = False
    sleeps: bool = False
    mixes_latents: bool = False
    has_drafts: bool = False
    is_quantized: bool = False
    engine: Mapping[str, Any] = MappingProxyType({})


STATES = {"enable_prefix_caching": True, "max_num_batched_tokens": 512}
KINDS = {
    "windows": Kind(14, has_segments=True, sleeps=True, engine=SLEEPING),
    "latents": Kind(11),
    "8 bits": Kind(11, is_quantized=True, engine={"quantization": "ascend"}),
    "states": Kind(26, engine=STATES),
    "balanced states": Kind(
        26, engine=STATES | {"additional_config": {"enable_balance_scheduling": True}}
    ),
    "states and latents": Kind(26, mixes_latents=True, engine=STATES),
    "states and latents, drafts": Kind(44, mixes_latents=True, has_drafts=True, engine=STATES),
}


class Asked(NamedTuple):
    """A request, and the step of the wave before which it is sent.

    Attributes:
        is_document: Whether the request is stored as a segment and answers nothing.
        abort_step: The step before which it is aborted; 0 if it is not.
        ends_early: Whether a stop token ends it. The scheduler does not know this token yet while
            it enqueues the next step.
    """

    prompt: Prompt
    is_document: bool = False
    step: int = 0
    abort_step: int = 0
    ends_early: bool = False


class DifferenceError(AssertionError):
    """An answer differs from the answer of a device that is never late."""


class LateEngine(scenarios.Engine):
    """An engine that gets requests in waves."""

    def __init__(self, model: str, kind: Kind, graph_mode: str | None = None) -> None:
        engine = ENGINE | connector(
            host_memory_gib=HOST_MEMORY_GIB, segments={} if kind.has_segments else None
        )
        engine |= {"num_gpu_blocks_override": kind.pool_blocks, **kind.engine}
        if graph_mode is not None:
            engine |= graphs(graph_mode, *GRAPH_SIZES[graph_mode])
        if kind.mixes_latents:
            latents_by_block.install()
        if kind.is_quantized:
            eight_bit_pages.accept_float32()
            eight_bit_pages.read_rounded_keys()
            eight_bit_pages.compute_exactly()
        if kind.has_drafts:
            engine |= kimi_model.drafts(Path(model))
        self.kind = kind
        self.continues_answers = graph_mode is not None
        super().__init__({"model": model, "engine": engine})
        self.engine = self.llm.llm_engine
        self._num_asked = 0
        rng = random.Random("prompts")
        shared = random_tokens(rng, 200)
        longest = TURNS_TOKENS[-1]
        if self.kind.has_segments:
            # Documents are too short for the check of their keys.
            self.side.extension.checks.are_passed = True
        self.conversations = [
            (shared if number < 2 else []) + random_tokens(rng, longest)
            for number in range(NUM_CONVERSATIONS)
        ]
        self.documents = [Prompt(random_tokens(rng, length)) for length in DOCUMENTS_TOKENS]
        self.blended = [self._in_order(rng, order) for order in ORDERS]
        self.references: dict[tuple[int, ...], Answer] = {}
        forget_measurements()
        self.gate = transfer_gate.TransferGate(self.worker_side)
        self.worker_side._runner.fence._stream()  # Draws depend on the number of streams.

    def _in_order(self, rng: random.Random, order: Sequence[int]) -> Prompt:
        tokens = random_tokens(rng, 20)
        segments = []
        for index in order:
            segments.append([len(tokens), len(tokens) + DOCUMENTS_TOKENS[index]])
            tokens = tokens + self.documents[index].token_ids
        return Prompt(tokens + random_tokens(rng, 15), segments)

    def make_references(self) -> None:
        """The answer of a device that is never late, computed without stored KV.

        With graphs, the next turn of a conversation contains the answer. So blocks that replays
        have completed are loaded, too.
        """
        for conversation in self.conversations:
            for num_tokens in TURNS_TOKENS:
                reply = self._add_reference(Prompt(conversation[:num_tokens]))
                if self.continues_answers and num_tokens < TURNS_TOKENS[-1]:
                    conversation[num_tokens : num_tokens + len(reply)] = reply
        if self.kind.has_segments:
            for blended in self.blended:
                self._add_reference(blended)
        self._forget_all()

    def _add_reference(self, prompt: Prompt) -> Sequence[int]:
        """Return the reply.

        Segments that are reused change nothing in this model.

        Only one layer follows another one. The keys of this layer depend on the window before
        them, and reuse begins one window after the beginning of a segment.
        """
        self._forget_all()
        ((_, answer),) = self.wave([Asked(prompt)])
        self.references[tuple(prompt.token_ids)] = answer
        return answer.reply

    def _forget_all(self) -> None:
        self.finish()
        self.reset(is_host_too=True)

    def finish(self) -> None:
        """Run steps until no request and no transfer is under way."""
        while self.side.has_transfers or self.scheduler.has_requests():
            self.engine.step()

    def wave(self, wave: Sequence[Asked], sleep_step: int = 0) -> list[tuple[Asked, Answer]]:
        """Send each request at its step; return the answers of requests that were not aborted.

        The engine sleeps and wakes up once, at ``sleep_step`` or later, unless that is 0.
        """
        waiting = sorted(wave, key=lambda asked: asked.step)
        sent: dict[str, Asked] = {}
        outputs: dict[str, Any] = {}
        step = 0
        while waiting or self.engine.has_unfinished_requests():
            while waiting and (
                waiting[0].step <= step or not self.engine.has_unfinished_requests()
            ):
                asked = waiting.pop(0)
                self._num_asked += 1
                sent[str(self._num_asked)] = asked
                self._send(str(self._num_asked), asked)
            outputs |= {output.request_id: output for output in self.engine.step()}
            step += 1
            if sleep_step and step >= sleep_step and self._may_sleep():
                self.sleep_and_wake_up()
                sleep_step = 0
            due = [
                number
                for number, asked in sent.items()
                if asked.abort_step == step and not (number in outputs and outputs[number].finished)
            ]
            if due:
                self.counted["aborts"] += len(due)
                self.engine.abort_request(due)
        return [
            (asked, Answer(**answer_of(asked.prompt, outputs[number])))
            for number, asked in sent.items()
            if number in outputs and outputs[number].finished and not asked.is_document
        ]

    def _may_sleep(self) -> bool:
        """Whether the engine may be put to sleep. Upstream raises while a request loads."""
        return not self.side._loads.num_under_way

    def sleep_and_wake_up(self) -> None:
        """Free the memory of weights and pages, and allocate it again. Requests stay."""
        import torch

        self.counted["sleeps"] += 1
        self.counted["sleeps with copies"] += self.side.has_transfers
        torch.npu.current_stream().synchronize()  # Upstream does not wait for kernels.
        self.core.sleep(level=1, mode="keep")
        thread = self.worker_side._thread
        if thread._num_running or thread._loads or thread._stores:
            raise DifferenceError(
                "a transfer is under way while the memory of its pages is unmapped"
            )
        self.core.wake_up()

    def _send(self, number: str, asked: Asked) -> None:
        prompt = asked.prompt
        if asked.is_document:
            sampling = sampling_of(1, STORED)
        else:
            reply = self.references[tuple(prompt.token_ids)].reply if asked.ends_early else ()
            sampling = sampling_of(REPLY_TOKENS, prompt.arguments, stop_token_ids=list(reply[1:2]))
        self.engine.add_request(number, prompt.inputs, sampling)

    def check(self, asked: Asked, answer: Answer) -> float:
        """Return the largest difference of a log-probability from the reference.

        Raises:
            DifferenceError: The difference is larger than rounding explains.
        """
        expected = self.references[tuple(asked.prompt.token_ids)]
        largest = logprob_error(answer, expected)
        num_tokens = len(answer.reply) if asked.ends_early else REPLY_TOKENS
        if not largest <= NPU_TOLERANCE or answer.reply != expected.reply[:num_tokens]:
            raise DifferenceError(
                f"log-probabilities differ by {largest:.2e} ({answer.prompt_tokens} tokens, "
                f"{answer.hit_tokens} of them hits, {answer.reused_tokens} of segments)"
            )
        return largest

    def run_seed(self, seed: int) -> dict[str, Any]:
        """Serve some waves as a seed decides."""
        from torch_npu import emulation

        rng = random.Random(seed)
        self._forget_all()
        pool = self.scheduler.kv_cache_manager.block_pool
        # The free pages are in the order of a new engine, so that only the seed decides which page
        # follows which.
        pool.free_block_queue = type(pool.free_block_queue)(pool.blocks[1:])
        self._choose_options(rng)
        for tensor in self.worker_side._runner.pools.tensors:
            tensor.fill_(0x44)  # 785.07 in float32
        before = self.counted.copy()
        first_replay = self.num_replays()
        gate = self.gate
        gate.close(rng)
        emulation.set_seed(seed)
        digest = hashlib.sha256()
        largest = 0.0
        try:
            for number in range(WAVES):
                wave = self._random_wave(rng, number)
                gate.fail({rng.randrange(1, 12) for _ in range(rng.choice((0, 0, 1, 3)))})
                sleep_step = rng.choice((0, 0, 2, 5)) if self.kind.sleeps else 0
                for asked, answer in self.wave(wave, sleep_step):
                    largest = max(largest, self.check(asked, answer))
                    self.counted["answers"] += 1
                    self.counted["segment tokens"] += answer.reused_tokens
                    digest.update(repr((answer.reply, answer.hit_tokens)).encode())
                self._between_waves(rng)
            gate.fail(())
            self.finish()
        finally:
            digest.update(repr(sorted(gate.counted.items())).encode())
            self.counted.update(gate.counted)
            gate.open()
            emulation.set_seed(None)
        self.counted["replays"] += self.num_replays() - first_replay
        self.counted["swapped requests"] += self.side.counters.swapped_requests
        self.reset()
        left = self.left()
        if any(left.values()):
            raise DifferenceError(f"left when all is done: {left}")
        return {
            "largest": largest,
            "digest": digest.hexdigest()[:16],
            "counted": dict(self.counted - before),
        }

    def _choose_options(self, rng: random.Random) -> None:
        """Give this process a staging and a store policy of the seed's choice."""
        from vllm_ascend_kvext.store.store_policy import StorePolicy

        staged_tokens = rng.choice(STAGED_TOKENS)
        if self.kind.has_segments:
            self.worker_side._runner.mover._max_tokens = staged_tokens
        # With the second, preempted requests have something left to store.
        policy = rng.choice((StorePolicy.ALL, StorePolicy.SECOND_TOUCH))
        self.side._stores.chooser.policy = policy

    def _random_wave(self, rng: random.Random, number: int) -> list[Asked]:
        wave = []
        for _ in range(rng.randrange(4, 6)):
            kind = rng.random() if self.kind.has_segments else 1
            step = rng.randrange(5)
            if number == 0 and kind < 0.3:
                document = self.documents[rng.randrange(len(self.documents))]
                wave.append(Asked(document, is_document=True, step=step))
            elif kind < 0.3:
                wave.append(Asked(rng.choice(self.blended), step=step))
            else:
                conversation = rng.choice(self.conversations)
                prompt = Prompt(conversation[: rng.choice(TURNS_TOKENS)])
                end = rng.random()
                abort_step = step + rng.randrange(1, 8) if end < 0.1 else 0
                wave.append(Asked(prompt, False, step, abort_step, ends_early=end > 0.6))
        return wave

    def _between_waves(self, rng: random.Random) -> None:
        """Drop all cached pages of the device, and some entries of host memory."""
        if rng.random() < 0.3:
            return
        if rng.random() < 0.6:
            self.finish()
        self.llm.reset_prefix_cache()
        if self.side.has_transfers or rng.random() < 0.3:
            return
        for conversation in self.conversations:
            prompt = conversation[: TURNS_TOKENS[-1]]
            if tuple(prompt) in self.prefixes:
                first = rng.choice((0, BLOCK_TOKENS, 2 * BLOCK_TOKENS))
                self.lose_rows([(first, first + BLOCK_TOKENS)], prompt)


def forget_measurements() -> None:
    """Have fixed costs of copies and steps; measured ones would decide what is loaded."""
    from vllm_ascend_kvext.connector.scheduler.transfer_cost import TransferCost

    for name in ("note_copies", "note_load", "note_step"):
        setattr(TransferCost, name, lambda self, *_: None)


def run_seeds(engine: LateEngine, seeds: Iterable[int], max_s: float) -> dict[str, Any]:
    """The report of some seeds, up to the first that fails."""
    report: dict[str, Any] = {"seeds": {}, "failed": {}}
    counted: Counter[str] = Counter()
    begun_s = time.monotonic()
    for seed in seeds:
        done = run_alone(lambda seed=seed: engine.run_seed(seed))  # type: ignore[misc]
        if "failed" in done:
            report["failed"][seed] = done["failed"]
        else:
            counted.update(done.pop("counted"))
            report["seeds"][seed] = done
        passed_s = time.monotonic() - begun_s
        if seed % 20 == 0 or report["failed"]:
            print(f"seed {seed}, {passed_s:.0f} s, {dict(counted)}", flush=True)
        if report["failed"] or passed_s > max_s:
            break
    report["counted"] = dict(counted)
    return report


def run_alone(run: Callable[[], dict[str, Any]], max_s: int = HANGS_S) -> dict[str, Any]:
    """Return what a function returns in a copy of this process, or its error under ``failed``.

    Changes that the function makes end with the copy, so the engine is the same for each seed.
    """
    receiver, sender = FORK.Pipe(duplex=False)

    def report() -> None:
        signal.alarm(max_s)
        try:
            sender.send(run())
        except DifferenceError as error:
            sender.send({"failed": str(error)})
        except BaseException:
            sender.send({"failed": traceback.format_exc()})
        os._exit(0)

    child = FORK.Process(target=report)
    child.start()
    sender.close()
    try:
        found: dict[str, Any] = receiver.recv()
    except EOFError:
        found = {"failed": "the process ended, or hung"}
    child.join()
    return found


def run_without(engine: LateEngine, name: str, seeds: Iterable[int]) -> Any:
    """Return the first seed that fails without a protection, and why; nothing if none fails."""

    def run() -> dict[str, Any]:
        late_protections.take_away(name)
        return run_seeds(engine, seeds, MAX_WITHOUT_S)

    return run_alone(run, 2 * MAX_WITHOUT_S)["failed"]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("report", type=Path)
    parser.add_argument("model")
    parser.add_argument("--kind", choices=KINDS, default="windows", help="of the model")
    parser.add_argument("--graphs", choices=GRAPH_SIZES, help="the mode, with graphs")
    parser.add_argument("--first", type=int, default=0)
    parser.add_argument("--seeds", type=int, default=20)
    parser.add_argument("--seconds", type=float, default=float("inf"))
    parser.add_argument("--without", nargs="*", default=(), metavar="NAME")
    parser.add_argument("--without-seeds", type=int, default=20)
    options = parser.parse_args()
    # Copies of this process go on with the engine, so they need its host memory, too.
    setattr(mmap, "MADV_DONTFORK", mmap.MADV_DOFORK)  # noqa: B010
    engine = LateEngine(options.model, KINDS[options.kind], options.graphs)
    engine.make_references()
    gc.collect()
    gc.freeze()  # Copies of this process share these objects.
    seeds = range(options.first, options.first + options.seeds)
    report = run_seeds(engine, seeds, options.seconds)
    print(f"{len(report['seeds'])} seeds equal; failed: {report['failed']}", flush=True)
    report["without"] = {}
    for name in options.without:
        failed = run_without(engine, name, range(options.without_seeds))
        report["without"][name] = failed
        print(f"without {name!r}: {failed or 'never red'}", flush=True)
    options.report.write_text(json.dumps(report))
    os._exit(0)  # A shutdown could wait for something that a failure has left.


if __name__ == "__main__":
    main()
