# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vllm-ascend-kvext project
"""Engines that share a Mooncake Store, on vLLM's real scheduler, with Mooncake's real servers.

The same tests as with a folder, and more: servers are killed or stopped while requests run.
"""

from __future__ import annotations

import signal
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
from support.connector.engines import engine_of, plan_of
from support.connector.offload_run import check_nothing_is_left, serve
from support.connector.offload_workloads import offloading
from support.connector.paged_layouts import FULL, LAYOUTS, STATE_LAYOUTS, PagedLayout
from support.connector.simulated_engine import SimulatedEngine
from support.mooncake import Servers
from support.sample import IS_LONG, IS_SAMPLE
from test_shared_tier import _equal_seeds, floor, hit_tokens, prompt_of, timed_steps, weights

from vllm_ascend_kvext.shared_tier.backend import SEAL_BYTES
from vllm_ascend_kvext.shared_tier.mooncake import MooncakeTier
from vllm_ascend_kvext.shared_tier.scheduler import limits
from vllm_ascend_kvext.store.arena import ALIGNMENT_BYTES

__all__ = ["_equal_seeds", "weights"]

pytestmark = pytest.mark.usefixtures("offloading_in_effect", "weights")

SAMPLED = LAYOUTS + STATE_LAYOUTS if IS_LONG else (LAYOUTS + STATE_LAYOUTS)[::3]


@pytest.fixture(scope="module")
def running(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Servers]:
    servers = Servers(tmp_path_factory.mktemp("servers"))
    yield servers
    servers.end()


@pytest.fixture
def patient(monkeypatch: pytest.MonkeyPatch) -> None:
    """On a busy machine, a tier may seem to hang."""
    monkeypatch.setattr(limits, "MAX_LOOKUP_S", 20.0)
    monkeypatch.setattr(limits, "MAX_STALL_S", 20.0)


def sharing(layout: PagedLayout, servers: Servers, **values: Any) -> dict[str, Any]:
    return offloading(layout, shared_tier=servers.url, **values)


def store_in(servers: Servers, layout: PagedLayout, *prompts: Sequence[int], **more: Any) -> None:
    """Let an engine compute prompts, put their KV, and end."""
    with engine_of(layout, offloading=sharing(layout, servers), **more) as engine:
        for number, prompt in enumerate(prompts):
            serve(engine, plan_of(f"stored-{number}", prompt))
        assert not any(engine.side.counters.shared_failures.values())


@pytest.mark.usefixtures("patient")
@pytest.mark.parametrize("num_workers", [2] if IS_SAMPLE else [1, 2])
@pytest.mark.parametrize("layout", SAMPLED, ids=lambda layout: layout.name)
def test_another_engine_hits_what_one_has_stored(
    layout: PagedLayout, num_workers: int, running: Servers
) -> None:
    prompt = prompt_of(layout, f"mooncake {num_workers}", 8)
    unit = layout.unit_tokens
    shared = prompt[: 5 * unit]  # A chunk has two units.
    store_in(running, layout, [*shared, 1], prompt, num_workers=num_workers)
    options = sharing(layout, running)
    with engine_of(layout, offloading=options, num_workers=num_workers) as engine:
        other = shared + prompt_of(layout, 2, 4)
        assert hit_tokens(engine, plan_of("other", other)) == len(shared)
        assert hit_tokens(engine, plan_of("a", prompt)) == floor(engine, len(prompt) - 1)
        counters = engine.side.counters
        assert counters.shared_requests["found"] == 2
        assert counters.transfer_bytes["get"] > 0 and not any(counters.shared_failures.values())


def test_places_have_room_for_seals_only_with_mooncake(running: Servers, tmp_path: Path) -> None:
    """The rows of a place fill a multiple of 64 bytes.

    So the next place could begin right there.
    """
    urls = {None: 0, f"file://{tmp_path}": 0, running.url: SEAL_BYTES}
    for url, spare_bytes in urls.items():
        with engine_of(FULL, offloading=offloading(FULL, shared_tier=url)) as engine:
            serve(engine, plan_of("a", prompt_of(FULL, "spare")))
            entries = engine.side.tier._entries.values()
            assert entries
            for entry in entries:
                num_bytes = engine.side._loads._layout.num_bytes(entry.piece)
                assert 0 <= entry.num_bytes - num_bytes - spare_bytes < ALIGNMENT_BYTES
                assert entry.offset_bytes + entry.num_bytes <= engine.side.tier.capacity_bytes


@pytest.mark.usefixtures("patient")
def test_engines_share_at_the_same_time(running: Servers) -> None:
    options = sharing(FULL, running)
    with engine_of(FULL, offloading=options) as one, engine_of(FULL, offloading=options) as other:
        for seed in ("x", "y", "z"):
            prompt = prompt_of(FULL, f"at once {seed}")
            engines = (other, one) if seed == "y" else (one, other)
            assert hit_tokens(engines[0], plan_of(f"a{seed}", prompt)) == 0
            found = hit_tokens(engines[1], plan_of(f"b{seed}", prompt))
            assert found == floor(one, len(prompt) - 1)


