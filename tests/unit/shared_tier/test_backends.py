# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vllm-ascend-kvext project
"""Behaviour of every backend of a shared tier: files, and Mooncake's own servers."""

from __future__ import annotations

import itertools
import random
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from support.mooncake import Servers

from vllm_ascend_kvext.connector.common.options import ConnectorOptions
from vllm_ascend_kvext.shared_tier import open_tier
from vllm_ascend_kvext.shared_tier.backend import (
    SEAL_BYTES,
    Answer,
    SharedObject,
    SharedTier,
    seal_of,
)
from vllm_ascend_kvext.shared_tier.names import namespace_of
from vllm_ascend_kvext.shared_tier.worker.shared_worker import SharedWorker

NUM_BYTES = 3 << 10
NAME = f"R0-64-{'ab' * 16}"
OTHER = f"R0-64-{'cd' * 16}"
NOTES = tuple(f"N{digit * 32}" for digit in "123")
PLACE = 4 << 20
GUARD = 0xA5


def content_of(seed: object, num_bytes: int = NUM_BYTES) -> bytes:
    return random.Random(str(seed)).randbytes(num_bytes)


CONTENT = content_of(0)


class Engine:
    """One rank of an engine, with its tier and its memory."""

    def __init__(self, tier: SharedTier, spare_bytes: int) -> None:
        self.tier = tier
        self.spare_bytes = spare_bytes
        self.namespace = ""
        self.memory = bytearray(8 << 20)
        self.tier.register(memoryview(self.memory))

    def within(self, namespace: str) -> Engine:
        """The same engine, in another name space."""
        other = object.__new__(Engine)
        vars(other).update({**vars(self), "namespace": namespace})
        return other

    def put(
        self, content: bytes, name: str = NAME, notes: tuple[str, ...] = (), at: int = 64
    ) -> Answer:
        what = SharedObject(0, f"{self.namespace}/{name}", at, len(content), notes)
        self._guard(what)
        self.memory[at : at + len(content)] = content
        answer = self.tier.put(what)
        self._check_guard(what)
        return answer

    def get(self, num_bytes: int = NUM_BYTES, name: str = NAME) -> tuple[Answer, bytes]:
        counted: list[int] = []
        what = SharedObject(0, f"{self.namespace}/{name}", PLACE, num_bytes)
        self._guard(what)
        answer = self.tier.get_into(what, counted.append)
        assert answer is not Answer.WHOLE or sum(counted) == num_bytes
        self._check_guard(what)
        return answer, bytes(self.memory[PLACE : PLACE + num_bytes])

    def _guard(self, what: SharedObject) -> None:
        """Fill an object's place and the bytes around it.

        The bytes around the place must not change.
        """
        end = what.offset_bytes + what.num_bytes + self.spare_bytes
        self.memory[what.offset_bytes - 64 : end + 64] = bytes([GUARD]) * (
            end + 128 - what.offset_bytes
        )

    def _check_guard(self, what: SharedObject) -> None:
        end = what.offset_bytes + what.num_bytes + self.spare_bytes
        for begin in (what.offset_bytes - 64, end):
            assert self.memory[begin : begin + 64] == bytes([GUARD]) * 64

    def exist(self, *names: str) -> list[str]:
        return self.tier.exist([f"{self.namespace}/{name}" for name in names])

    def touch(self, *names: str) -> list[bool] | None:
        return self.tier.touch([f"{self.namespace}/{name}" for name in names])

    def forget(self, name: str) -> None:
        self.tier.forget(f"{self.namespace}/{name}")


Overwrite = Callable[[Engine, str, bytes, bytes], None]


def overwrite_file(engine: Engine, name: str, content: bytes, seal: bytes) -> None:
    tier: Any = engine.tier
    path = Path(tier._path(f"{engine.namespace}/{name}"))
    path.parent.mkdir(exist_ok=True)
    path.write_bytes(content + seal)


def overwrite_in_mooncake(engine: Engine, name: str, content: bytes, seal: bytes) -> None:
    tier: Any = engine.tier
    key = f"{tier._prefix}{engine.namespace}/{name}"
    tier._store.remove(key, True)
    assert tier._store.put(key, content + seal) == 0


