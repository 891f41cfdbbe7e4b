# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vllm-ascend-kvext project
"""``vllm/distributed/kv_transfer/kv_connector/v1/multi_connector.py``: each has its own handshake.

A connector of a worker may send one message to its scheduler side, the handshake. With several
connectors, upstream sends the handshake of the first connector that has one, and gives it to all.
With this repair, each scheduler side gets the handshakes of its own workers, as if it were the only
connector. vLLM-Ascend's ``AscendMultiConnector`` inherits these methods.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any

from vllm_ascend_kvext.patching.declaration import Kind, Patch

if TYPE_CHECKING:
    from vllm.distributed.kv_transfer.kv_connector.v1.multi_connector import MultiConnector

    Handshakes = Mapping[Any, Any]
    """Handshakes by the rank of a worker, or by its pipeline and tensor rank."""


@dataclass(frozen=True, slots=True)
class ChildHandshakes:
    """The handshakes of the connectors of one worker, in their order; None for no handshake."""

    children: tuple[Any, ...]


def collect_handshakes(
    wrapped: Callable[[], Any], multi_connector: MultiConnector
) -> ChildHandshakes | None:
    """Collect the handshakes of all connectors of this worker; None if there is none."""
    children = tuple(each.get_handshake_metadata() for each in multi_connector._connectors)
    if all(each is None for each in children):
        return None
    return ChildHandshakes(children)


def hand_over(
    wrapped: Callable[[Handshakes], None], multi_connector: MultiConnector, metadata: Handshakes
) -> None:
    """Give each connector the handshakes of its own workers."""
    _hand_over(wrapped, multi_connector, metadata, "set_xfer_handshake_metadata")


def hand_over_by_pipeline_rank(
    wrapped: Callable[[Handshakes], None], multi_connector: MultiConnector, metadata: Handshakes
) -> None:
    """Give each connector its handshakes, by the pipeline and tensor rank of a worker."""
    _hand_over(wrapped, multi_connector, metadata, "set_xfer_handshake_metadata_pp_aware")


def _hand_over(
    wrapped: Callable[[Handshakes], None],
    multi_connector: MultiConnector,
    metadata: Handshakes,
    name: str,
) -> None:
    if not all(isinstance(each, ChildHandshakes) for each in metadata.values()):
        wrapped(metadata)  # Another process without this patch has collected them.
        return
    for number, connector in enumerate(multi_connector._connectors):
        own = {rank: each.children[number] for rank, each in metadata.items()}
        getattr(connector, name)({rank: each for rank, each in own.items() if each is not None})


_MULTI = "vllm.distributed.kv_transfer.kv_connector.v1.multi_connector:MultiConnector"
_patch = partial(
    Patch,
    feature="multi-connector-handshakes",
    why="A MultiConnector gives the handshake of its first connector that has one to all of them. "
    "An engine with two such connectors does not start, because one reads the other's handshake.",
    retire_when="upstream's MultiConnector keeps the handshakes of its connectors apart",
    when_imported=True,
)

PATCHES = (
    _patch(
        id="KVX-185",
        target=f"{_MULTI}.get_handshake_metadata",
        kind=Kind.REPLACE,
        wrapper=collect_handshakes,
    ),
    _patch(
        id="KVX-186",
        target=f"{_MULTI}.set_xfer_handshake_metadata",
        wrapper=hand_over,
    ),
    _patch(
        id="KVX-187",
        target=f"{_MULTI}.set_xfer_handshake_metadata_pp_aware",
        wrapper=hand_over_by_pipeline_rank,
    ),
)
