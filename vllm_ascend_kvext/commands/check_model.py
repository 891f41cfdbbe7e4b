# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vllm-ascend-kvext project
"""Check whether the segments of a model may be reused by blending. Run it once, before serving.

    python -m vllm_ascend_kvext check-model MODEL [arguments of vllm serve]

The command starts vLLM with the connector. The model computes prompts of random tokens with and
without reuse, and the command compares the answers; see docs/blending.md. Pass the arguments with
which the model is served, including --kv-transfer-config. Without this argument, the connector's
options have their defaults. The exit status is 1 if segments may not be reused.
"""

from __future__ import annotations

import argparse
import os
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from vllm_ascend_kvext.errors import BlendingError
from vllm_ascend_kvext.segments.model_gate import GateQuestion, GateReply, Heads, ModelGate
from vllm_ascend_kvext.segments.prompt_segments import SEGMENTS_KEY, STORE_KEY
from vllm_ascend_kvext.segments.scheduler.segments_side import segments_of

if TYPE_CHECKING:
    from vllm import LLM


_NUM_LOGPROBS = 20
"""The number of answer tokens whose log-probabilities are compared."""

_SEGMENT_OPTIONS = {"selector": "heads", "context": False, "learn": False}
"""These options of segments replace the given options, so that the engine computes exactly the
prompts of the check."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("model", help="folder or name, as for vllm serve")
    parser.add_argument("engine", nargs=argparse.REMAINDER, help="further arguments of vllm serve")


def run(arguments: argparse.Namespace) -> int:
    llm = _engine(arguments.model, arguments.engine)
    try:
        engine = _Engine(llm)
        model = llm.llm_engine.model_config
        dtype = str(model.dtype).rpartition(".")[2]
        numbers = engine.make_gate().check(model.get_vocab_size(), dtype)
    except BlendingError as error:
        print(f"Segments are not to be reused: {error}")
        return 1
    print(f"Segments may be reused: {numbers}.")
    return 0


def _engine(model: str, arguments: Sequence[str]) -> LLM:
    """An engine in this process, as `vllm serve` would make it, with the connector."""
    os.environ.setdefault("VLLM_LOGGING_STREAM", "ext://sys.stderr")  # The result is on stdout.
    os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"
    from vllm import LLM
    from vllm.config import KVTransferConfig
    from vllm.engine.arg_utils import EngineArgs
    from vllm.utils.argparse_utils import FlexibleArgumentParser

    parser = EngineArgs.add_cli_args(FlexibleArgumentParser())
    engine_args = EngineArgs.from_cli_args(parser.parse_args(["--model", model, *arguments]))
    transfer = engine_args.kv_transfer_config or KVTransferConfig(
        kv_connector="KvextConnector", kv_role="kv_both"
    )
    transfer.kv_connector_extra_config = _options(transfer.kv_connector_extra_config)
    engine_args.kv_transfer_config = transfer
    engine_args.max_logprobs = _NUM_LOGPROBS
    return LLM.from_engine_args(engine_args)


def _options(given: Mapping[str, Any]) -> dict[str, Any]:
    """Make the connector's options for the check from the options with which the model is served.

    A value of ``segments`` that is no object stays as it is: the engine refuses it with a message.
    """
    segments = given.get("segments")
    if segments is None:
        segments = {}
    if isinstance(segments, Mapping):
        segments = {**segments, **_SEGMENT_OPTIONS}
    return {"host_memory_gib": 1, **given, "store_policy": "never", "segments": segments}


class _Engine:
    """An ``AskedEngine``: an engine that has no other clients."""

    def __init__(self, llm: LLM) -> None:
        from vllm_ascend_kvext.patches.connector.scheduler import side_of

        self._llm = llm
        self._scheduler = llm.llm_engine.engine_core.engine_core.scheduler
        side = side_of(self._scheduler)
        segments = segments_of(side)
        if side is None or segments is None:
            raise BlendingError(
                "check-model: expected an engine that reuses segments, found one that does not. "
                "The log says why; serve without segments."
            )
        self._side = side
        self._segments = segments

    @property
    def keys_are_checked(self) -> bool:
        return self._segments.checks.are_passed

    @property
    def why_no_reuse(self) -> str:
        return self._segments.checks.failure

    def ask(self, questions: Sequence[GateQuestion]) -> list[GateReply]:
        from vllm import SamplingParams

        prompts = []
        sampling = []
        for question in questions:
            named: dict[str, Any] = {}
            if question.stores:
                named = {STORE_KEY: True}
            elif question.segments:
                named = {SEGMENTS_KEY: [list(segment) for segment in question.segments]}
            prompts.append(
                {
                    "prompt_token_ids": list(question.token_ids),
                    "cache_salt": question.cache_salt,
                }
            )
            sampling.append(
                SamplingParams(
                    temperature=0.0,
                    max_tokens=1,
                    logprobs=_NUM_LOGPROBS,
                    detokenize=False,
                    extra_args=named,
                )
            )
        outputs = self._llm.generate(prompts, sampling, use_tqdm=False)
        while self._side.has_transfers:
            self._llm.llm_engine.step()
        return [_reply(output) for output in outputs]

    def forget_cached(self) -> None:
        self._llm.reset_prefix_cache()

    def compute_heads(self, heads: Heads) -> None:
        self._segments.blended.options = replace(self._segments.blended.options, **heads._asdict())

    def make_gate(self) -> ModelGate:
        options = self._segments.blended.options
        model = self._llm.llm_engine.model_config
        groups = self._scheduler.kv_cache_config.kv_cache_groups
        return ModelGate(
            self,
            Heads(options.head_tokens, options.min_head_tokens),
            self._segments.store.contexts.sink_ids,
            options.min_tokens,
            max(group.kv_cache_spec.block_size for group in groups),
            model.max_model_len - 1,
        )


def _reply(output: Any) -> GateReply:
    (completion,) = output.outputs
    if not completion.logprobs:
        raise BlendingError(
            "check-model: expected answers to all prompts, found one without: it has failed, as "
            "vLLM has requests do whose loads fail. The log says why; serve without segments."
        )
    answer = {token: entry.logprob for token, entry in completion.logprobs[0].items()}
    return answer, output.kv_transfer_params or {}
