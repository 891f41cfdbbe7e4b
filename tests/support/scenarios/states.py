# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vllm-ascend-kvext project
"""Models with states, with and without drafts: prompts that are seen again, and wrong states.

`plan` makes the plan of an engine. ``sightings`` is the scenario that every engine answers, and
``controls`` are answers that must be wrong. See `support.states` for how to start one.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from support.scenarios import connector, scenario
from support.scenarios.engine import VOCABULARY_TOKENS, Tokens, random_tokens
from support.scenarios.processes import IS_V2_RUNNER, Plan
from support.upstream_version import IS_SINCE_0_30

NUM_DRAFT_TOKENS = 2

NO_DRAFTS = ""
MTP = "mtp"
NGRAM = "ngram"
KNOWN = "known"
"""Drafts in place of those by n-grams, see `support.states.known_drafts`."""

RUNNER_ENVIRON = {"VLLM_USE_V2_MODEL_RUNNER": "1" if IS_V2_RUNNER else "0"}
"""The variable that chooses the runner. vLLM would choose by model."""

NUM_AT_ONCE = 3
REPLY_TOKENS = 12
SIBLING_BLOCKS = 4
"""The whole blocks that the last prompt shares with another one that is asked at the same time."""
LATER_TURN_TOKENS = 41


def plan(
    model: Path | Callable[[], Path],
    scenarios: Sequence[str],
    drafts: str = NO_DRAFTS,
    is_async: bool = False,
    unit_tokens: int = 32,
    **engine: Any,
) -> Plan:
    """The plan of an engine.

    Args:
        model: The folder of a model, see `support.states.state_models`, or what makes it.
        drafts: What drafts come from: nothing, the model's layer, n-grams, or known replies.
        is_async: Whether a step is scheduled before the one before it has ended.
        unit_tokens: The size of a state's block. Prompts have lengths near its multiples. An engine
            without prefix caching has other blocks, and gets the same prompts.
        engine: Further arguments of ``LLM``.
    """
    arguments: dict[str, Any] = {"enable_prefix_caching": True, "block_size": unit_tokens, **engine}
    if drafts:
        arguments["speculative_config"] = {
            "method": MTP if drafts == MTP else NGRAM,
            "num_speculative_tokens": NUM_DRAFT_TOKENS,
            **engine.get("speculative_config", {}),
        }
        if drafts != MTP:
            arguments["speculative_config"] |= {"prompt_lookup_max": 3, "prompt_lookup_min": 1}
    options = {"drafts": drafts, "is_async": is_async, "unit_tokens": unit_tokens}
    return Plan(model, scenarios, "states", arguments, options)


class Engine(connector.Engine):
    """An engine whose model has states."""

    reply_tokens = REPLY_TOKENS

    def __init__(self, plan: Mapping[str, Any]) -> None:
        from vllm.platforms import current_platform

        from support.states import known_drafts, latents_by_block

        if current_platform.is_cpu():
            _complete_cpu()
        if plan.get("has_latents_by_block"):
            latents_by_block.install()
        self.known = known_drafts.KnownReplies(VOCABULARY_TOKENS)
        in_place = known_drafts.in_place(self.known, plan["drafts"] == KNOWN)
        with in_place, _asynchronous(plan["is_async"]):
            super().__init__(dict(plan))
        self.unit_tokens: int = plan["unit_tokens"]

    @property
    def state_groups(self) -> list[Any]:
        from vllm.v1.kv_cache_interface import MambaSpec

        groups = self.scheduler.kv_cache_config.kv_cache_groups
        return [group for group in groups if isinstance(group.kv_cache_spec, MambaSpec)]

    def cached_states(self) -> list[list[Any]]:
        """The cached states on the device, by state tensor. Groups share tensors, not blocks."""
        from vllm.v1.core.kv_cache_utils import get_group_id

        layers = self.core.vllm_config.compilation_config.static_forward_context
        blocks: dict[int, list[int]] = {}
        for block in self.scheduler.kv_cache_manager.block_pool.blocks:
            if block.block_hash is not None:
                blocks.setdefault(get_group_id(block.block_hash), []).append(block.block_id)
        return [
            [tensor[block] for block in blocks.get(number, ())]
            for number, group in enumerate(self.scheduler.kv_cache_config.kv_cache_groups)
            if group in self.state_groups
            for name in group.layer_names
            for tensor in layers[name].kv_cache
        ]

    @contextmanager
    def storing_at_once(self) -> Iterator[None]:
        """Inside the block, stores of a step end when they begin, as if the stream was quick."""
        if not self.has_connector:
            yield
            return
        from vllm_ascend_kvext.connector.worker.worker_side import WorkerSide

        own = WorkerSide.end_of_forward

        def end_of_forward(side: WorkerSide) -> None:
            stores, side._stores_after_forward = side._stores_after_forward, ()
            side._thread.run_now(stores, side._record())

        WorkerSide.end_of_forward = end_of_forward  # type: ignore[method-assign]
        yield
        WorkerSide.end_of_forward = own  # type: ignore[method-assign]

    def forget_host(self) -> None:
        """Empty the host tier."""
        if self.has_connector:
            self.finish()
            self.side.tier.evict(lambda entry: True)

    def report(self) -> dict[str, Any]:
        from support.states import first_runner

        config = self.core.vllm_config
        return super().report() | {
            "is_async": config.scheduler_config.async_scheduling,
            "state block tokens": self.state_groups[0].kv_cache_spec.block_size,
            "mode": config.cache_config.mamba_cache_mode,
            "state copies": dict(first_runner.COUNTED),
        }


def _complete_cpu() -> None:
    """Add what vLLM's CPU engine lacks for states."""
    import torch

    from support.states import first_runner, gated_delta_rule

    # Weights and convolutions of CPUs with these instructions are bfloat16 only.
    torch.cpu._is_avx512_bf16_supported = torch.cpu._is_amx_tile_supported = lambda: False
    gated_delta_rule.install()
    if not IS_SINCE_0_30:
        _activate_experts()
    if IS_V2_RUNNER:
        _interpret_fewer_programs()
    else:
        first_runner.install()


