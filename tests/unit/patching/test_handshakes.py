# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vllm-ascend-kvext project
"""Each connector of a MultiConnector gets the handshake that it would get without the others."""

from __future__ import annotations

import pickle
from types import SimpleNamespace
from typing import Any

import pytest

from vllm_ascend_kvext.patches.repairs.multi_connector import (
    ChildHandshakes,
    collect_handshakes,
    hand_over,
    hand_over_by_pipeline_rank,
)

SETTERS = {
    "set_xfer_handshake_metadata": (hand_over, (0, 1)),
    "set_xfer_handshake_metadata_pp_aware": (hand_over_by_pipeline_rank, ((0, 0), (0, 1))),
}


def multi_connector(handshakes: list[Any]) -> tuple[Any, list[Any]]:
    """A MultiConnector of connectors with these handshakes, and what each connector is told."""
    told: list[Any] = [None] * len(handshakes)
    connectors = [
        SimpleNamespace(
            get_handshake_metadata=lambda each=each: each,
            **{name: lambda found, n=n: told.__setitem__(n, found) for name in SETTERS},
        )
        for n, each in enumerate(handshakes)
    ]
    return SimpleNamespace(_connectors=connectors), told


def refuse(*_: Any) -> None:
    raise AssertionError("upstream's function was called, although the patch must not call it")


@pytest.mark.parametrize("name", SETTERS)
def test_each_gets_its_own_of_every_rank(name: str) -> None:
    hand, ranks = SETTERS[name]
    sent = {}
    for number, rank in enumerate(ranks):
        worker, _ = multi_connector([f"a{number}", None, f"c{number}"])
        sent[rank] = pickle.loads(pickle.dumps(collect_handshakes(refuse, worker)))
    scheduler_side, told = multi_connector([None] * 3)
    hand(refuse, scheduler_side, sent)
    first, second = ranks
    assert told == [{first: "a0", second: "a1"}, {}, {first: "c0", second: "c1"}]


def test_workers_that_say_nothing_send_nothing() -> None:
    worker, _ = multi_connector([None, None])
    assert collect_handshakes(refuse, worker) is None


def test_no_worker_has_said_anything() -> None:
    scheduler_side, told = multi_connector([None, None])
    hand_over_by_pipeline_rank(refuse, scheduler_side, {})
    assert told == [{}, {}]


def test_one_below_another_gets_its_own() -> None:
    inner, told = multi_connector(["a", "b"])
    inner.get_handshake_metadata = lambda: collect_handshakes(refuse, inner)
    inner.set_xfer_handshake_metadata = lambda found: hand_over(refuse, inner, found)
    outer = SimpleNamespace(_connectors=[inner])
    sent = collect_handshakes(refuse, outer)
    assert sent == ChildHandshakes((ChildHandshakes(("a", "b")),))
    hand_over(refuse, outer, {0: sent})
    assert told == [{0: "a"}, {0: "b"}]


def test_what_was_not_collected_here_goes_where_upstream_sends_it() -> None:
    scheduler_side, told = multi_connector([None, None])
    sent: list[Any] = []
    hand_over(sent.append, scheduler_side, {0: "of the first"})
    assert sent == [{0: "of the first"}] and told == [None, None]
