# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vllm-ascend-kvext project
"""Which rank moves an object."""

from __future__ import annotations

from collections import Counter

from hypothesis import given
from hypothesis import strategies as st

from vllm_ascend_kvext.layout.sharing import HostSharing
from vllm_ascend_kvext.shared_tier.worker.object_ranks import ObjectRanks, object_ranks

NAMES = [f"engine/R0-64-{number:032x}" for number in range(64)]


def of_engine(hosts: list[int], num_equal: int, shares: bool) -> list[ObjectRanks]:
    """The ranks of an engine, whose hosts are numbers."""
    found = []
    for rank, host in enumerate(hosts):
        of_host = tuple(each for each, other in enumerate(hosts) if other == host)
        sharing = HostSharing(rank, of_host, ()) if shares else None
        found.append(object_ranks(rank, num_equal, sharing))
    return found


hosts_of_ranks = st.lists(st.integers(0, 3), min_size=2, max_size=16)


@given(hosts_of_ranks, st.booleans(), st.sampled_from(NAMES))
def test_of_the_ranks_with_one_memory_one_gets(hosts: list[int], is_equal: bool, name: str) -> None:
    ranks = of_engine(hosts, len(hosts) if is_equal else 1, shares=True)
    getting = Counter(host for host, each in zip(hosts, ranks, strict=True) if each.gets(name))
    assert getting == Counter(set(hosts))
    for each in ranks:  # All ranks of a host look for the same object.
        assert {ranks[other].of_objects for other in each.getting} == {each.of_objects}


@given(hosts_of_ranks, st.sampled_from(NAMES))
def test_each_object_of_a_host_is_put_by_one_of_its_ranks(hosts: list[int], name: str) -> None:
    ranks = of_engine(hosts, 1, shares=True)
    putting = Counter(each.of_objects for each in ranks if each.puts(name))
    assert putting == Counter({each.of_objects for each in ranks})
    for rank, each in enumerate(ranks):
        assert hosts[each.of_objects] == hosts[rank], "an object of another host's ranks"


@given(hosts_of_ranks, st.booleans(), st.sampled_from(NAMES))
def test_what_is_equal_on_all_ranks_is_put_once(hosts: list[int], shares: bool, name: str) -> None:
    ranks = of_engine(hosts, len(hosts), shares)
    assert sum(each.puts(name) for each in ranks) == 1
    assert {each.of_objects for each in ranks} == {0}


@given(hosts_of_ranks, st.booleans(), st.sampled_from(NAMES))
def test_a_rank_with_its_own_memory_gets_everything(
    hosts: list[int], is_equal: bool, name: str
) -> None:
    ranks = of_engine(hosts, len(hosts) if is_equal else 1, shares=False)
    assert all(each.gets(name) for each in ranks)
    if not is_equal:
        assert all(each.puts(name) and each.of_objects == each.rank for each in ranks)


def test_all_ranks_of_a_host_have_a_part_of_the_work() -> None:
    ranks = of_engine([0, 0, 0, 0], 1, shares=True)
    numbers = [sum(each.gets(name) for name in NAMES) for each in ranks]
    assert sum(numbers) == len(NAMES) and min(numbers) > 0
