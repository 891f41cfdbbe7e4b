# SPDX-License-Identifier: Apache-2.0
"""What an engine is made to do for the check of its model, and what it is left with."""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
from vllm.distributed.kv_events import NullEventPublisher

from vllm_ascend_kvext.blending.gate_verdict import GateVerdict
from vllm_ascend_kvext.connector.model_gate import GateQuestion
from vllm_ascend_kvext.patches.connector import model_check

QUESTION = GateQuestion((1, 2, 3))


class Logprobs:
    """Takes the place of arrays. shape: [1, 2]."""

    def __init__(self, numbers: list[float]) -> None:
        self.numbers = numbers

    def __getitem__(self, index: int) -> Logprobs:
        return self

    def tolist(self) -> list[float]:
        return self.numbers


class Publisher(NullEventPublisher):
    """Keeps what it publishes."""

    def __init__(self) -> None:
        self.published: list[Any] = []

    def publish(self, events: Any) -> None:
        self.published.append(events)


class FakeScheduler:
    """Holds requests until they are answered."""

    def __init__(self) -> None:
        self.requests: dict[str, Any] = {}
        self.publisher = self.kv_event_publisher = Publisher()
        self.kv_cache_manager = SimpleNamespace(take_events=lambda: self.taken.append("events"))
        self.taken: list[str] = []

    def add_request(self, request: Any) -> None:
        self.requests[request.request_id] = request

    def has_requests(self) -> bool:
        return bool(self.requests)

    def finish_requests(self, request_ids: list[str], status: Any) -> None:
        for request_id in request_ids:
            del self.requests[request_id]

    def reset_prefix_cache(self) -> bool:
        self.taken.append("prefix cache")
        return True

    def make_stats(self) -> None:
        self.taken.append("stats")


class FakeCore:
    """Answers everything in its first step."""

    def __init__(self) -> None:
        self.scheduler = FakeScheduler()
        self.batch_queue = None
        self.request_block_hasher = None
        self.is_pooling_model = False
        self.vllm_config = SimpleNamespace(
            model_config=SimpleNamespace(get_vocab_size=lambda: 1000, dtype="torch.float32"),
            parallel_config=SimpleNamespace(
                data_parallel_size=1, distributed_executor_backend=None
            ),
        )
        self.num_steps = 0
        self.num_steps_in_vain = 0
        self.has_shut_down = False
        self.has_failed_requests = False

    def step_fn(self) -> tuple[dict[int, Any], bool]:
        self.num_steps += 1
        if self.num_steps <= self.num_steps_in_vain:
            return {}, False
        self.scheduler.kv_event_publisher.publish(["stored"])
        logprobs = SimpleNamespace(
            logprob_token_ids=Logprobs([5, 6]), logprobs=Logprobs([-0.5, -1.5])
        )
        outputs = [
            SimpleNamespace(
                request_id=request_id,
                new_logprobs=None if self.has_failed_requests else logprobs,
                kv_transfer_params=None,
            )
            for request_id in self.scheduler.requests
        ]
        self.scheduler.requests.clear()
        return {0: SimpleNamespace(outputs=outputs)}, True

    def post_step(self, is_executed: bool) -> None:
        pass

    def shutdown(self) -> None:
        self.has_shut_down = True


class FakeBlending:
    """Asks one question."""

    def __init__(self) -> None:
        self.refusals: list[str] = []
        self.has_asked = False

    def make_gate(self) -> Any:
        return SimpleNamespace(check=self._check)

    def _check(self, engine: Any, vocabulary_tokens: int, dtype: str) -> GateVerdict:
        self.has_asked = True
        engine.ask([QUESTION])
        return GateVerdict(True, "numbers")

    def accept(self) -> None:
        pass

    def refuse(self, reason: str) -> None:
        self.refusals.append(reason)


@pytest.fixture
def core() -> FakeCore:
    return FakeCore()


@pytest.fixture
def blending() -> FakeBlending:
    return FakeBlending()


