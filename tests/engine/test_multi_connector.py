# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vllm-ascend-kvext project
"""Two connectors with handshakes below one MultiConnector: vLLM's own class.

``test_connector_engine.py`` shows that such engines start and answer.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from support.connector.stand_ins import Address, NullConnector
from support.installed import installed
from vllm.distributed.kv_transfer.kv_connector.v1.multi_connector import MultiConnector

RANKS = {
    "set_xfer_handshake_metadata": (0, 1),
    "set_xfer_handshake_metadata_pp_aware": ((0, 0), (0, 1)),
}


class Child(NullConnector):
    """A connector with a name, which records what it is told."""

    def __init__(self, name: str) -> None:
        self.name = name
        self.told: Any = None

    def get_handshake_metadata(self) -> Address:
        return Address(self.name, 0)

    def set_xfer_handshake_metadata(self, metadata: Any) -> None:
        self.told = [each.local_ip for each in metadata.values()]


def told(setter: str) -> list[list[str]]:
    """The calls that each of two connectors gets for two workers."""

    def connector() -> Any:
        found = object.__new__(MultiConnector)
        found._connectors = [Child("first"), Child("second")]
        return found

    side = connector()
    sent = {rank: connector().get_handshake_metadata() for rank in RANKS[setter]}
    give: Callable[..., None] = getattr(side, setter)
    give(sent)
    return [child.told for child in side._connectors]


@pytest.mark.parametrize("setter", RANKS)
def test_stock_tells_all_connectors_what_the_first_says(setter: str) -> None:
    assert told(setter) == [["first"] * 2] * 2


@pytest.mark.parametrize("setter", RANKS)
def test_each_connector_is_told_what_its_own_workers_say(setter: str) -> None:
    with installed("multi-connector-handshakes"):
        assert told(setter) == [["first"] * 2, ["second"] * 2]
    assert told(setter) == [["first"] * 2] * 2
