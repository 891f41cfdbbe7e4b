# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vllm-ascend-kvext project
"""The worker side of the shared tier: moves objects, and tells the identity of the worker."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any, cast

from vllm_ascend_kvext.connector.common.messages import SecondaryJobs, WorkerOutput
from vllm_ascend_kvext.connector.common.options import ConnectorOptions
from vllm_ascend_kvext.connector.worker.extension import RegisteredPages
from vllm_ascend_kvext.connector.worker.secondary_tier import SecondaryTierWorker
from vllm_ascend_kvext.errors import SettingsError
from vllm_ascend_kvext.shared_tier import why_torch
from vllm_ascend_kvext.shared_tier.engine_identity import num_equal_ranks
from vllm_ascend_kvext.shared_tier.messages import SharedJobs, SharedOutput, WorkerIdentity
from vllm_ascend_kvext.shared_tier.worker.loaded_weights import LoadedWeights
from vllm_ascend_kvext.shared_tier.worker.object_ranks import object_ranks
from vllm_ascend_kvext.shared_tier.worker.shared_transfers import SharedTransfers

if TYPE_CHECKING:
    import torch


class SharedWorker(SecondaryTierWorker):
    """The worker side of the shared tier, for one worker.

    Args:
        vllm_config: vLLM's ``VllmConfig``, as the worker has it.
        kv_cache_config: vLLM's ``KVCacheConfig``, as the worker has it.
    """

    def __init__(self, vllm_config: Any, kv_cache_config: Any, options: ConnectorOptions) -> None:
        self._vllm_config = vllm_config
        self._kv_cache_config = kv_cache_config
        self._options = options
        assert options.shared_tier is not None
        self.why_torch = why_torch(options.shared_tier)
        self._device = ""
        self._transfers: SharedTransfers | None = None
        self._weights: LoadedWeights | None = None

    def register(self, pages: RegisteredPages, place_thread: Callable[[], object]) -> None:
        self._device = _device_name(pages.pools.tensors[0].device)
        rank = self._vllm_config.parallel_config.rank
        num_equal = num_equal_ranks(self._vllm_config, pages.layout.groups)
        self._transfers = SharedTransfers(
            self._options,
            object_ranks(rank, num_equal, pages.sharing),
            memoryview(pages.host.numpy()),
            place_thread,
        )

    def describe(self) -> WorkerIdentity:
        try:
            self._weights = LoadedWeights(self._layers())
            return WorkerIdentity(self._device, self._weights.digests())
        except SettingsError as error:  # The scheduler side refuses the tier, once for all workers.
            return WorkerIdentity(self._device, refusal=str(error))

    def _layers(self) -> list[Any]:
        """The modules of the layers that have KV."""
        layers = self._vllm_config.compilation_config.static_forward_context
        groups = self._kv_cache_config.kv_cache_groups
        names = [name for group in groups for name in group.layer_names]
        return [layers[name] for name in names if name in layers]

    def keep_apart(self) -> None:
        if self._transfers is not None:
            self._transfers.drop()

    def begin_step(self, jobs: SecondaryJobs | None) -> None:
        if self._transfers is not None:
            self._transfers.submit(SharedJobs() if jobs is None else cast("SharedJobs", jobs))

    def wait_for_end(self, timeout_s: float) -> bool:
        return self._transfers is not None and self._transfers.wait_for_end(timeout_s)

    def end_step(self) -> WorkerOutput | None:
        if self._transfers is None:
            return None
        output = self._transfers.take_output()
        if self._weights is not None and self._weights.take_is_read_again():
            output.secondary = output.secondary or SharedOutput()
            cast("SharedOutput", output.secondary).has_new_weights = True
        return output

    def shutdown(self) -> None:
        if self._transfers is not None:
            self._transfers.shutdown()


def _device_name(device: torch.device) -> str:
    import torch

    if device.type == "cpu":
        return str(torch.backends.cpu.get_cpu_capability())
    return str(getattr(torch, device.type).get_device_name(device))
