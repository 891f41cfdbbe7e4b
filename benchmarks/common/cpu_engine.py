# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vllm-ascend-kvext project
"""Runs vLLM on a CPU in this process. The loop is here, so that each step can be measured.

Like vLLM's server, the loop waits a millisecond after a step that computes nothing.
"""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

ENVIRON = {
    "VLLM_CPU_KVCACHE_SPACE": "1",
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
    "VLLM_LOGGING_LEVEL": "ERROR",
    # Compiling would not pay, and would need a C++ compiler.
    "TORCHDYNAMO_DISABLE": "1",
}
"""Environment variables that must be set before vLLM is imported."""

POLL_S = 0.001


@dataclass(frozen=True, slots=True)
class Asked:
    """One request that was served alone.

    Attributes:
        output: The output of vLLM.
        first_token_s: The time from adding the request to its first token.
    """

    output: Any
    first_token_s: float
    computed_tokens: int

    @property
    def hit_tokens(self) -> int:
        return self.output.num_cached_tokens or 0


def kvext_config(**extra_config: Any) -> dict[str, Any]:
    """``kv_transfer_config`` of KvextConnector."""
    return {
        "kv_connector": "KvextConnector",
        "kv_role": "kv_both",
        "kv_load_failure_policy": "recompute",
        "kv_connector_module_path": "vllm_ascend_kvext.connector",
        "kv_connector_extra_config": extra_config,
    }


class CpuEngine:
    """An engine and its loop.

    Args:
        model: The folder of the model.
        kv_transfer_config: The connector's configuration for vLLM; None for no connector.

    Attributes:
        step_tokens: The tokens that the last step computed.
        computed_tokens: The tokens that all steps computed.
    """

    def __init__(
        self, model: str, kv_transfer_config: Mapping[str, Any] | None, **options: Any
    ) -> None:
        from vllm import LLM

        if kv_transfer_config is not None:
            options["kv_transfer_config"] = dict(kv_transfer_config)
        settings = {
            "skip_tokenizer_init": True,
            "enforce_eager": True,
            "enable_prefix_caching": True,
            "disable_hybrid_kv_cache_manager": False,
            # Without asynchronous scheduling, the tokens and the time of a step belong together.
            "async_scheduling": False,
            "seed": 0,
        }
        self.llm = LLM(model, **(settings | options))
        self._engine = self.llm.llm_engine
        self.scheduler = self._engine.engine_core.engine_core.scheduler
        self.step_tokens = self.computed_tokens = 0
        self._num_requests = 0
        update_from_output = self.scheduler.update_from_output

        def counted(output: Any, from_model: Any) -> Any:
            self.step_tokens = output.total_num_scheduled_tokens
            self.computed_tokens += self.step_tokens
            return update_from_output(output, from_model)

        self.scheduler.update_from_output = counted

    @property
    def block_tokens(self) -> int:
        return int(self._engine.vllm_config.cache_config.block_size)

    def add(self, tokens: Sequence[int], num_output_tokens: int = 1, **sampling: Any) -> str:
        """Add a request, and return its id. ``sampling`` goes to ``SamplingParams``."""
        from vllm import SamplingParams

        self._num_requests += 1
        request_id = f"request-{self._num_requests}"
        params = SamplingParams(
            temperature=0,
            max_tokens=num_output_tokens,
            ignore_eos=True,
            detokenize=False,
            **sampling,
        )
        self._engine.add_request(request_id, {"prompt_token_ids": list(tokens)}, params)
        return request_id

    def abort(self, request_ids: Sequence[str]) -> None:
        self._engine.abort_request(list(request_ids))

    def step(self) -> list[Any]:
        """Take one step, and return its outputs."""
        self.step_tokens = 0
        outputs = self._engine.step()
        if not self.step_tokens:
            time.sleep(POLL_S)
        return list(outputs)

    def ask(self, tokens: Sequence[int], num_output_tokens: int = 1, **sampling: Any) -> Asked:
        """Serve one request until it has ended."""
        first_token_s = 0.0
        first_tokens = 0
        before_tokens = self.computed_tokens
        began_s = time.perf_counter()
        request_id = self.add(tokens, num_output_tokens, **sampling)
        while True:
            for output in self.step():
                if output.request_id != request_id:
                    continue
                if not first_tokens and output.outputs[0].token_ids:
                    first_token_s = time.perf_counter() - began_s
                    first_tokens = self.computed_tokens - before_tokens
                if output.finished:
                    return Asked(output, first_token_s, first_tokens)

    def ask_all(
        self, prompts: Sequence[Sequence[int]], extra_args: Sequence[dict[str, Any]]
    ) -> list[Any]:
        """Serve many requests at once with one token each. Returns their outputs in order."""
        pairs = zip(prompts, extra_args, strict=True)
        ids = [self.add(tokens, extra_args=extra) for tokens, extra in pairs]
        found: dict[str, Any] = {}
        while len(found) < len(ids):
            found |= {output.request_id: output for output in self.step() if output.finished}
        return [found[request_id] for request_id in ids]

    def settle(self) -> None:
        """Run steps until the work after the answers, such as stores, is done."""
        while self.scheduler.has_requests():
            self.step()

    def forget_local(self) -> None:
        """Empty the prefix cache on the device."""
        while not self.llm.reset_prefix_cache():
            self.step()

    def close(self) -> None:
        """End the engine, so that another engine may start in this process."""
        self._engine.engine_core.shutdown()
