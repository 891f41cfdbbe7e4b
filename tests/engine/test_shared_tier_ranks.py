# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vllm-ascend-kvext project
"""A shared tier behind host memory that two ranks share: each byte is got once per host.

The model has one KV head, which both ranks have. Log-probabilities equal those of one rank without
this package. A control shows that wrong bytes would change them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from support.connector.shared_objects import forge, objects
from support.sample import IS_LONG
from support.scenarios.answers import LOGPROB_TOLERANCE, Served
from support.scenarios.processes import TWO_CPUS
from test_shared_tier_engine import HITS, LABELS, SEED, Sharing, own

from vllm_ascend_kvext.shared_tier.backend import SEAL_BYTES

pytestmark = pytest.mark.main_version
TWO_RANKS = {"tensor_parallel_size": 2}


@pytest.fixture(scope="module")
def sharing(
    model_folder: Callable[[str], Path], tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Sharing]:
    yield Sharing(model_folder("one window"), tmp_path_factory)


@pytest.fixture(scope="module")
def reference(sharing: Sharing) -> Served:
    return sharing.reference()


def serve(sharing: Sharing) -> Served:
    return sharing.serve(environ=SEED | TWO_CPUS, **TWO_RANKS)


@pytest.fixture(scope="module")
def one_rank(sharing: Sharing) -> list[Served]:
    """Two engines of one rank each, one after the other. The second finds what the first put."""
    return [sharing.serve(), sharing.serve()]


@pytest.fixture(scope="module")
def two_ranks(sharing: Sharing, one_rank: list[Served]) -> list[Served]:
    """Two engines of two ranks each, which find nothing of engines of one rank."""
    return [serve(sharing), serve(sharing)]


def test_two_ranks_get_and_put_as_many_bytes_as_one(
    one_rank: list[Served], two_ranks: list[Served], reference: Served
) -> None:
    for served in (*one_rank, *two_ranks):
        served.check_equal(reference, LABELS, LOGPROB_TOLERANCE)
        served.check_nothing_is_left()
    assert [served.hit_tokens("shared") for served in two_ranks] == [[0] * len(HITS), HITS]
    assert two_ranks[1].hit_tokens("shared, again") == HITS
    moved = {
        name: [own(served, f"transfer_bytes.{name}") for served in (*one_rank, *two_ranks)]
        for name in ("get", "put")
    }
    print("bytes by engine: one rank, one rank, two ranks, two ranks:", moved)
    assert moved["get"][:2] == moved["get"][2:] and moved["get"][1] > 0
    assert moved["put"][:2] == moved["put"][2:] and moved["put"][0] > 0
    for served in two_ranks:
        assert own(served, "host_sharing_workers") == 2
        for reason in ("get_absent", "get_broken", "get_unreachable", "put_unreachable"):
            assert own(served, f"shared_failures.{reason}") == 0


def test_wrong_bytes_would_change_answers(
    two_ranks: list[Served], sharing: Sharing, reference: Served
) -> None:
    """The control: objects have zeros, and seals that fit zeros."""
    kept = {path: path.read_bytes() for path in objects(sharing.folder)}
    for path, content in kept.items():
        forge(sharing.folder, path, bytes(len(content) - SEAL_BYTES))
    try:
        served = serve(sharing)
        assert served.hit_tokens("shared") == HITS
        assert served.logprob_error("shared", reference) > 100 * LOGPROB_TOLERANCE
    finally:
        for path, content in kept.items():
            path.write_bytes(content)


@pytest.mark.skipif(not IS_LONG, reason="a simulated engine has damaged objects in every run")
def test_a_damaged_object_is_lost_for_all_ranks(
    two_ranks: list[Served], sharing: Sharing, reference: Served
) -> None:
    kept = {path: path.read_bytes() for path in objects(sharing.folder)}
    for number, (path, content) in enumerate(kept.items()):
        data = bytearray(content)
        data[number * 97 % len(data)] ^= 1 << number % 8
        path.write_bytes(data)
    try:
        served = serve(sharing)
        served.check_equal(reference, LABELS, LOGPROB_TOLERANCE)
        served.check_nothing_is_left()
        assert served.hit_tokens("shared") == [0] * len(HITS)
        assert own(served, "shared_failures.get_broken") > 0
    finally:
        for path, content in kept.items():
            path.write_bytes(content)
