# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vllm-ascend-kvext project
"""The scheduler side of the shared tier, as the connector calls it; see ``SecondaryTierScheduler``.

    a request arrives     has_to_wait ── asked ── found ── entries are got ──> as if stored here
    it computes           on_request_begun ── what it uses a second time is put, or touched
    a step                on_step ──> the workers ──> on_output ── what was lost is put again

Objects that are got become entries of the host tier, like stores. A request goes on without an
object that does not come in time.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import cast

from vllm_ascend_kvext.connector.common.events import TierEvents
from vllm_ascend_kvext.connector.common.messages import SecondaryOutput
from vllm_ascend_kvext.connector.common.options import ConnectorOptions
from vllm_ascend_kvext.connector.common.scheduler_view import Request
from vllm_ascend_kvext.connector.scheduler.parts import SchedulerParts
from vllm_ascend_kvext.connector.scheduler.request_state import RequestOffloadState
from vllm_ascend_kvext.connector.scheduler.secondary_tier import SecondaryTierScheduler
from vllm_ascend_kvext.connector.scheduler.transfer_cost import TransferCost
from vllm_ascend_kvext.shared_tier import names, open_tier
from vllm_ascend_kvext.shared_tier.backend import SharedTier, logger
from vllm_ascend_kvext.shared_tier.engine_identity import apart
from vllm_ascend_kvext.shared_tier.messages import SharedJobs, SharedOutput
from vllm_ascend_kvext.shared_tier.scheduler.gets import Gets
from vllm_ascend_kvext.shared_tier.scheduler.puts import Puts
from vllm_ascend_kvext.shared_tier.scheduler.questions import Questions
from vllm_ascend_kvext.shared_tier.scheduler.shared_parts import SharedParts, TierJobs
from vllm_ascend_kvext.shared_tier.scheduler.uses import Uses
from vllm_ascend_kvext.store.entries import Entry, WantedPiece
from vllm_ascend_kvext.store.store_policy import StorePolicy


class SharedSide(SecondaryTierScheduler):
    """The shared tier of one engine, as its scheduler uses it.

    Args:
        backend: The tier; None for the tier that the options name.

    Raises:
        SettingsError: If the tier of the options cannot be used.
    """

    def __init__(
        self,
        parts: SchedulerParts,
        options: ConnectorOptions,
        identity: names.Identity,
        cost: TransferCost,
        events: TierEvents,
        backend: SharedTier | None = None,
    ) -> None:
        assert options.shared_tier is not None
        self._counters = parts.counters
        self._layout = parts.layout
        self._url = options.shared_tier
        self._identity = identity
        sharing = parts.layout.sharing
        self._ranks_of_memory = 1 if sharing is None else sharing.num_ranks
        self._num_memories = parts.jobs.num_workers // self._ranks_of_memory
        self._puts_all = options.store_policy is StorePolicy.ALL
        namespace = names.namespace_of(identity)
        self._backend = backend or open_tier(options.shared_tier, options.shared_tier_bytes, rank=0)
        _introduce(self._backend, self._url, namespace, identity)
        if self._ranks_of_memory > 1:
            logger.info(
                "Shared tier %s: of the %d workers of a host, one gets and puts each object.",
                self._url,
                self._ranks_of_memory,
            )
        self._jobs = TierJobs(parts.jobs, parts.clock)
        self._shared = shared = SharedParts(parts, self._backend, namespace, self._jobs)
        self._gets = Gets(shared, cost, events)
        self._questions = Questions(shared, self._gets)
        self._puts = Puts(shared, options.spare_bytes)
        self._uses = Uses(shared, self._puts)

    @property
    def needs_whole_tails(self) -> bool:
        return True  # An object has all of its tails.

    @property
    def has_transfers(self) -> bool:
        """Whether a job is to begin, or is under way and does not hang."""
        has_new = self._gets.has_new or self._puts.has_new or self._uses.has_new
        return has_new or self._jobs.are_moving

    # Requests.

    def has_to_wait(
        self,
        request: Request,
        state: RequestOffloadState,
        num_computed_tokens: int,
        further_pieces: Callable[[], Sequence[WantedPiece]],
    ) -> bool:
        if self._puts.is_off or request.lora_request or request.skip_reading_prefix_cache:
            return False  # vLLM knows adapters only by name, so their KV is not shared.
        return self._questions.has_to_wait(request, state, num_computed_tokens, further_pieces)

    def got_tokens(self, state: RequestOffloadState) -> int:
        return self._questions.got_tokens(state)

    def on_request_begun(self, request: Request, computed_tokens: int) -> None:
        self._uses.note_begun(request, computed_tokens)

    def on_stored(self, entry: Entry, request: Request) -> None:
        if self._puts_all and not request.lora_request:
            self._puts.put(entry)

    def on_entry_used(self, entry: Entry) -> None:
        self._uses.note_used_entry(entry)

    # Steps.

    def on_step(self, may_wait: bool) -> SharedJobs | None:
        if may_wait:
            self._gets.check_patience()
            self._questions.wait_for_answer()
        self._questions.end_step()
        jobs = SharedJobs(self._gets.take_new(), self._puts.take_new(), self._uses.take_new())
        if not any(jobs):
            return None
        self._jobs.note_change()
        return jobs

    def on_output(self, output: SecondaryOutput) -> None:
        told = cast("SharedOutput", output)
        if told.has_new_weights:  # This comes first, so that no store that ends now is put.
            self._turn_off("a worker has loaded weights again, and KV has the first ones' name")
        for number, absent in told.absent_objects.items():
            self._uses.note_absent(number, absent)
        if told.got_bytes:
            self._gets.note_bytes(told.got_bytes / self._num_memories)
        for name, number in told.failures.items():
            self._counters.shared_failures[name] += number
            if name == "get_unreachable":
                self._gets.pause("something could not be read")

    def on_jobs_ended(self) -> None:
        self._gets.check_patience()

    # Ends.

    def reset(self) -> None:
        self._turn_off("its connector was reset, as is done when weights are replaced in memory")

    def keep_apart(self) -> None:
        # Entries have other bytes from now on, so their objects are others'. What waits to be put
        # has bytes that the comparison has not found equal.
        sharing = self._layout.sharing
        assert sharing is not None
        self._puts.drop_new()
        self._gets.await_nothing()
        if self._puts.is_off:
            return
        if self._num_memories > 1:
            # The workers know the tier's objects as those of one host, or of all.
            self._turn_off("its workers keep their bytes apart, on several hosts")
            return
        identity = apart(self._identity, sharing)
        self._shared.namespace = names.namespace_of(identity)
        logger.warning(
            "Shared tier %s: the workers keep their bytes apart, so objects have the bytes of all "
            "of them from now on, and are shared with such engines only.",
            self._url,
        )
        _introduce(self._backend, self._url, self._shared.namespace, identity)

    def _turn_off(self, why: str) -> None:
        """Use the tier no longer. The weights may have changed, and no file shows the change."""
        self._puts.turn_off()
        logger.warning(
            "The shared tier is not used by this engine any more: %s. Start the engine again to "
            "use it.",
            why,
        )

    def shutdown(self) -> None:
        """Ask the tier nothing any more. A tier that hangs is not closed."""
        if self._questions.close():
            self._backend.close()


def _introduce(tier: SharedTier, url: str, namespace: str, identity: names.Identity) -> None:
    """Tell other engines what this engine shares, and the log which engines share with it."""
    engines = tier.engines()
    tier.introduce(namespace, identity)
    logger.info("Shared tier %s: the name space is %s.", url, namespace)
    if engines and namespace not in engines:
        apart = min((names.differences(identity, each) for each in engines.values()), key=len)
        logger.warning(
            "Shared tier %s: nothing in it was put by engines like this one. The most similar "
            "of %d differs in: %s. `python -m vllm_ascend_kvext status --shared-tier %s` "
            "lists them.",
            url,
            len(engines),
            "; ".join(apart),
            url,
        )
