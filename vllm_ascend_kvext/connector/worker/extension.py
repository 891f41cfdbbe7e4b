# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vllm-ascend-kvext project
"""The worker side's seam: what an extension of the connector does with the pages of one worker."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol

from vllm_ascend_kvext.connector.common.messages import ExtraOutput, PlaneDigest
from vllm_ascend_kvext.layout.model import KVLayout
from vllm_ascend_kvext.layout.sharing import HostSharing
from vllm_ascend_kvext.layout.transfer_plan import TablePart
from vllm_ascend_kvext.transfer.placement import Placer
from vllm_ascend_kvext.transfer.pools import Pools

if TYPE_CHECKING:
    import torch


class RegisteredPages(NamedTuple):
    """What a worker has registered.

    Attributes:
        kv_caches: By layer name.
        pools: The storages of the layout. The worker side renews them after a reset.
        host: The host buffer. dtype: uint8, shape: [num_bytes].
        placer: Says where copies on the host run; None if a device makes all copies of pages, and
            the options name no CPUs.
        move: Moves rows, as ``page_transfer`` does.
        sharing: How the worker shares the host buffer with other workers; None if it does not.
    """

    layout: KVLayout
    kv_caches: Mapping[str, Any]
    pools: Pools
    host: torch.Tensor
    placer: Placer | None
    move: Callable[..., None]
    sharing: HostSharing | None = None


class ExtraMover(Protocol):
    """Moves the rows that jobs carry for an extension. Threads may share the object."""

    def store(self, rows: Sequence[Any], block_ids: Sequence[TablePart]) -> int:
        """Copy rows from pages to host memory; returns bytes.

        Raises:
            KvextError: Something does not fit; nothing has been written.
        """

    def load(self, rows: Sequence[Any], block_ids: Sequence[TablePart]) -> int:
        """Copy rows from host memory to pages; otherwise as `store`."""

    def after_store(self, rows: Sequence[Any]) -> None:
        """All rows of a store that this worker writes are in host memory."""

    def digests(
        self, rows: Sequence[Any], block_ids: Sequence[TablePart]
    ) -> tuple[PlaneDigest, ...]:
        """Digests of this worker's rows that it shares with other workers; empty if it shares none.

        They are of pages, also for rows that another worker writes to host memory.
        """

    def keep_apart(self) -> None:
        """From the next job on, keep the rows of this worker apart from those of others."""


class WorkerExtension:
    """The worker side of an extension. The model's thread calls all methods, but not the mover."""

    @property
    def mover(self) -> ExtraMover | None:
        """Moves rows for the extension; None if it moves none. Read after each `register`."""
        return None

    @property
    def needs_token_rows(self) -> bool:
        """Whether it moves single tokens, so that a page must have a row for each if it can."""
        return False

    def register(self, pages: RegisteredPages) -> None:
        """Take note of the pages. Called again after a reset, with other pages of the same layout.

        The method does not raise. An extension tells in `describe` what it cannot do.
        """

    def describe(self) -> Any:
        """What its scheduler side has to know of this worker: plain data."""
        return None

    def begin_step(self, extras: Any) -> None:
        """A step begins; ``extras`` is what the scheduler side has planned for it, or None."""

    def end_step(self) -> ExtraOutput | None:
        """The report to the scheduler side of what has ended since the last call."""
        return None

    def shutdown(self) -> None:
        """The worker ends. Idempotent."""
