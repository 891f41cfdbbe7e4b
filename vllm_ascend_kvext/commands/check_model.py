# SPDX-License-Identifier: Apache-2.0
"""Ask a model whether its segments may be reused by blending. Once, before it serves.

    python -m vllm_ascend_kvext check-model MODEL [arguments of vllm serve]

Starts vLLM with the connector, lets the model compute prompts of random tokens with and without
reuse, and compares the answers; see docs/blending.md. Give it the arguments that the model is
served with, --kv-transfer-config among them: without one, the connector's options have their
defaults. With --enforce-eager it also says which layer to name as blend_check_layer. The exit
status is 1 if segments may not be reused.
"""

from __future__ import annotations

import argparse
import os
import random
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from vllm_ascend_kvext.blending.errors import BlendingError
from vllm_ascend_kvext.blending.layer_search import (
    LayerSearchWorker,
    best_layer,
    copy_prompt,
    mean_shares,
)
from vllm_ascend_kvext.blending.model_gate import GateQuestion, GateReply, Heads, ModelGate
from vllm_ascend_kvext.blending.segments import SEGMENTS_KEY, STORE_KEY
from vllm_ascend_kvext.connector.segments.blended_requests import Blending

if TYPE_CHECKING:
    from vllm import LLM


_NUM_LOGPROBS = 20
"""Answer tokens whose log-probabilities are compared."""

_NUM_LAYER_PROMPTS = 16
_LAYER_PROMPT_TOKENS = 512
_COPIED_TOKENS = 8

_OPTIONS = {
    "blending": True,
    "store_policy": "never",
    "blend_selector": "heads",
    "learn_segments": False,
}
"""The connector's options that hold whatever the arguments say: what is asked stays what is
computed."""


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
    print(_layer(llm))
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
    given = transfer.kv_connector_extra_config
    transfer.kv_connector_extra_config = {"host_memory_gib": 1, **given, **_OPTIONS}
    engine_args.kv_transfer_config = transfer
    engine_args.max_logprobs = _NUM_LOGPROBS
    engine_args.worker_extension_cls = (
        f"{LayerSearchWorker.__module__}.{LayerSearchWorker.__qualname__}"
    )
    return LLM.from_engine_args(engine_args)


class _Engine:
    """An engine that has no other clients; an ``AskedEngine``."""

    def __init__(self, llm: LLM) -> None:
        from vllm_ascend_kvext.patches.connector.scheduler import connector_of

        self._llm = llm
        self._scheduler = llm.llm_engine.engine_core.engine_core.scheduler
        connector = connector_of(self._scheduler)
        side = None if connector is None else connector.scheduler_side
        if connector is None or side is None or not isinstance(side.segments, Blending):
            raise BlendingError(
                "check-model: expected an engine that reuses segments, found one that does not. "
                "The log says why; serve without blending."
            )
        self._side = side
        self._blending = side.segments

    @property
    def keys_are_checked(self) -> bool:
        return self._blending.keys_are_checked

    @property
    def why_no_reuse(self) -> str:
        return self._blending.why_no_reuse

    def ask(self, questions: Sequence[GateQuestion]) -> list[GateReply]:
        from vllm import SamplingParams

        prompts, sampling = [], []
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
        self._blending.options = replace(self._blending.options, **heads._asdict())

    def make_gate(self) -> ModelGate:
        options = self._blending.options
        model = self._llm.llm_engine.model_config
        groups = self._scheduler.kv_cache_config.kv_cache_groups
        return ModelGate(
            self,
            Heads(options.head_tokens, options.min_head_tokens),
            self._blending.store.sink_ids,
            options.min_tokens,
            max(group.kv_cache_spec.block_size for group in groups),
            model.max_model_len - 1,
        )


def _reply(output: Any) -> GateReply:
    (completion,) = output.outputs
    if not completion.logprobs:
        raise BlendingError(
            "check-model: expected answers to all prompts, found one without: it has failed, as "
            "vLLM has requests do whose loads fail. The log says why; serve without blending."
        )
    answer = {token: entry.logprob for token, entry in completion.logprobs[0].items()}
    return answer, output.kv_transfer_params or {}


def _layer(llm: LLM) -> str:
    """What to say of the layer at which questions are compared with segments."""
    config = llm.llm_engine.vllm_config
    if not config.model_config.enforce_eager:
        return "With --enforce-eager, check-model also finds the layer for blend_selector=question."
    try:
        shares = _shares(llm)
    except (BlendingError, RuntimeError) as error:  # Other processes send the second one.
        return f"blend_check_layer: not found: {error}"
    best = best_layer(shares)
    found = "".join(f"\n  layer {index:3}  {share:.3f}" for index, share in shares.items())
    if best is None:
        return f"No layer attends to what it has seen before: leave blend_selector out.{found}"
    return f'With blend_selector=question, set "blend_check_layer": {best}.{found}'


def _shares(llm: LLM) -> dict[int, float]:
    """How much of what each layer with full attention attends to is what it is to find.

    Raises:
        BlendingError: The attention of some layer cannot be read.
    """
    from vllm import SamplingParams

    config = llm.llm_engine.vllm_config
    num_tokens = min(
        _LAYER_PROMPT_TOKENS,
        config.model_config.max_model_len - 1,
        config.scheduler_config.max_num_batched_tokens,
    )
    model = config.model_config.hf_text_config
    first_id = getattr(model, "bos_token_id", None)
    first_ids = [first_id] if isinstance(first_id, int) else []
    rng = random.Random(0)
    sampling = SamplingParams(temperature=0, max_tokens=1, detokenize=False)
    found: dict[str, list[float | None]] = defaultdict(list)
    for _ in range(_NUM_LAYER_PROMPTS):
        prompt = copy_prompt(rng, first_ids, model.vocab_size, num_tokens, _COPIED_TOKENS)
        llm.collective_rpc("kvext_begin_copy", args=tuple(prompt))
        llm.generate({"prompt_token_ids": list(prompt.token_ids)}, sampling, use_tqdm=False)
        for of_worker in llm.collective_rpc("kvext_end_copy"):  # stage after stage
            for name, share in of_worker.items():
                found[name].append(share)
    return mean_shares(found)
