# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vllm-ascend-kvext project
"""``vllm/v1/core/sched/scheduler.py``: a scheduler and its KvextConnector get to know each other.

The connector reads block tables and holds references to blocks. vLLM hands it the block pool, but
not the tables. An engine without requests has to go on with its steps while pages are being stored,
because only steps notice that a store has ended.

Only methods of a scheduler with the connector are replaced. The ``schedule`` of such a scheduler is
vLLM's own, except in steps with holes: see ``step_parts``.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Callable, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any

from vllm_ascend_kvext.connector.common.fine_keys import HashTokens
from vllm_ascend_kvext.connector.common.scheduler_view import SchedulerView
from vllm_ascend_kvext.errors import ConnectorError
from vllm_ascend_kvext.groups.kinds import is_all_full_attention, kind_of
from vllm_ascend_kvext.groups.model import GroupKind
from vllm_ascend_kvext.patches.connector.hole_rows import correct_hits, go_on_behind_holes
from vllm_ascend_kvext.patches.connector.hole_steps import HoleSteps
from vllm_ascend_kvext.patches.connector.kv_cache_manager import GivingWay
from vllm_ascend_kvext.patches.connector.step_parts import StepParts
from vllm_ascend_kvext.patches.hit_geometry import log_least_prompt
from vllm_ascend_kvext.patches.repairs.aligned_steps import split_within_block
from vllm_ascend_kvext.patches.repairs.scheduler import is_recovering
from vllm_ascend_kvext.patches.upstream import leaves_a_decode, step_start_tokens
from vllm_ascend_kvext.patching.declaration import BEFORE_0_30, SINCE_0_30, Patch
from vllm_ascend_kvext.patching.instance_methods import InstanceMethods
from vllm_ascend_kvext.retention.offload_boundaries import OffloadBoundaries
from vllm_ascend_kvext.settings import DISABLE_VARIABLE, Settings
from vllm_ascend_kvext.upstream_state import CoordinatorState

if TYPE_CHECKING:
    from vllm.config import VllmConfig
    from vllm.v1.core.kv_cache_manager import KVCacheManager
    from vllm.v1.core.kv_cache_utils import KVCacheBlock
    from vllm.v1.core.sched.scheduler import Scheduler
    from vllm.v1.request import Request

    from vllm_ascend_kvext.connector.kvext_connector import KvextConnector
    from vllm_ascend_kvext.connector.scheduler.connector_scheduler import ConnectorScheduler
    from vllm_ascend_kvext.holes.hole_queue import NewHoles

logger = logging.getLogger("vllm.ascend_kvext.connector")

_ACCEPTED_DRAFTS = "accepted-drafts"
_C8_BESIDE_CONNECTORS = "c8-beside-connectors"
"""Names of repairs."""


def connect(wrapped: Callable[..., None], scheduler: Scheduler, *args: Any, **kwargs: Any) -> None:
    """Show a new scheduler to its connector, and log which prompts can hit.

    vLLM >= 0.30 gets failed loads by request id, frees the request's blocks, and asks again.
    """
    wrapped(*args, **kwargs)
    log_least_prompt(scheduler.kv_cache_manager.coordinator)
    connector = connector_of(scheduler)
    if connector is not None:
        _require_repairs(scheduler)
        if scheduler.connector is connector:
            # Upstream frees blocks late, because loads of other connectors do not wait for steps
            # in flight. Meanwhile, it refuses a reset. Our loads wait, see ``compute_fence``.
            scheduler.defer_block_free = False
        _bind(scheduler, connector, ConnectedScheduler)


def connect_by_blocks(
    wrapped: Callable[..., None], scheduler: Scheduler, *args: Any, **kwargs: Any
) -> None:
    """As `connect`, for vLLM < 0.30, which gets failed loads by block id.

    This vLLM does not ask connectors whether they have work.
    """
    wrapped(*args, **kwargs)
    log_least_prompt(scheduler.kv_cache_manager.coordinator)
    connector = connector_of(scheduler)
    if connector is not None:
        _require_recovery(scheduler)
        _require_repairs(scheduler)
        _bind(scheduler, connector, KeptGoingScheduler)


def _bind(
    scheduler: Scheduler, connector: KvextConnector, connected: type[ConnectedScheduler]
) -> None:
    steps = StepParts(scheduler, _replaced)
    note_new_holes = partial(correct_hits, scheduler, connected.counts_every_admission)
    giving_way = GivingWay(scheduler, _replaced, partial(side_of, scheduler))
    view = _view_of(
        scheduler, connector, steps.put_on, note_new_holes, giving_way.note_waiting_stores
    )
    connector.bind_scheduler(view, partial(connected, scheduler, steps))


def connector_of(scheduler: Scheduler) -> KvextConnector | None:
    """The KvextConnector of a scheduler. The scheduler may have other connectors, too."""
    return kvext_connector_in(getattr(scheduler, "connector", None))


def kvext_connector_in(connector: Any) -> KvextConnector | None:
    """The KvextConnector that ``connector`` is, or that a MultiConnector has; None if none."""
    for each in (connector, *getattr(connector, "_connectors", ())):
        if type(each).__name__ == "KvextConnector" and hasattr(each, "bind_scheduler"):
            return each
    return None


def side_of(scheduler: Scheduler) -> ConnectorScheduler | None:
    """The scheduler side of a scheduler's KvextConnector; None before the workers are known."""
    connector = connector_of(scheduler)
    return None if connector is None else connector.scheduler_side


