# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vllm-ascend-kvext project
"""An engine of the real scheduler that stores, learns and reuses segments, in real pages.

In every step, all bytes that a request reads are compared.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from support.connector.blending_engine import BlendingEngine
from support.connector.exact_contents import ExactContents
from support.connector.offload_run import check_blocks, check_nothing_is_left
from support.connector.offload_workloads import offloading, tokens
from support.connector.paged_layouts import FULL, PagedLayout
from support.connector.scripted_transfers import TransferScript
from support.scheduler.options import EngineOptions
from support.scheduler.workload import RequestPlan
from vllm_ascend_kvext.segments.prompt_segments import SEGMENTS_KEY, STORE_KEY

SINK = [5]
QUESTION = tuple(tokens(random.Random("question"), 9))
HEAD_TOKENS = 4
MAX_TOKENS = 400


class LearningEngine(BlendingEngine):
    """Keeps its answers, and checks all of its steps."""

    def __init__(
        self,
        layout: PagedLayout,
        options: EngineOptions,
        script: TransferScript,
        num_contents: Sequence[int] | None = None,
    ) -> None:
        super().__init__(layout, options, script, num_contents)
        self.answers: dict[str, list[int]] = {}
        self.contents = ExactContents(self, MAX_TOKENS)
        self.num_asked = 0

    def send(self, prompt: Iterable[int], max_tokens: int, **more: Any) -> RequestPlan:
        self.num_asked += 1
        plan = RequestPlan(
            request_id=f"request-{self.num_asked}",
            arrival_step=0,
            prompt=tuple(prompt),
            max_tokens=max_tokens,
            **more,
        )
        self.add_request(plan)
        self.contents.expect(plan)
        return plan

    def ask(
        self,
        *documents: Sequence[int],
        extra_args: dict[str, Any] | None = None,
        max_tokens: int = 3,
        beginning: Sequence[int] | None = None,
        **more: Any,
    ) -> str:
        """Send a request that names some documents behind a beginning.

        By default, it is a new one.
        """
        if beginning is None:
            beginning = tokens(random.Random(self.num_asked), 5)
        prompt: list[int] = [*beginning]
        segments = []
        for document in documents:
            segments.append([len(prompt), len(prompt) + len(document)])
            prompt += document
        args = {SEGMENTS_KEY: segments, **(extra_args or {})}
        prompt += QUESTION
        return self.send(prompt, max_tokens, extra_args=tuple(args.items()), **more).request_id

    def answer(self, *documents: Sequence[int], **more: Any) -> None:
        """Send a request that names some documents, and step until there is nothing left to do."""
        self.ask(*documents, **more)
        self.serve()

    def show_twice(self, *documents: Sequence[int], **more: Any) -> None:
        """Send two requests with these documents, one after the other."""
        for _ in range(2):
            self.ask(*documents, **more)
            self.step_until(lambda: len(self.answers) == self.num_asked)

    def store(self, document: Sequence[int], is_stored: Any = True, **more: Any) -> None:
        """Store a document like a client does."""
        plan = self.send(document, 1, extra_args=((STORE_KEY, is_stored),), **more)
        self.contents.expect_segment(document, plan)

    def queue(self, *documents: Sequence[int]) -> None:
        """Let the engine compute some documents in the following steps."""
        self.segments.learning.is_held = True
        for document in (*documents, *documents):
            self.ask(document)
        self.serve()
        self.segments.learning.is_held = False
        self.ask(QUESTION, max_tokens=1)

    def begin_learning(self, *documents: Sequence[int]) -> None:
        """Let the engine learn some documents while nothing else runs."""
        self.queue(*documents)
        self.step_until(lambda: self.own_ids)
        assert list(self.scheduler.requests) == self.own_ids

    def step(self) -> Any:
        num_own = len(self.own_plans)
        step = super().step()
        own = zip(self.own_plans[num_own:], self.own_segments[num_own:], strict=True)
        for plan, segment in own:
            self.contents.expect(plan)
            self.contents.expect_segment(segment, plan)
        for request_id, token_ids, _ in step.outputs:
            self.answers.setdefault(request_id, []).extend(token_ids)
        check_blocks(self)
        self.contents.check()
        return step

    def step_tokens(self) -> int:
        """Take a step, and return the number of computed tokens."""
        return sum(each.num_tokens for each in self.step().scheduled)

    def serve(self) -> None:
        self.step_until(lambda: not self.has_work())

    def step_until(self, has_come: Callable[[], Any]) -> None:
        for _ in range(300):
            if has_come():
                return
            self.step()
        raise AssertionError("the engine makes no progress")

    @property
    def own_ids(self) -> list[str]:
        """The engine's own requests that have not ended."""
        own = {plan.request_id for plan in self.own_plans}
        return [request_id for request_id in self.scheduler.requests if request_id in own]

    @property
    def learned(self) -> list[tuple[int, ...]]:
        """The segments that the engine's own requests have computed, or are computing."""
        return self.own_segments

    @property
    def counts(self) -> Any:
        return self.segments.counters

    @property
    def drops(self) -> int:
        return self.counts.learning_drops


@contextmanager
def learning_engine(
    layout: PagedLayout = FULL,
    script: TransferScript | None = None,
    connector: dict[str, Any] | None = None,
    segments: dict[str, Any] | None = None,
    num_contents: Sequence[int] | None = None,
    **options: Any,
) -> Iterator[LearningEngine]:
    """An engine that checks its keys. See `SimulatedEngine` for ``num_contents``."""
    found = {"sink": SINK, "learn": True, "head_tokens": HEAD_TOKENS, **(segments or {})}
    config = offloading(layout, segments=found, **(connector or {}))
    engine = LearningEngine(
        layout,
        EngineOptions(**({"num_blocks": 400} | options), offloading=config),
        script or TransferScript(),
        num_contents,
    )
    engine.choose(min_tokens=8)
    try:
        yield engine
        engine.serve()
        engine.contents.check(is_end=True)
        check_nothing_is_left(engine)
        check_nothing_is_remembered(engine)
        assert set(engine.answers) <= {f"request-{n + 1}" for n in range(engine.num_asked)}
    finally:
        engine.shutdown()


def check_nothing_is_remembered(engine: LearningEngine) -> None:
    learning = engine.segments.learning
    if learning is not None:
        assert not engine.held.num_begun_segments and not learning.has_queue
        connected = engine.scheduler.update_from_output.func.__self__
        assert connected._learned is not None and not connected._learned._ids
