# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vllm-ascend-kvext project
"""The shared tier in Mooncake Store. Its servers stop, are killed, are full or do not exist."""

from __future__ import annotations

import builtins
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from support.connector.gates import until
from support.mooncake import CLIENT_TTL_S, Servers, require
from support.sample import IS_LONG

from vllm_ascend_kvext.commands.shared_tier import describe
from vllm_ascend_kvext.connector.common.options import ConnectorOptions
from vllm_ascend_kvext.errors import SettingsError
from vllm_ascend_kvext.shared_tier import mooncake, open_tier
from vllm_ascend_kvext.shared_tier.backend import SEAL_BYTES, Answer, SharedObject
from vllm_ascend_kvext.shared_tier.mooncake import MooncakeTier
from vllm_ascend_kvext.shared_tier.names import namespace_of
from vllm_ascend_kvext.store.arena import ALIGNMENT_BYTES, Arena

NUM_BYTES = 1 << 20
NOTE = f"N{'1' * 32}"


def what(number: int = 0, num_bytes: int = NUM_BYTES) -> SharedObject:
    name = f"space/R0-64-{number:032x}"
    return SharedObject(number, name, 0, num_bytes, (f"N{number:032x}",))


class Rank:
    """A tier with memory. `fill` sets all bytes of the memory."""

    def __init__(self, url: str) -> None:
        self.tier = MooncakeTier(url, 0)
        self.memory = bytearray(8 << 20)
        self.tier.register(memoryview(self.memory))

    def fill(self, byte: int) -> None:
        self.memory[:] = bytes([byte]) * len(self.memory)

    def put(self, number: int = 0, byte: int = 1) -> Answer:
        self.fill(byte)
        answer = self.tier.put(what(number))
        return answer

    def get(self, number: int = 0, byte: int = 1) -> Answer:
        self.fill(0)
        answer = self.tier.get_into(what(number), lambda _: None)
        if answer is Answer.WHOLE:
            assert self.memory[:NUM_BYTES] == bytes([byte]) * NUM_BYTES
        assert not any(self.memory[NUM_BYTES + SEAL_BYTES :])
        return answer

    def exists(self, number: int = 0) -> bool:
        names = [f"space/{note}" for note in what(number).notes]
        return bool(self.tier.exist(names)[0]) and bool(self.tier.exist([what(number).name])[0])

    @property
    def raw(self) -> Any:
        """Mooncake's own client."""
        return self.tier._store


@pytest.fixture(scope="module")
def running(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Servers]:
    servers = Servers(tmp_path_factory.mktemp("servers"))
    yield servers
    servers.end()


@pytest.fixture(scope="module")
def ranks(running: Servers) -> Iterator[tuple[Rank, Rank]]:
    """The ranks of two engines."""
    found = Rank(running.url), Rank(running.url)
    yield found
    for each in found:
        each.tier.close()


@pytest.fixture
def rank(ranks: tuple[Rank, Rank]) -> Rank:
    ranks[0].raw.remove_all(True)
    return ranks[0]


@pytest.fixture
def servers(tmp_path: Path) -> Iterator[Servers]:
    """Servers for one test. The test stops and kills them."""
    started = Servers(tmp_path)
    yield started
    started.end()


def in_time(call: Callable[[], Any], most_s: float) -> Any:
    """The result of a call.

    Mooncake itself ends the call, after a time that Mooncake has chosen.
    """
    began_s = time.monotonic()
    result = call()
    assert time.monotonic() - began_s < most_s
    return result


# Bytes and seals.


def test_a_seal_lies_in_spare_bytes_of_its_place(
    ranks: tuple[Rank, Rank], running: Servers
) -> None:
    """The seal is not in the next place.

    Behind the last place, it does not lie beyond the memory.
    """
    num_bytes = (1 << 20) - ALIGNMENT_BYTES
    num_places = 8
    arena = Arena(len(ranks[0].memory), ConnectorOptions(shared_tier=running.url).spare_bytes)
    objects = []
    contents = []
    for number in range(num_places):
        offset_bytes = arena.allocate(arena.place_bytes(num_bytes))
        assert offset_bytes is not None
        objects.append(what(number, num_bytes)._replace(offset_bytes=offset_bytes))
        contents.append(bytes([number + 1]) * num_bytes)
        ranks[0].memory[offset_bytes : offset_bytes + num_bytes] = contents[-1]
    assert arena.used_bytes == len(ranks[0].memory)
    assert {ranks[0].tier.put(each) for each in objects} == {Answer.WHOLE}
    ranks[1].fill(0)
    assert {ranks[1].tier.get_into(each, lambda _: None) for each in objects} == {Answer.WHOLE}
    for rank in ranks:
        places = (rank.memory[each.offset_bytes :][:num_bytes] for each in objects)
        assert [*places] == contents