class ConnectedScheduler:
    """A scheduler with a KvextConnector. Methods of this object replace methods of the scheduler.

    Attributes:
        steps: The parts that are called around its ``schedule``.
    """

    counts_every_admission = False

    def __init__(self, scheduler: Scheduler, steps: StepParts, side: ConnectorScheduler) -> None:
        self.scheduler = scheduler
        self.steps = steps
        self.side = side
        self._is_resetting = False
        methods: list[Callable[..., Any]] = [
            self.reset_prefix_cache,
            self._update_request_as_session,
            self._update_waiting_for_remote_kv,
            *self._methods_of_line(),
        ]
        if scheduler.need_mamba_block_aligned_split:
            methods.append(self._mamba_block_aligned_split)
        # Workers can store a preempted request only if its pages are not zeroed before.
        if not (scheduler.use_v2_model_runner and scheduler.needs_kv_cache_zeroing):
            methods.append(self._preempt_request)
        else:
            side.keeps_preempted = False
            logger.info(
                "KvextConnector: preempted requests are computed again: vLLM's V2 model runner "
                "zeroes their pages before they could be stored; VLLM_USE_V2_MODEL_RUNNER=0 runs "
                "the first one."
            )
        for method in methods:
            _replaced.replace(scheduler, method)
        _replaced.replace(scheduler.kv_cache_manager, self.get_num_common_prefix_blocks)
        if side.computes_holes:
            steps.add(HoleSteps(scheduler, side))
        for extend in ON_CONNECTED:
            extend(self)

    def _methods_of_line(self) -> tuple[Callable[..., Any], ...]:
        """The methods that are replaced for this line of vLLM only."""
        if self.scheduler.needs_kv_cache_zeroing:
            return (self._get_new_block_ids_to_zero,)
        return ()

    def _get_new_block_ids_to_zero(
        self, wrapped: Callable[[], list[int] | None]
    ) -> list[int] | None:
        """Let workers zero the pages that are about to be loaded, and the pages of holes.

        A load may fill only parts of its pages. Upstream leaves such pages out, because loads of
        other connectors do not wait for kernels that were enqueued before. Upstream does not know
        pages that only holes have.
        """
        self.scheduler._skip_zero_block_ids -= self.side.pages_to_load()
        return [*(wrapped() or ()), *self.side.references.new_ids] or None

    def get_num_common_prefix_blocks(
        self, wrapped: Callable[[str], list[int]], running_request_id: str
    ) -> list[int]:
        """The number of blocks with which all running requests begin, for cascade attention.

        Upstream compares references with the number of requests. The connector's references, and
        rows that are not requests, make this comparison wrong.
        """
        counts = wrapped(running_request_id)
        if self.side.row_ids or self.side.references.num_references:
            return [0] * len(counts)
        return counts

    def reset_prefix_cache(
        self,
        wrapped: Callable[[bool, bool], bool],
        reset_running_requests: bool = False,
        reset_connector: bool = False,
    ) -> bool:
        """Reset the prefix cache, which upstream refuses while a block is in use."""
        for request_id in self.side.end_hole_step():
            go_on_behind_holes(self.scheduler, request_id)
        if reset_running_requests:
            self._restart_loaded_requests()
        if reset_running_requests or not self.scheduler.running:
            self.side.abandon_stores()
        self._is_resetting = True
        try:
            return wrapped(reset_running_requests, reset_connector)
        finally:
            self._is_resetting = False
            if reset_connector:
                # Upstream may have raised before it reset the connector.
                self.side.reset_cache()

    def _restart_loaded_requests(self) -> None:
        """Take the blocks of requests that have loaded and do not run yet.

        Upstream preempts running requests, and fails if other requests hold blocks. A load under
        way still writes to its blocks, so its request keeps them, and upstream still fails.
        """
        from vllm.v1.request import RequestStatus

        scheduler = self.scheduler
        loaded = scheduler.finished_recving_kv_req_ids
        waits = (RequestStatus.WAITING, RequestStatus.PREEMPTED)
        for request_id, request in scheduler.requests.items():
            is_loaded = request.status == RequestStatus.WAITING_FOR_REMOTE_KVS and (
                request_id in loaded or self.side.restart_holes(request_id)
            )
            if not is_loaded and not (request.status in waits and request.num_computed_tokens):
                continue
            scheduler.kv_cache_manager.free(request)
            request.num_computed_tokens = 0
            request.status = (
                RequestStatus.PREEMPTED if request.num_preemptions > 0 else RequestStatus.WAITING
            )
            loaded.discard(request_id)
            scheduler.failed_recving_kv_req_ids.discard(request_id)
            scheduler._inflight_prefills.discard(request)

    def _update_waiting_for_remote_kv(
        self, wrapped: Callable[[Request], None], request: Request
    ) -> None:
        """A load has ended. If it failed, another load may begin, and take new blocks.

        If the device had tokens of the request, vLLM would go on behind these without a new lookup.
        vLLM 0.23.0 admits a load only if there is room for all that prefills in flight still need,
        too. vLLM 0.23.0 still counts a request whose load failed among these prefills. So the next
        load of the request would wait for the request itself.
        """
        has_failed = request.request_id in self.scheduler.failed_recving_kv_req_ids
        if has_failed and self.side.is_looked_up_again(request.request_id):
            request.num_computed_tokens = 0
        wrapped(request)
        if not request.num_computed_tokens:
            self.scheduler._inflight_prefills.discard(request)

    def _update_request_as_session(
        self, wrapped: Callable[[Request, Any], None], session: Request, update: Any
    ) -> None:
        """Continue a session. Upstream drops its last token, but not the hash with this token."""
        hash_block_size = self.scheduler.kv_cache_manager.block_pool.hash_block_size
        del session.block_hashes[session.num_computed_tokens // hash_block_size :]
        wrapped(session, update)
        self.side.note_session_update(session)

    def _mamba_block_aligned_split(
        self,
        wrapped: Callable[..., int],
        request: Request,
        num_new_tokens: int,
        num_new_local_computed_tokens: int = 0,
        num_external_computed_tokens: int = 0,
    ) -> int:
        """Shorten a prefill step so that it leaves the state of a boundary that is to be stored.

        Such a step may end inside a state's block, and the next one then begins there. It has to
        end with the block, or at a boundary before. Upstream lets some of these steps wait until
        they are a whole block, which they never are. It lets others go past the block's end.
        """
        num_split_tokens = wrapped(
            request, num_new_tokens, num_new_local_computed_tokens, num_external_computed_tokens
        )
        start_tokens = step_start_tokens(
            request, num_new_local_computed_tokens, num_external_computed_tokens
        )
        num_split_tokens = split_within_block(
            self.scheduler, request, start_tokens, num_new_tokens, num_split_tokens
        )
        if num_split_tokens <= 1:
            return num_split_tokens
        stop_tokens = self.side.next_stop_tokens(request, start_tokens)
        num_stop_tokens = stop_tokens - start_tokens
        if num_stop_tokens >= num_split_tokens or self._is_reserved(request, stop_tokens):
            return num_split_tokens
        self.side.note_early_end(request.request_id, num_stop_tokens)
        return num_stop_tokens

    def _is_reserved(self, request: Request, stop_tokens: int) -> bool:
        """Whether no step may end at a boundary.

        A drafter of several MTP modules reads further tokens behind each prefill step but the last.
        Upstream moves the end of a step that would end among the last tokens of a prompt.
        """
        if leaves_a_decode(self.scheduler, request, stop_tokens):
            return True
        num_tokens = _prefill_lookahead_tokens(self.scheduler)
        prefill_end = max(request.num_prompt_tokens, request.num_tokens - 1)
        return num_tokens > 1 and prefill_end - num_tokens < stop_tokens < prefill_end

    def _preempt_request(
        self, wrapped: Callable[..., None], request: Request, *args: Any, **kwargs: Any
    ) -> None:
        """Store what a request has computed, before its blocks are freed."""
        if not self._is_resetting:  # A reset may take the pages before a step can read them.
            self.side.preempt(request)
        wrapped(request, *args, **kwargs)


class KeptGoingScheduler(ConnectedScheduler):
    """A scheduler of vLLM < 0.30, which does not ask connectors whether they have work."""

    counts_every_admission = True

    def _methods_of_line(self) -> tuple[Callable[..., Any], ...]:
        return (self.has_finished_requests,)

    def has_finished_requests(self, wrapped: Callable[[], bool]) -> bool:
        """Whether steps are needed although no request waits for a step."""
        return wrapped() or self.side.has_work


def _require_repairs(scheduler: Scheduler) -> None:
    """Refuse a model for which a repair is needed that has been left out, with a ConnectorError.

    Without the repair of drafts, states are copied to host memory before vLLM-Ascend has saved
    them, and vLLM's first runner saves the states of other drafts. Wrong states would outlive their
    request.
    """
    config = scheduler.vllm_config
    has_states = any(
        kind_of(group.kv_cache_spec) is GroupKind.STATE
        for group in scheduler.kv_cache_config.kv_cache_groups
    )
    has_c8 = getattr(config.quant_config, "enable_c8_quant", False)
    needed = {}
    if has_states and config.speculative_config is not None:
        needed[_ACCEPTED_DRAFTS] = (
            "this model has states and drafts, and wrong states would be kept in host memory"
        )
    if has_c8:
        needed[_C8_BESIDE_CONNECTORS] = (
            "this model has keys and values of 8 bits (C8), and beside a connector vLLM-Ascend "
            "leaves some steps without a result"
        )
    left_out = Settings.from_environ(os.environ).disabled
    for repair, reason in needed.items():
        if repair in left_out:
            raise ConnectorError(
                f"KvextConnector: expected the repair {repair}, found it in {DISABLE_VARIABLE}: "
                f"{reason}. Take it off {DISABLE_VARIABLE}, or leave the connector out."
            )


def _require_recovery(scheduler: Scheduler) -> None:
    """Refuse a model for which a failed load would end the engine, with a ConnectorError."""
    if not is_all_full_attention(scheduler.kv_cache_config) and not is_recovering(scheduler):
        raise ConnectorError(
            "KvextConnector: this model is not all full attention in one KV cache group, so a "
            "load that fails ends the engine, or gives wrong tokens, unless the repair "
            "failed-loads is in effect; take it off VLLM_ASCEND_KVEXT_DISABLE, and see "
            "`python -m vllm_ascend_kvext status`"
        )


def _view_of(
    scheduler: Scheduler,
    connector: KvextConnector,
    on_extra_work: Callable[[], object],
    on_new_holes: Callable[[NewHoles], object],
    on_waiting_stores: Callable[[bool], object],
) -> SchedulerView:
    manager = scheduler.kv_cache_manager
    config = scheduler.vllm_config
    return SchedulerView(
        requests=scheduler.requests,
        managers=manager.coordinator.single_type_managers,
        block_pool=manager.block_pool,
        num_blocks=manager.block_pool.num_gpu_blocks,
        hash_block_size=manager.block_pool.hash_block_size,
        enable_caching=manager.enable_caching,
        make_boundary_planner=partial(
            OffloadBoundaries,
            interval_tokens=CoordinatorState.of(manager.coordinator).interval_tokens,
        ),
        max_num_batched_tokens=scheduler.max_num_scheduled_tokens,
        # Before 0.30, windows move on when a step is planned.
        num_steps_in_flight=(
            config.max_concurrent_batches if hasattr(config, "max_in_flight_tokens") else 1
        ),
        num_running=lambda: len(scheduler.running),
        use_eagle=bool(manager.coordinator.eagle_group_ids),
        num_lookahead_tokens=scheduler.num_lookahead_tokens,
        num_draft_slots=getattr(config.speculative_config, "max_num_new_slots_for_drafting", 0),
        num_prefill_lookahead_tokens=_prefill_lookahead_tokens(scheduler),
        leaves_a_decode=partial(leaves_a_decode, scheduler),
        recomputes_failed_loads=scheduler.recompute_kv_load_failures,
        has_other_connectors=scheduler.connector is not connector,
        max_model_len=scheduler.max_model_len,
        num_data_parallel=config.parallel_config.data_parallel_size,
        cached_blocks=partial(_cached_blocks, manager),
        on_extra_work=on_extra_work,
        on_new_holes=on_new_holes,
        on_waiting_stores=on_waiting_stores,
        # Prefill checkpoint blocks hold states of other tokens than the last one of a step.
        has_steps_for_states=scheduler.need_mamba_block_aligned_split
        and not getattr(scheduler, "mamba_has_prefill_checkpoint_blocks", False),
        hash_tokens=_hash_tokens(config),
    )


def _prefill_lookahead_tokens(scheduler: Scheduler) -> int:
    """The tokens behind a prefill step that the drafter reads. No vLLM < 0.30 reads more than 1."""
    return getattr(scheduler, "num_prefill_lookahead", 0)


def _hash_tokens(vllm_config: VllmConfig) -> HashTokens:
    """The function that hashes tokens of a request as vLLM hashes a block of them."""
    from vllm.utils.hashing import get_hash_fn_by_name
    from vllm.v1.core.kv_cache_utils import generate_block_hash_extra_keys, hash_block_tokens

    hash_function = get_hash_fn_by_name(vllm_config.cache_config.prefix_caching_hash_algo)

    def hash_tokens(
        before: bytes | None, request: Request, first_tokens: int, end_tokens: int
    ) -> bytes:
        extra_keys, _ = generate_block_hash_extra_keys(request, first_tokens, end_tokens, 0)
        token_ids = request.all_token_ids[first_tokens:end_tokens]
        hashed: bytes = hash_block_tokens(hash_function, before, token_ids, extra_keys)
        return hashed

    return hash_tokens


def _cached_blocks(
    manager: KVCacheManager, request: Request, group: int, first_page: int, end_page: int
) -> list[KVCacheBlock] | None:
    """The blocks of the local prefix cache that hold some pages; None if one is missing."""
    from vllm.v1.core.kv_cache_utils import BlockHashListWithBlockSize

    hashes: Sequence[Any] = request.block_hashes
    pool = manager.block_pool
    page_tokens = manager.coordinator.single_type_managers[group].block_size
    if page_tokens != pool.hash_block_size:
        hashes = BlockHashListWithBlockSize(request.block_hashes, pool.hash_block_size, page_tokens)
    blocks = []
    for page in range(first_page, end_page):
        found = pool.get_cached_block(hashes[page], [group])
        if not found:
            return None
        blocks.append(found[0])
    return blocks


_replaced = InstanceMethods()

ON_CONNECTED: list[Callable[[ConnectedScheduler], object]] = []
"""Functions that are called with each new `ConnectedScheduler`. Features above the connector add
functions."""

_SCHEDULER = "vllm.v1.core.sched.scheduler:Scheduler"
_ASCEND_BALANCE = "vllm_ascend.patch.platform.patch_balance_schedule:BalanceScheduler"
_ASCEND_PIPELINE = "vllm_ascend.patch.platform.patch_pp_mtp:_patch_scheduler"
_ASCEND_LIFETIME = "vllm_ascend.patch.platform.patch_async_swa_kv_lifetime"

_RELIES_ON = (
    f"{_SCHEDULER}.has_finished_requests",
    f"{_SCHEDULER}.reset_prefix_cache",
    f"{_SCHEDULER}._preempt_request",
    f"{_SCHEDULER}.schedule",
    f"{_SCHEDULER}._build_kv_connector_meta",
    f"{_SCHEDULER}._update_after_schedule",
    f"{_SCHEDULER}._connector_finished",
    f"{_SCHEDULER}._free_blocks",
    f"{_SCHEDULER}._update_from_kv_xfer_finished",
    f"{_SCHEDULER}._update_request_as_session",
    f"{_SCHEDULER}._mamba_block_aligned_split",
    f"{_SCHEDULER}._update_waiting_for_remote_kv",
    f"{_SCHEDULER}._try_promote_blocked_waiting_request",
    "vllm.v1.core.kv_cache_manager:KVCacheManager.get_num_common_prefix_blocks",
    "vllm.v1.core.kv_cache_manager:KVCacheManager.allocate_slots",
    "vllm.v1.request:Request.__init__",
    "vllm.v1.request:Request.update_block_hashes",
    "vllm.v1.core.kv_cache_utils:hash_block_tokens",
    "vllm.v1.core.kv_cache_utils:generate_block_hash_extra_keys",
    "vllm.v1.core.block_pool:BlockPool.get_new_blocks",
    "vllm.v1.core.block_pool:BlockPool.get_cached_block",
    "vllm.v1.core.block_pool:BlockPool.touch",
    "vllm.v1.core.block_pool:BlockPool.free_blocks",
)

PATCHES = (
    Patch(
        id="KVX-402",
        target=f"{_SCHEDULER}.__init__",
        feature="connector",
        vllm=BEFORE_0_30,
        wrapper=connect_by_blocks,
        undo=_replaced.take_back,
        why="A connector is not told the block tables; an engine without requests stops, whatever "
        "its connector still does; and prefill steps end anywhere, where a state has to be left to "
        "be stored.",
        retire_when="vLLM >= 0.30: KVX-411 takes its place",
        relies_on=_RELIES_ON,
        ascend=(
            f"{_ASCEND_BALANCE}.__init__",
            f"{_ASCEND_BALANCE}.schedule",
            f"{_ASCEND_BALANCE}.reset_prefix_cache",
            f"{_ASCEND_LIFETIME}:_patched_update_after_schedule",
            f"{_ASCEND_LIFETIME}:_patched_update_from_output",
            f"{_ASCEND_LIFETIME}:_patched_connector_finished",
            f"{_ASCEND_LIFETIME}:_patched_request_init",
            f"{_ASCEND_LIFETIME}:_patched_allocate_slots",
            "vllm_ascend.patch.platform.patch_kv_cache_utils:_ascend_free_blocks",
        ),
    ),
    Patch(
        id="KVX-411",
        target=f"{_SCHEDULER}.__init__",
        feature="connector",
        vllm=SINCE_0_30,
        wrapper=connect,
        undo=_replaced.take_back,
        why="A connector is told the block tables, but not the requests that have them, and cannot "
        "add rows to a step; and prefill steps end anywhere, where a state has to be left to be "
        "stored.",
        retire_when="upstream computes what its connectors name between what they load, and asks "
        "them where steps are to end",
        relies_on=(
            *_RELIES_ON,
            f"{_SCHEDULER}.has_requests",
            f"{_SCHEDULER}._handle_failed_recving",
            f"{_SCHEDULER}._inflight_prefill_reserved_blocks",
            f"{_SCHEDULER}._free_request_blocks",
            f"{_SCHEDULER}._get_new_block_ids_to_zero",
        ),
        ascend=(
            f"{_ASCEND_BALANCE}.__init__",
            f"{_ASCEND_BALANCE}.schedule",
            "vllm_ascend.patch.platform.patch_mamba_block_aligned_split:_mamba_block_aligned_split",
            f"{_ASCEND_PIPELINE}_update_after_schedule.<locals>._patched_update_after_schedule",
            f"{_ASCEND_PIPELINE}_update_from_output.<locals>._patched_update_from_output",
        ),
    ),
)
