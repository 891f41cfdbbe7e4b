# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vllm-ascend-kvext project
"""Runs a workload on vLLM's real scheduler, in the same order as the engine core."""

from __future__ import annotations

from collections import deque
from typing import Any

from vllm.lora.request import LoRARequest
from vllm.multimodal.inputs import MultiModalFeatureSpec, PlaceholderRange
from vllm.sampling_params import SamplingParams
from vllm.utils.hashing import get_hash_fn_by_name
from vllm.v1.core.encoder_cache_manager import EncoderCacheManager
from vllm.v1.core.kv_cache_utils import (
    get_request_block_hasher,
    init_none_hash,
    resolve_kv_cache_block_sizes,
)
from vllm.v1.core.sched.async_scheduler import AsyncScheduler
from vllm.v1.core.sched.scheduler import Scheduler
from vllm.v1.core.single_type_kv_cache_manager import register_all_kvcache_specs
from vllm.v1.request import Request, RequestStatus
from vllm.v1.structured_output import StructuredOutputManager

from vllm_ascend_kvext.retention.hints import HINT_ARGUMENT

from .layouts import Layout
from .model_runner import ModelRunner, ReadCheck
from .options import EngineOptions, build_vllm_config
from .transcript import Step, describe_schedule
from .workload import RequestPlan

_ENCODER_CACHE_TOKENS = 64
_HASH_ALGORITHM = "sha256"