def test_engines_that_put_at_once_leave_one_of_both(rank: Rank, ranks: tuple[Rank, Rank]) -> None:
    """KV of the same tokens differs in its last bits if it is computed in another batch."""
    for number in range(20):
        barrier = threading.Barrier(2)

        def put(by: int, number: int = number, barrier: threading.Barrier = barrier) -> None:
            barrier.wait()
            assert ranks[by].put(number, by + 1) is Answer.WHOLE

        threads = [threading.Thread(target=put, args=(by,)) for by in (0, 1)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        rank.fill(0)
        assert rank.tier.get_into(what(number), lambda _: None) is Answer.WHOLE
        assert rank.memory[:NUM_BYTES] in (b"\1" * NUM_BYTES, b"\2" * NUM_BYTES)


def test_a_note_that_is_damaged_leads_nowhere(rank: Rank) -> None:
    rank.put(0)
    rank.put(1)
    store = rank.raw
    notes = [rank.tier._prefix + f"space/{what(number).notes[0]}" for number in (0, 1)]
    other = store.get(notes[1])
    for value in (other, store.get(notes[0])[:-1], b"x", b"\0" * 200):
        store.remove(notes[0], True)
        assert store.put(notes[0], value) == 0
        assert not rank.exists(0)
    rank.put(0)
    assert rank.exists(0)


# The pool is full, and Mooncake evicts.


def test_what_does_not_fit_is_not_there(rank: Rank, ranks: tuple[Rank, Rank]) -> None:
    store = rank.raw
    pinned = [
        store.put(f"pinned-{number}", bytes(NUM_BYTES), rank.tier._pinned) for number in range(130)
    ]
    assert -200 in pinned
    assert rank.put() is Answer.UNREACHABLE
    assert not rank.exists() and ranks[1].get() is Answer.ABSENT
    store.remove_all(True)
    assert until(lambda: rank.put() is Answer.WHOLE) and ranks[1].get() is Answer.WHOLE


def test_what_is_evicted_is_not_there(rank: Rank, ranks: tuple[Rank, Rank]) -> None:
    answers = [rank.put(number) for number in range(200)]  # There is room for 128 objects of 1 MB.
    assert {*answers} <= {Answer.WHOLE, Answer.UNREACHABLE}
    found = [ranks[1].get(number) for number in range(200)]
    assert {*found} == {Answer.WHOLE, Answer.ABSENT}


def test_identities_are_not_evicted(rank: Rank) -> None:
    identity = {"dtype": "bf16"}
    rank.tier.introduce(namespace_of(identity), identity)
    for number in range(300):
        rank.put(number)
    assert rank.tier.engines() == {namespace_of(identity): identity}


@pytest.mark.parametrize(
    "content", [None, b"5", b"[1]", b"{", b"\xff", b"[" * 100_000, b'{"dtype": "fp16"}']
)
def test_an_identity_that_is_damaged_is_not_shown(rank: Rank, content: bytes | None) -> None:
    """The content is damaged by accident, or is wrong with a right seal."""
    identity = {"dtype": "bf16"}
    rank.tier.introduce(namespace_of(identity), identity)
    (key,) = rank.tier._there([f"kvext4/engine-{number}" for number in range(1024)])
    if content is None:
        rank.raw.upsert(key, b"something else")
    else:
        rank.tier._write({key: content})
    assert rank.tier.engines() == {}


def test_what_is_touched_is_not_evicted(rank: Rank, ranks: tuple[Rank, Rank]) -> None:
    """Of objects put at the same time, those that were not used since then are evicted first."""
    hot = range(5)
    cold = range(5, 10)
    for number in (*hot, *cold):
        assert until(lambda number=number: rank.put(number) is Answer.WHOLE)
    for number in range(10, 300):  # There is room for 128 objects of 1 MB.
        names = [f"space/{note}" for each in hot for note in what(each).notes]
        assert ranks[1].tier.touch(names) == [True] * len(hot)
        rank.put(number)
    assert [ranks[1].get(number) for number in hot] == [Answer.WHOLE] * len(hot)
    assert {ranks[1].get(number) for number in cold} == {Answer.ABSENT}


# Servers that are killed or stopped.


def test_an_owner_that_is_killed(servers: Servers) -> None:
    rank = Rank(servers.url)
    assert rank.put() is Answer.WHOLE
    servers.owner.kill()
    servers.owner.wait()
    assert rank.get() is Answer.UNREACHABLE  # The master does not know yet that the owner is gone.
    assert rank.put(1) is Answer.UNREACHABLE
    time.sleep(CLIENT_TTL_S + 1)
    assert rank.get() is Answer.ABSENT and not rank.exists()
    assert rank.put() is Answer.UNREACHABLE  # No server has memory.
    servers.start_owner()
    assert rank.put() is Answer.WHOLE and rank.get() is Answer.WHOLE
    rank.tier.close()


def test_a_master_that_is_killed(servers: Servers) -> None:
    """The next master has no objects. Engines find the new master without a restart."""
    rank = Rank(servers.url)
    assert rank.put() is Answer.WHOLE
    servers.master.kill()
    servers.master.wait()
    assert in_time(rank.get, 20) is Answer.UNREACHABLE
    assert in_time(rank.put, 30) is Answer.UNREACHABLE
    assert not in_time(rank.exists, 30)
    servers.start_master()
    servers.until_there_is_memory()  # The owner finds the new master, too.
    assert not rank.exists() and rank.get() is Answer.ABSENT
    assert rank.put() is Answer.WHOLE and rank.get() is Answer.WHOLE
    rank.tier.close()


def stop(process: subprocess.Popen[bytes]) -> None:
    """Stop a process. On a busy machine, it takes time until all of its threads have stopped."""
    process.send_signal(signal.SIGSTOP)
    threads = Path("/proc", str(process.pid), "task")
    while any(
        each.joinpath("stat").read_text().rpartition(")")[2].split()[0] != "T"
        for each in threads.iterdir()
    ):
        time.sleep(0.01)


def test_a_master_that_stops(servers: Servers) -> None:
    rank = Rank(servers.url)
    assert rank.put() is Answer.WHOLE
    stop(servers.master)
    assert in_time(rank.get, 10) is Answer.UNREACHABLE
    assert in_time(lambda: rank.put(1), 20) is Answer.UNREACHABLE
    assert not in_time(rank.exists, 20)
    servers.master.send_signal(signal.SIGCONT)
    assert rank.get() is Answer.WHOLE and rank.put(1) is Answer.WHOLE
    rank.tier.close()


@pytest.mark.skipif(not IS_LONG, reason="only `make test-long` takes the minute for it")
def test_of_an_owner_that_stops_in_a_get_no_bytes_come_later(tmp_path: Path) -> None:
    """After the end of a get, the get's place belongs to another entry."""
    size = 400 << 20
    servers = Servers(tmp_path, "900 MB", "--client_ttl=200", "--default_kv_lease_ttl=200000")
    try:
        tier = MooncakeTier(servers.url, 0)
        memory = bytearray(b"\5") * (size + SEAL_BYTES)
        tier.register(memoryview(memory))
        assert tier.put(what(0, size)) is Answer.WHOLE
        memory[:] = bytes(len(memory))
        answers: list[Answer] = []
        thread = threading.Thread(
            target=lambda: answers.append(tier.get_into(what(0, size), lambda _: None))
        )
        thread.start()
        while not memory[size // 8]:
            time.sleep(0.001)
        servers.owner.send_signal(signal.SIGSTOP)
        time.sleep(0.5)
        assert not memory[size - 1]
        thread.join()
        assert answers == [Answer.UNREACHABLE]
        memory[:] = b"\7" * len(memory)
        servers.owner.send_signal(signal.SIGCONT)
        time.sleep(5)
        assert memory == b"\7" * len(memory)
        assert tier.get_into(what(0, size), lambda _: None) is Answer.WHOLE
        tier.close()
    finally:
        servers.end()


def test_of_a_transfer_that_mooncake_gave_up_nobody_hears(
    rank: Rank, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Such a transfer still writes into its place, so the place must not be reused."""
    monkeypatch.setattr(mooncake, "_GIVEN_UP_S", -1.0)
    rank.put()
    assert rank.get() is Answer.WHOLE
    answers: list[Answer] = []
    thread = threading.Thread(target=lambda: answers.append(rank.get(5)), daemon=True)
    thread.start()
    thread.join(1.0)
    assert thread.is_alive() and not answers


WRITER = """
import sys
from vllm_ascend_kvext.shared_tier.mooncake import MooncakeTier
from vllm_ascend_kvext.shared_tier.backend import SharedObject
tier = MooncakeTier(sys.argv[1], 0)
memory = bytearray(b"x" * (33 << 20))
tier.register(memoryview(memory))
print("ready", flush=True)
for number in range(1000):
    name = f"space/R0-64-{number:032x}"
    tier.put(SharedObject(0, name, 0, 32 << 20, (f"N{number:032x}",)))
    tier.forget(name)
    tier.put(SharedObject(0, name, 0, 1 << 20, (f"N{number:032x}",)))
"""


def test_a_writer_that_is_killed_leaves_nothing_half(
    rank: Rank, running: Servers, tmp_path: Path
) -> None:
    for delay_s in (0.02, 0.05, 0.1):
        writer = subprocess.Popen(
            [sys.executable, "-c", WRITER, running.url],
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            cwd=tmp_path,
        )
        assert writer.stdout is not None and writer.stdout.readline() == b"ready\n"
        time.sleep(delay_s)
        writer.kill()
        writer.wait()
        writer.stdout.close()
        for number in range(50):
            answer = rank.get(number, ord("x"))
            # An object is broken if it is larger than expected.
            assert answer in (Answer.WHOLE, Answer.ABSENT, Answer.BROKEN)
            assert rank.put(number, ord("x")) in (Answer.WHOLE, Answer.UNREACHABLE)
        rank.raw.remove_all(True)


# Missing servers and packages at the start of an engine.


def test_without_a_master_there_is_no_tier() -> None:
    require()
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        url = f"mooncake://127.0.0.1:{free.getsockname()[1]}"
    for call in (lambda: MooncakeTier(url, 0), lambda: open_tier(url, None, 0)):
        with pytest.raises(SettingsError, match=r"mooncake_master at .*, found: .*refused"):
            in_time(call, 10)
    is_well, (line,) = describe(url)
    assert not is_well and "leave shared_tier out" in line
    for address in ("127.0.0.1:99999", "no.such.host.invalid:1"):
        with pytest.raises(SettingsError, match="mooncake_master"):
            MooncakeTier(f"mooncake://{address}", 0)


def test_another_server_is_no_master() -> None:
    """The test runs in its own process, because Mooncake keeps trying for a while."""
    require()
    code = "import sys; from vllm_ascend_kvext.shared_tier.mooncake import MooncakeTier\n"
    code += "try: MooncakeTier(sys.argv[1], 0)\nexcept ValueError as error: print(error)"
    with socket.socket() as other:
        other.bind(("127.0.0.1", 0))
        other.listen()
        url = f"mooncake://127.0.0.1:{other.getsockname()[1]}"
        command = [sys.executable, "-c", code, url]
        done = subprocess.run(command, capture_output=True, text=True, timeout=100, check=True)
    assert "expected Mooncake's package, and a mooncake_master" in done.stdout
    assert "of its setup" in done.stdout


def test_without_the_package_it_is_named(running: Servers, monkeypatch: pytest.MonkeyPatch) -> None:
    ordinary = builtins.__import__

    def without(name: str, *arguments: Any) -> Any:
        if name.partition(".")[0] == "mooncake":
            raise ImportError("libibverbs.so.1: cannot open shared object file")
        return ordinary(name, *arguments)

    monkeypatch.setattr(builtins, "__import__", without)
    with pytest.raises(SettingsError, match="pip install mooncake-transfer-engine-npu") as raised:
        MooncakeTier(running.url, 0)
    assert "libibverbs.so.1" in str(raised.value)


def test_memory_that_cannot_be_registered_is_refused(rank: Rank) -> None:
    with pytest.raises(SettingsError, match="found code -600"):
        rank.tier.register(memoryview(rank.memory))  # This memory is registered already.


def test_what_a_user_has_set_stays(running: Servers, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MC_RPC_TIMEOUT_MS", "5000")
    monkeypatch.delenv("MC_STORE_CLIENT_SETUP_RETRIES", raising=False)
    MooncakeTier(running.url, 0).close()
    assert os.environ["MC_RPC_TIMEOUT_MS"] == "5000"
    assert os.environ["MC_STORE_CLIENT_SETUP_RETRIES"] == "1"


def test_status_shows_a_store(rank: Rank, running: Servers) -> None:
    for name in ("bf16", "fp16"):
        rank.tier.introduce(namespace_of({"dtype": name}), {"dtype": name})
    before = running.stored_keys()
    is_well, lines = describe(running.url)
    assert is_well and "works" in lines[0] and "metrics" in lines[1]
    assert len(lines) == 5 and 'dtype ("' in lines[-1]
    assert running.stored_keys() == before


def test_a_closed_tier_ends_no_process(running: Servers) -> None:
    rank = Rank(running.url)
    rank.tier.close()
    rank.tier.close()
    with pytest.raises(AttributeError):
        rank.tier.exist(["space/R0-64-0"])