def _activate_experts() -> None:
    """Give experts an activation that needs no configuration.

    On a CPU without AVX-512, vLLM 0.23 makes a layer of it in each step, and that fails.
    """
    from torch.nn import functional
    from vllm.model_executor.layers.fused_moe import cpu_fused_moe
    from vllm.model_executor.layers.fused_moe.activation import MoEActivation

    def silu_and_mul(gates_and_values: Any) -> Any:
        gates, values = gates_and_values.chunk(2, dim=-1)
        return functional.silu(gates) * values

    cpu_fused_moe._CPU_MOE_ACT_FN[MoEActivation.SILU] = silu_and_mul


def _interpret_fewer_programs() -> None:
    """Let one program of Triton's interpreter copy a state, in place of sixteen."""
    from vllm.v1.worker import mamba_utils

    mamba_utils._TEMPORAL_TILES = 1


@contextmanager
def _asynchronous(is_on: bool) -> Iterator[None]:
    """Inside the block, engines schedule asynchronously or not. On a CPU, vLLM would never."""
    from vllm.platforms import current_platform

    platform = type(current_platform)
    own = platform.__dict__["check_and_update_config"]

    def check(cls: Any, config: Any) -> None:
        own.__func__(cls, config)
        config.scheduler_config.async_scheduling = is_on

    platform.check_and_update_config = classmethod(check)
    yield
    platform.check_and_update_config = own