@pytest.mark.usefixtures("patient")
def test_wrong_bytes_are_computed(running: Servers) -> None:
    """Another process has overwritten the objects with wrong bytes."""
    prompt = prompt_of(FULL, "wrong", 12)
    store_in(running, FULL, prompt)
    with engine_of(FULL, offloading=sharing(FULL, running)) as engine:
        store = tier_of(engine)._store
        for key in running.stored_keys():
            if "/R" in key:
                value = store.get(key)
                store.remove(key, True)
                turned = value[-SEAL_BYTES - 1 :: -1] + value[-SEAL_BYTES:]
                assert store.put(key, turned) == 0
        assert hit_tokens(engine, plan_of("a", prompt)) == 0
        assert engine.side.counters.shared_failures["get_broken"] > 0


# Servers that are killed or stopped while requests run.


def tier_of(engine: SimulatedEngine, is_scheduler: bool = True) -> MooncakeTier:
    side: Any = engine.side.secondary
    worker: Any = engine.workers[0].shared
    tier: Any = side._backend if is_scheduler else worker._transfers._tier
    return tier


class Watched:
    """Mooncake's client. Something happens right before one of its calls."""

    def __init__(self, tier: Any, names: Sequence[str], happens: Callable[[], None]) -> None:
        self._store, self._names, self._happens = tier._store, names, happens
        self.num_calls = 0
        tier._store = self

    def __getattr__(self, name: str) -> Any:
        call = getattr(self._store, name)

        def watched(*arguments: Any) -> Any:
            if name in self._names:
                self.num_calls += 1
                if self.num_calls == 1:
                    self._happens()
            return call(*arguments)

        return watched


CALLS = {"put": "batch_put_from", "get": "batch_get_into", "lookup": "get_batch"}
FAULTS = [
    pytest.param(call, server, how, id=f"{call}, {server} {how.name}")
    for call in CALLS
    for server in ("owner", "master")
    for how in (signal.SIGKILL, signal.SIGSTOP)
]
SHORT = ("get, owner SIGKILL", "lookup, master SIGKILL", "put, master SIGSTOP")


@pytest.mark.main_version
@pytest.mark.parametrize(
    ("call", "server", "how"), FAULTS if IS_LONG else [f for f in FAULTS if f.id in SHORT]
)
def test_requests_go_on_whatever_becomes_of_a_server(
    call: str, server: str, how: signal.Signals, tmp_path: Any, record_property: Any
) -> None:
    """All outputs equal those of an engine that computes.

    So does every byte that attention reads.
    """
    prompts = [prompt_of(FULL, seed, 12) for seed in range(3)]
    servers = Servers(tmp_path)
    try:
        with engine_of(FULL) as cold:
            cold_taken = [timed_steps(cold, plan_of(str(n), p)) for n, p in enumerate(prompts)]
        if call != "put":
            store_in(servers, FULL, *prompts)
        with engine_of(FULL, offloading=sharing(FULL, servers)) as engine:
            process = getattr(servers, server)
            tier: Any = tier_of(engine, call == "lookup")
            watched = Watched(tier, [CALLS[call]], lambda: process.send_signal(how))
            engine.add_request(plan_of("beside", prompt_of(FULL, "beside"), max_tokens=12))
            taken = [timed_steps(engine, plan_of(str(n), p)) for n, p in enumerate(prompts)]
            assert watched.num_calls >= 1
            cold_s, cold_schedule_s = map(max, zip(*cold_taken, strict=True))
            longest_s, schedule_s = map(max, zip(*taken, strict=True))
            wait_s = longest_s - cold_s
            print(
                f"{call}, {server} {how.name}: a request waited {wait_s * 1000:.0f} ms beyond "
                f"computing, schedule() took {schedule_s * 1000:.2f} ms at most, and "
                f"{cold_schedule_s * 1000:.2f} ms without a tier"
            )
            record_property("wait_ms", wait_s * 1000)
            record_property("schedule_ms", schedule_s * 1000)
            began_s, number = time.monotonic(), 0
            # After a minute, Mooncake gives up, but may still write: see `MooncakeTier`.
            is_given_up = (call, server, how) == ("get", "owner", signal.SIGSTOP)
            while engine.side.secondary._jobs.num_under_way:
                # Serve until the hanging call ends, because the call alone causes no step. Its
                # place is kept.
                serve(engine, plan_of(f"while {(number := number + 1)}", prompts[0][:5]))
                time.sleep(0.1)
                taken_s = time.monotonic() - began_s
                assert taken_s < 200
                if is_given_up and taken_s > 90:
                    break  # The places of this get, and of those behind it, are lost.
            else:
                assert not is_given_up
                serve(engine)
                check_nothing_is_left(engine)
            # The server comes back, and is used again.
            process.send_signal(signal.SIGCONT)
            if how is signal.SIGKILL:
                process.wait()
                servers.start_master() if server == "master" else servers.start_owner()
            servers.until_there_is_memory()
            deadline_s = time.monotonic() + 60
            number = 0
            while engine.side.counters.transfer_bytes["put"] == 0 or number == 0:
                assert time.monotonic() < deadline_s
                time.sleep(0.3)
                prompt = prompt_of(FULL, f"later {(number := number + 1)}")
                serve(engine, plan_of(f"later {number}", prompt))
        with engine_of(FULL, offloading=sharing(FULL, servers)) as engine:
            assert hit_tokens(engine, plan_of("again", prompt)) > 0
    finally:
        servers.end()