def lead_by_link(engine: Engine, note: str, name: str) -> None:
    tier: Any = engine.tier
    link = Path(tier._path(f"{engine.namespace}/{note}"))
    link.unlink()
    link.symlink_to(f"{name}.{tier._note_seal(f'{engine.namespace}/{note}', name)}")


def lead_in_mooncake(engine: Engine, note: str, name: str) -> None:
    tier: Any = engine.tier
    key = f"{tier._prefix}{engine.namespace}/{note}"
    tier._write({key: f"{engine.namespace}/{name}".encode()})


Lead = Callable[[Engine, str, str], None]


class Backend:
    """Engines of one backend. Tests share their tiers, because a client of Mooncake ends slowly."""

    def __init__(self, url: str, overwrite: Overwrite, lead: Lead, full_name: str) -> None:
        self._url = url
        self._full_name = full_name
        self.overwrite = overwrite
        self.lead = lead
        self._engines: dict[tuple[int, int], Engine] = {}
        self.namespaces = (f"space-{number}" for number in itertools.count())
        self.namespace = next(self.namespaces)

    def engine(self, number: int = 0, rank: int = 0) -> Engine:
        """An engine in the name space of the test."""
        if (number, rank) not in self._engines:
            spare_bytes = ConnectorOptions(shared_tier=self._url).spare_bytes
            tier = open_tier(self._url, None, rank)
            self._engines[number, rank] = Engine(tier, min(SEAL_BYTES, spare_bytes))
        engine = self._engines[number, rank]
        engine.namespace = self.namespace
        return engine

    def sealed_name(self, name: str, rank: int = 0) -> str:
        """The name that the seal of an object covers."""
        return self._full_name.format(rank=rank, name=f"{self.namespace}/{name}")

    def end(self) -> None:
        for engine in self._engines.values():
            engine.tier.close()


@pytest.fixture(scope="module", params=["files", "mooncake"])
def any_backend(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Backend]:
    folder = tmp_path_factory.mktemp("backend")
    if request.param == "files":
        yield Backend(f"file://{folder}", overwrite_file, lead_by_link, "r{rank}/{name}")
        return
    servers = Servers(folder)
    full_name = "kvext4/r{rank}/{name}"
    backend = Backend(servers.url, overwrite_in_mooncake, lead_in_mooncake, full_name)
    try:
        yield backend
        backend.end()
    finally:
        servers.end()


@pytest.fixture
def backend(any_backend: Backend) -> Backend:
    any_backend.namespace = next(any_backend.namespaces)
    return any_backend


@pytest.fixture
def engine(backend: Backend) -> Engine:
    return backend.engine()


@pytest.mark.parametrize("num_bytes", [64, NUM_BYTES, 1 << 20, (2 << 20) + 64])
def test_what_is_put_is_got_by_another_engine(backend: Backend, num_bytes: int) -> None:
    content = content_of(1, num_bytes)
    assert backend.engine(0).put(content) is Answer.WHOLE
    assert backend.engine(1).get(num_bytes) == (Answer.WHOLE, content)


def test_what_is_not_there_is_absent(engine: Engine) -> None:
    engine.put(CONTENT)
    assert engine.get(name=OTHER)[0] is Answer.ABSENT
    assert engine.exist() == [] and engine.exist(OTHER, NAME) == ["", NAME]


def test_the_first_content_stays(engine: Engine) -> None:
    assert engine.put(CONTENT) is engine.put(content_of(1)) is Answer.WHOLE
    assert engine.get() == (Answer.WHOLE, CONTENT)


def test_other_name_spaces_and_ranks_do_not_meet(backend: Backend, engine: Engine) -> None:
    engine.put(CONTENT, notes=NOTES)
    for other in (engine.within("other"), backend.engine(rank=1)):
        assert other.get()[0] is Answer.ABSENT
        assert other.exist(NAME, *NOTES) == [""] * 4


def test_notes_lead_to_the_object_that_begins_first(engine: Engine) -> None:
    names = [f"R{first}-64-{'ab' * 16}" for first in (32, 0, 16)]
    for name in names:
        engine.put(CONTENT, name, NOTES[:1])
    assert engine.exist(*NOTES[:2], *names) == [names[1], "", *names]
    engine.forget(names[1])
    assert engine.exist(*NOTES[:1]) == [""]
    engine.put(CONTENT, names[0], NOTES[:1])  # The object exists, but its note does not.
    assert engine.exist(*NOTES[:1]) == names[:1]