class SchedulerEngine:
    """One scheduler with its KV cache manager, and a model runner without a model."""

    def __init__(
        self, layout: Layout, options: EngineOptions, read_check: ReadCheck = ReadCheck.NONE
    ) -> None:
        self.layout = layout
        self.options = options
        vllm_config = build_vllm_config(layout, options)
        register_all_kvcache_specs(vllm_config)  # As in an engine core.
        kv_cache_config = layout.to_config(options.num_blocks)
        kv_cache_config.kv_transfer_config = (
            vllm_config.kv_transfer_config
        )  # vLLM-Ascend 0.30 does so.
        if options.interval_tokens is not None:
            kv_cache_config.prefix_cache_retention_interval = options.interval_tokens
        block_size, self.hash_block_size = resolve_kv_cache_block_sizes(
            kv_cache_config, vllm_config
        )
        hash_function = get_hash_fn_by_name(_HASH_ALGORITHM)
        init_none_hash(hash_function)
        self._block_hasher = get_request_block_hasher(self.hash_block_size, hash_function)
        scheduler_class = AsyncScheduler if options.is_async else Scheduler
        self.scheduler: Scheduler = scheduler_class(
            vllm_config=vllm_config,
            kv_cache_config=kv_cache_config,
            structured_output_manager=StructuredOutputManager(vllm_config),
            block_size=block_size,
            hash_block_size=self.hash_block_size,
        )
        # The model's config says that it is text-only. Images need an encoder budget.
        self.scheduler.max_num_encoder_input_tokens = _ENCODER_CACHE_TOKENS
        self.scheduler.encoder_cache_manager = EncoderCacheManager(_ENCODER_CACHE_TOKENS)
        self._event_batches: list[Any] = []
        self.scheduler.kv_event_publisher.publish = self._event_batches.append
        self.runner = self._new_runner(
            options.num_draft_tokens if options.drafter else 0, read_check
        )
        self.plans: dict[str, RequestPlan] = {}
        self.requests: dict[str, Request] = {}
        self.last_events: list[Any] = []
        self._in_flight: deque[tuple[Any, Any]] = deque()

    def _new_runner(self, num_draft_tokens: int, read_check: ReadCheck) -> ModelRunner:
        return ModelRunner(
            self.layout.groups, num_draft_tokens, read_check, self.options.failing_loads
        )

    @property
    def block_pool(self) -> Any:
        return self.scheduler.kv_cache_manager.block_pool

    @property
    def managers(self) -> tuple[Any, ...]:
        """The ``SingleTypeKVCacheManager`` of every group."""
        return self.scheduler.kv_cache_manager.coordinator.single_type_managers

    @property
    def replaced_methods(self) -> list[str]:
        """The methods of upstream's classes that are replaced on this engine's objects."""
        manager = self.scheduler.kv_cache_manager
        owners = (self.scheduler, self.scheduler.connector, manager, manager.coordinator)
        return sorted(
            name
            for owner in (*owners, *self.managers)
            for name, value in getattr(owner, "__dict__", {}).items()
            if callable(value) and hasattr(type(owner), name)
        )

    def has_work(self) -> bool:
        return bool(self._in_flight) or self.scheduler.has_requests() or self.runner.is_transferring

    def add_request(self, plan: RequestPlan) -> Request:
        """Queue a request, like the engine core does with a request from the front end."""
        request = self.make_request(plan)
        self.plans[plan.request_id] = plan
        self.requests[plan.request_id] = request
        self.runner.expect(plan.request_id, plan.new_stream())
        self.scheduler.add_request(request)
        return request

    def make_request(self, plan: RequestPlan) -> Request:
        """vLLM's request object for a plan, with its block hashes."""
        adapter = plan.adapter
        hints = {HINT_ARGUMENT: list(plan.checkpoint_tokens)} if plan.checkpoint_tokens else {}
        return Request(
            request_id=plan.request_id,
            prompt_token_ids=list(plan.prompt),
            sampling_params=SamplingParams(
                max_tokens=plan.max_tokens,
                stop_token_ids=list(plan.stop_tokens),
                extra_args={**hints, **dict(plan.extra_args)} or None,
            ),
            pooling_params=None,
            arrival_time=float(plan.arrival_step),
            mm_features=[
                MultiModalFeatureSpec(
                    data=None,
                    modality="image",
                    identifier=image.identifier,
                    mm_position=PlaceholderRange(image.offset_tokens, image.length_tokens),
                )
                for image in plan.images
            ],
            lora_request=LoRARequest(adapter, int(adapter[-1]) + 1, "unused") if adapter else None,
            cache_salt=plan.cache_salt,
            priority=plan.priority,
            block_hasher=self._block_hasher,
        )

    def abort(self, request_id: str) -> bool:
        """Abort a request. Return whether it existed."""
        aborted = self.scheduler.finish_requests(request_id, RequestStatus.FINISHED_ABORTED)
        return bool(aborted)

    def reset_prefix_cache(self, reset_running_requests: bool) -> bool:
        return self.scheduler.reset_prefix_cache(reset_running_requests)

    def shutdown(self) -> None:
        self.scheduler.shutdown()

    def step(self) -> Step:
        """Make one step of the engine core: schedule, execute, process the oldest due output."""
        scheduler_output = None
        if self.scheduler.has_requests() or self.runner.is_transferring:
            scheduler_output = self.scheduler.schedule()
            self._in_flight.append((scheduler_output, self.runner.execute(scheduler_output)))
        # Asynchronous scheduling keeps one step in flight while it plans the next.
        keep = 1 if self.options.is_async and scheduler_output is not None else 0
        results = {}
        if len(self._in_flight) > keep:
            results = self.scheduler.update_from_output(*self._in_flight.popleft())
            self.runner.note_processed_step()
        if self.options.drafter is not None and not self.options.is_async:
            self.scheduler.update_draft_token_ids(self.runner.take_draft_token_ids())
        return self._record(scheduler_output, results)

    def finish(self, max_steps: int = 100) -> list[Step]:
        """Step until there is nothing left to do."""
        steps = []
        while self.has_work():
            steps.append(self.step())
            assert len(steps) <= max_steps, "the requests do not end"
        return steps

    def _record(self, scheduler_output: Any, results: dict[int, Any]) -> Step:
        pool = self.block_pool
        more_keys = getattr(pool, "cached_block_hashes_by_block", {})  # Since vLLM 0.30.
        self.last_events = [event for batch in self._event_batches for event in batch.events]
        self._event_batches.clear()
        return Step(
            **describe_schedule(scheduler_output),
            free_queue=tuple(b.block_id for b in pool.free_block_queue.get_all_free_blocks()),
            blocks=tuple(
                (
                    b.ref_cnt,
                    b.block_hash and b.block_hash.hex(),
                    getattr(b, "block_hash_num_tokens", None),
                    len(more_keys.get(b.block_id, ())),
                )
                for b in pool.blocks
            ),
            events=tuple(map(repr, self.last_events)),
            outputs=tuple(
                (output.request_id, tuple(output.new_token_ids), str(output.finish_reason))
                for outputs in results.values()
                for output in outputs.outputs
            ),
        )