@pytest.fixture
def check(
    core: FakeCore, blending: FakeBlending, monkeypatch: pytest.MonkeyPatch
) -> Callable[[], None]:
    side = SimpleNamespace(
        blending=blending, begin_anew=lambda: core.scheduler.taken.append("connector")
    )
    monkeypatch.setattr(model_check, "side_of", lambda scheduler: side)
    monkeypatch.setattr(model_check, "_facts", lambda core, blending: {})
    monkeypatch.setattr(model_check, "read_record", lambda root, key: None)
    monkeypatch.setattr(model_check, "write_record", lambda root, key, record: None)
    core.vllm_config.model_config.model = "some/model"
    client: Any = SimpleNamespace(engine_core=core)
    return lambda: model_check.check_in_process(lambda: None, client)


def test_nobody_is_told_of_it(core: FakeCore, check: Callable[[], None]) -> None:
    check()
    scheduler = core.scheduler
    assert core.num_steps == 1
    assert scheduler.publisher.published == []
    assert scheduler.kv_event_publisher is scheduler.publisher
    assert scheduler.taken == ["prefix cache", "connector", "stats", "events"]


def test_requests_that_fail_turn_blending_off(
    core: FakeCore, blending: FakeBlending, check: Callable[[], None]
) -> None:
    """vLLM's default ends requests whose loads fail."""
    core.has_failed_requests = True
    check()
    (reason,) = blending.refusals
    assert "expected answers to 1 prompts, found 0" in reason


def test_an_engine_that_is_to_end_is_not_asked_on(
    core: FakeCore, blending: FakeBlending, check: Callable[[], None]
) -> None:
    core.is_running = lambda: False  # type: ignore[attr-defined]
    check()
    assert core.num_steps == 0
    assert not core.scheduler.requests
    (reason,) = blending.refusals
    assert "the engine is to end" in reason


def test_a_pooling_model_is_not_asked(
    core: FakeCore, blending: FakeBlending, check: Callable[[], None]
) -> None:
    core.is_pooling_model = True
    check()
    assert not blending.has_asked
    (reason,) = blending.refusals
    assert "found a pooling model" in reason


def test_engines_that_step_together_are_not_asked(
    core: FakeCore, blending: FakeBlending, check: Callable[[], None]
) -> None:
    core.vllm_config.parallel_config.data_parallel_size = 2
    check()
    assert not blending.has_asked
    assert blending.refusals == []


def test_an_engine_that_fails_is_shut_down(core: FakeCore, check: Callable[[], None]) -> None:
    def fail() -> None:
        raise RuntimeError("out of memory")

    core.step_fn = fail  # type: ignore[assignment]
    with pytest.raises(RuntimeError, match="out of memory"):
        check()
    assert core.has_shut_down


def test_threads_that_copy_get_the_interpreter(
    core: FakeCore, check: Callable[[], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    waits: list[float] = []
    monkeypatch.setattr("time.sleep", waits.append)
    core.num_steps_in_vain = 3
    check()
    assert core.num_steps == 4
    assert waits == [0.001] * 3


def test_too_long_is_said(
    core: FakeCore,
    blending: FakeBlending,
    check: Callable[[], None],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(model_check, "MOST_CHECKING_S", -1.0)
    check()
    assert not core.scheduler.requests
    (reason,) = blending.refusals
    assert "to be computed within" in reason


def core_with(**parallel: Any) -> Any:
    config = {"distributed_executor_backend": None} | parallel
    return SimpleNamespace(vllm_config=SimpleNamespace(parallel_config=SimpleNamespace(**config)))


def test_ranks_that_decide_for_themselves_all_ask(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(model_check, "_facts", lambda core, blending: {})
    blending: Any = None
    assert model_check._key(core_with(), blending)
    core = core_with(distributed_executor_backend="external_launcher")
    assert model_check._key(core, blending) is None


def test_what_has_no_key_is_asked_each_time(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(core: Any, blending: Any) -> dict[str, object]:
        raise TypeError("Object of type set is not JSON serializable")

    monkeypatch.setattr(model_check, "_facts", fail)
    blending: Any = None
    assert model_check._key(core_with(), blending) is None