def test_an_object_may_have_thousands_of_notes(engine: Engine) -> None:
    notes = tuple(f"N{number:032x}" for number in range(2048))
    assert engine.put(CONTENT, notes=notes) is Answer.WHOLE
    assert engine.exist(*notes) == [NAME] * len(notes)


MALFORMED = [
    "R",
    "R0-64",
    f"R0--{'ab' * 16}",
    f"R-1-64-{'ab' * 16}",
    f"R0-64-{'ab' * 15}",
    f"R0-64-{'AB' * 16}",
    f"R{'9' * 13}-{'9' * 13}-{'ab' * 16}",
    f"R0-6\N{ARABIC-INDIC DIGIT FOUR}-{'ab' * 16}",
    f"T64-64-{'ab' * 16}",
    f"S0-64-{'ab' * 16}",
    NOTES[0],
    "\N{EM DASH}",
]


@pytest.mark.parametrize("name", MALFORMED)
def test_a_note_with_a_malformed_name_leads_nowhere(
    backend: Backend, engine: Engine, name: str
) -> None:
    """The note has a right seal, as if a client had written it.

    An object of its name exists, too.
    """
    engine.put(CONTENT, notes=NOTES[:2])
    backend.lead(engine, NOTES[0], NAME)  # `lead` writes a note that leads to an object.
    assert engine.exist(*NOTES[:2]) == [NAME, NAME]
    if name not in NOTES:
        backend.overwrite(engine, name, CONTENT, b"")
    backend.lead(engine, NOTES[0], name)
    assert engine.exist(*NOTES[:2]) == ["", NAME]
    assert engine.touch(NOTES[0], NOTES[1]) == [False, True]
    assert engine.put(CONTENT, notes=NOTES[:2]) is Answer.WHOLE
    assert engine.exist(*NOTES[:2]) == [NAME, NAME]


def test_a_touch_says_what_is_there(engine: Engine) -> None:
    engine.put(CONTENT, notes=NOTES[:1])
    assert engine.touch(NAME, OTHER, *NOTES[:2]) == [True, False, True, False]
    engine.forget(NAME)
    assert engine.touch(NAME, *NOTES[:1]) == [False, False]
    assert engine.touch() == []


# Damaged objects are detected before their bytes are used, and they are removed.


def flipped(data: bytes, at: int) -> bytes:
    return data[:at] + bytes([data[at] ^ 1]) + data[at + 1 :]


DAMAGES: dict[str, Callable[[bytes, bytes], tuple[bytes, bytes]]] = {
    "flipped at the begin": lambda content, seal: (flipped(content, 0), seal),
    "flipped at the end": lambda content, seal: (flipped(content, NUM_BYTES - 1), seal),
    "cut by one": lambda content, seal: (content[:-1], seal),
    "cut to nothing": lambda content, seal: (content[:1], seal),
    "longer": lambda content, seal: (content + b"\0", seal),
    "zeroed": lambda content, seal: (bytes(NUM_BYTES), seal),
    "seal cut": lambda content, seal: (content, seal[:-1]),
    "seal longer": lambda content, seal: (content, seal + b"\0"),
    "without a seal": lambda content, seal: (content, b""),
    "seal zeroed": lambda content, seal: (content, bytes(SEAL_BYTES)),
    **{
        f"seal flipped at {at}": lambda content, seal, at=at: (content, flipped(seal, at))
        for at in range(SEAL_BYTES)
    },
}


@pytest.mark.parametrize("damage", DAMAGES)
def test_a_damaged_object_is_broken_and_forgotten(
    backend: Backend, engine: Engine, damage: str
) -> None:
    engine.put(CONTENT, notes=NOTES)
    seal = seal_of(backend.sealed_name(NAME), CONTENT)
    backend.overwrite(engine, NAME, CONTENT, seal)  # `overwrite` stores a whole object.
    assert engine.get() == (Answer.WHOLE, CONTENT)
    backend.overwrite(engine, NAME, *DAMAGES[damage](CONTENT, seal))
    assert engine.get()[0] is Answer.BROKEN
    assert engine.get()[0] is Answer.ABSENT
    assert engine.exist(NAME, *NOTES) == [""] * 4