def _prompts(engine: Engine, rng: random.Random) -> list[Tokens]:
    """Prompts that end before, at and behind the ends of blocks, and two with one beginning."""
    block = engine.unit_tokens
    lengths = (3 * block - 1, 3 * block, 3 * block + 1, 5 * block + block // 2, block // 2)
    prompts = [random_tokens(rng, length) for length in lengths]
    sibling = prompts[3][: SIBLING_BLOCKS * block + 3] + random_tokens(rng, block)
    return [*prompts, sibling]


def _ask(engine: Engine, label: str, prompts: Sequence[Tokens]) -> list[Tokens]:
    """Ask some prompts at once, and then the next. Each group begins while nothing runs."""
    replies: list[Tokens] = []
    for first in range(0, len(prompts), NUM_AT_ONCE):
        some = prompts[first : first + NUM_AT_ONCE]
        found = engine.ask(label, some)
        for prompt, reply in zip(some, found, strict=True):
            engine.known.learn(prompt, reply)
        replies += found
        engine.finish()
    return replies


@scenario
def sightings(engine: Engine) -> None:
    """Prompts for the first time, from the device, from host memory, and in their next turns."""
    rng = random.Random(11)
    prompts = _prompts(engine, rng)
    replies = _ask(engine, "cold", prompts)
    _ask(engine, "device", prompts)
    engine.spoil_pages()
    _ask(engine, "host", prompts)
    _ask(engine, "host, then device", prompts)
    turns = [
        prompt + reply + random_tokens(rng, LATER_TURN_TOKENS)
        for prompt, reply in zip(prompts, replies, strict=True)
    ]
    _ask(engine, "next turn", turns)
    engine.spoil_pages()
    _ask(engine, "next turn, host", turns)


@scenario
def siblings(engine: Engine) -> None:
    """Prompts that part inside blocks, one after another and several at once. Then their turns.

    The first prompts of a family leave no state where they part. Later prompts hit there.
    """
    rng = random.Random(14)
    unit = engine.plan.get("match_unit_tokens") or engine.unit_tokens
    block = engine.unit_tokens
    for shared_tokens in (3 * unit + 1, block + unit, 2 * block - 1):
        shared = random_tokens(rng, shared_tokens)
        prompts = [shared + random_tokens(rng, 7 + 5 * number) for number in range(7)]
        for prompt in prompts[:3]:
            _ask(engine, "siblings", [prompt])
        _ask(engine, "siblings at once", prompts[3:])
        replies = _ask(engine, "siblings again", prompts)
        turns = [
            prompt + reply + random_tokens(rng, LATER_TURN_TOKENS)
            for prompt, reply in zip(prompts, replies, strict=True)
        ]
        _ask(engine, "turns of siblings", turns)
    engine.reset(is_host_too=True)


@scenario
def crossings(engine: Engine) -> None:
    """Answers that end in the next block. Their states at its beginning come back from host memory.

    Stores are carried out as soon as they have begun: later kernels of their step run behind them.
    """
    rng = random.Random(13)
    block = engine.unit_tokens
    prompts = [random_tokens(rng, 2 * block - before) for before in range(1, REPLY_TOKENS - 2)]
    with engine.storing_at_once():
        replies = [_ask(engine, "crossing", [prompt])[0] for prompt in prompts]
    engine.spoil_pages()
    turns = [
        prompt + reply + random_tokens(rng, block // 2)
        for prompt, reply in zip(prompts, replies, strict=True)
    ]
    _ask(engine, "behind the crossing", turns)
    engine.reset(is_host_too=True)


@scenario
def controls(engine: Engine) -> None:
    """Hits whose states are lost or another prompt's, and loads that move nothing."""
    rng = random.Random(12)
    prompts = [random_tokens(rng, 4 * engine.unit_tokens + 5) for _ in range(NUM_AT_ONCE)]
    for label in ("zeroed states", "foreign states"):
        _ask(engine, f"before {label}", prompts)
        _ask(engine, f"before {label}", prompts)
        engine.forget_host()
        for states in engine.cached_states():
            _spoil(states, label)
        _ask(engine, label, prompts)
        engine.reset(is_host_too=True)
    for label in ("zeroed states", "foreign states"):
        _ask(engine, f"before {label}, host", prompts)
        _ask(engine, f"before {label}, host", prompts)
        engine.spoil_pages()
        if engine.has_connector:
            tails = [e for e in engine.side.tier._entries.values() if e.piece.kind.name == "TAILS"]
            _spoil([engine.host_bytes(entry) for entry in tails], label)
        _ask(engine, f"{label}, host", prompts)
        engine.reset(is_host_too=True)
    _ask(engine, "before loads of nothing", prompts)
    engine.spoil_pages()
    with engine.loading_nothing():
        _ask(engine, "loads of nothing", prompts)
    engine.reset(is_host_too=True)


def _spoil(states: Sequence[Any], label: str) -> None:
    """Set states to zero, or give each state the next one's place."""
    copies = [state.clone() for state in states]
    for state, other in zip(states, copies[1:] + copies[:1], strict=True):
        state.zero_() if label == "zeroed states" else state.copy_(other)