@pytest.mark.parametrize("owner", ["another object", "another rank", "another name space"])
def test_the_bytes_of_another_are_broken(backend: Backend, engine: Engine, owner: str) -> None:
    """The seal is right for the object to which the bytes belonged."""
    name = OTHER if owner == "another object" else NAME
    rank = int(owner == "another rank")
    seal = seal_of(backend.sealed_name(name, rank), CONTENT)
    if owner == "another name space":
        seal = seal_of(backend.sealed_name(name).replace("space", "other"), CONTENT)
    engine.put(content_of(1))
    backend.overwrite(engine, NAME, CONTENT, seal)
    assert engine.get()[0] is Answer.BROKEN


@pytest.mark.parametrize("difference", [-64, 64])
def test_an_object_of_another_size_is_broken(engine: Engine, difference: int) -> None:
    engine.put(CONTENT)
    assert engine.get(NUM_BYTES + difference)[0] is Answer.BROKEN
    assert engine.exist(NAME) == [""]


# Output for operators.


def test_engines_know_each_other(backend: Backend, engine: Engine) -> None:
    identities = [{"dtype": name, "groups": [[1, None], ["x" * 50_000]]} for name in ("a", "b")]
    before = engine.tier.engines()
    for identity in identities:
        for _ in range(2):
            engine.tier.introduce(namespace_of(identity), identity)
    found = backend.engine(1).tier.engines()
    assert found == {**before, **{namespace_of(each): each for each in identities}}


# Comparison with a dict.

OPERATIONS = st.lists(
    st.tuples(
        st.sampled_from(["put", "get", "forget", "damage", "exist"]),
        st.integers(0, 3),
        st.integers(0, 1),
        st.integers(0, 255),
    ),
    max_size=25,
)


@settings(
    max_examples=25,
    deadline=None,
    suppress_health_check=[HealthCheck.function_scoped_fixture],
)
@given(operations=OPERATIONS)
def test_two_engines_do_what_a_dict_does(
    any_backend: Backend, operations: list[tuple[str, int, int, int]]
) -> None:
    """Both engines put, forget and damage objects."""
    any_backend.namespace = next(any_backend.namespaces)
    names = [f"R0-64-{number:032x}" for number in range(4)]
    notes = ["N" + name[-32:] for name in names]
    objects: dict[str, bytes | None] = {}  # None if damaged.
    for operation, number, by, seed in operations:
        engine = any_backend.engine(by)
        name = names[number]
        if operation == "put":
            content = content_of(seed % 4, 256)
            assert engine.put(content, name, (notes[number],)) is Answer.WHOLE
            objects.setdefault(name, content)
        elif operation == "get":
            kept = objects.get(name, b"")
            expected = {None: Answer.BROKEN, b"": Answer.ABSENT}.get(kept, Answer.WHOLE)
            answer, content = engine.get(256, name)
            assert answer is expected and (answer is not Answer.WHOLE or content == kept)
            if answer is Answer.BROKEN:
                del objects[name]
        elif operation == "forget":
            engine.forget(name)
            objects.pop(name, None)
        elif operation == "damage" and (content_or_none := objects.get(name)):
            seal = seal_of(any_backend.sealed_name(name), content_or_none)
            any_backend.overwrite(engine, name, flipped(content_or_none, seed), seal)
            objects[name] = None
        there = [each if each in objects else "" for each in names]
        assert engine.exist(*names) == there == engine.exist(*notes)


@pytest.mark.parametrize(
    ("protocol", "url", "is_of_torch"),
    [
        (None, "mooncake://host:1", False),
        ("tcp", "mooncake://host:1", False),
        ("ascend", "mooncake://host:1", True),
        ("ascend", "file:///folder", False),
    ],
)
def test_a_transport_that_may_refuse_mappings_is_given_memory_of_torch(
    protocol: str | None, url: str, is_of_torch: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("MOONCAKE_PROTOCOL", raising=False)
    if protocol is not None:
        monkeypatch.setenv("MOONCAKE_PROTOCOL", protocol)
    options: Any = SimpleNamespace(shared_tier=url)
    worker = SharedWorker(None, None, options)
    assert (worker.why_torch is not None) == is_of_torch
