# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vllm-ascend-kvext project
"""The shared tier in a folder: objects are whole or absent, whatever happens to the files."""

from __future__ import annotations

import contextlib
import errno
import logging
import os
import random
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, rule

from vllm_ascend_kvext.commands.shared_tier import describe
from vllm_ascend_kvext.errors import SettingsError
from vllm_ascend_kvext.shared_tier.backend import SEAL_BYTES, Answer, SharedObject
from vllm_ascend_kvext.shared_tier.files import FilesTier, files_below
from vllm_ascend_kvext.shared_tier.names import namespace_of

NUM_BYTES = 3 << 10
CAPACITY_BYTES = 1 << 30
NAME = f"R0-64-{'ab' * 16}"
NOTES = tuple(f"N{digit * 32}" for digit in "123")


class Engine:
    """A tier and the memory of one rank of an engine."""

    def __init__(
        self,
        folder: Path,
        capacity_bytes: int = CAPACITY_BYTES,
        namespace: str = "engine",
        rank: int = 0,
    ) -> None:
        self.namespace = namespace
        self.tier = FilesTier(f"file://{folder}", capacity_bytes, rank)
        self.memory = bytearray(8 << 20)
        self.tier.register(memoryview(self.memory))

    def put(
        self, content: bytes, name: str = NAME, notes: tuple[str, ...] = (), at: int = 64
    ) -> Answer:
        self.memory[at : at + len(content)] = content
        what = SharedObject(0, f"{self.namespace}/{name}", at, len(content), notes)
        return self.tier.put(what)

    def get(self, num_bytes: int = NUM_BYTES, name: str = NAME) -> tuple[Answer, bytes]:
        at = 4 << 20
        self.memory[at : at + num_bytes] = bytes(num_bytes)
        counted: list[int] = []
        what = SharedObject(0, f"{self.namespace}/{name}", at, num_bytes)
        answer = self.tier.get_into(what, counted.append)
        assert answer is not Answer.WHOLE or sum(counted) == num_bytes
        return answer, bytes(self.memory[at : at + num_bytes])

    def exist(self, *names: str) -> list[str]:
        return self.tier.exist([f"{self.namespace}/{name}" for name in names])

    def forget(self, name: str) -> None:
        self.tier.forget(f"{self.namespace}/{name}")


def content_of(seed: object, num_bytes: int = NUM_BYTES) -> bytes:
    return random.Random(str(seed)).randbytes(num_bytes)


CONTENT = content_of(0)


@pytest.fixture
def engine(tmp_path: Path) -> Engine:
    return Engine(tmp_path)


def object_files(folder: Path) -> list[Path]:
    return sorted(folder.glob("kvext4/*/*/objects/*/*"))


def taken_bytes(folder: Path) -> int:
    return sum(taken for _, taken, _ in files_below(str(folder / "kvext4")))


def note_files(folder: Path) -> list[Path]:
    return sorted(folder.glob("kvext4/*/*/notes/*/*"))


def test_only_the_owner_can_read(tmp_path: Path) -> None:
    before = os.umask(0)
    try:
        Engine(tmp_path / "tier").put(CONTENT, notes=NOTES)
    finally:
        os.umask(before)
    for path in (tmp_path / "tier").rglob("*"):
        if not path.is_symlink():
            assert path.stat().st_mode & 0o777 == (0o700 if path.is_dir() else 0o600), path


# Damaged objects are detected before their bytes are used, and they are removed.


def flip(path: Path, at: int) -> None:
    data = bytearray(path.read_bytes())
    data[at] ^= 1
    path.write_bytes(data)


def cut(path: Path, num_bytes: int) -> None:
    os.truncate(path, num_bytes)


def extend(path: Path) -> None:
    path.write_bytes(path.read_bytes() + b"\0")


SIZE = NUM_BYTES + SEAL_BYTES
DAMAGES: dict[str, Any] = {
    **{f"flipped at {at}": lambda path, at=at: flip(path, at) for at in (0, NUM_BYTES // 2, -1)},
    "flipped seal": lambda path: flip(path, NUM_BYTES),
    "cut by one": lambda path: cut(path, SIZE - 1),
    "cut to the entry": lambda path: cut(path, NUM_BYTES),
    "cut in the entry": lambda path: cut(path, NUM_BYTES // 2),
    "empty": lambda path: cut(path, 0),
    "longer": extend,
    "zeroed": lambda path: path.write_bytes(bytes(SIZE)),
}


@pytest.mark.parametrize("damage", DAMAGES)
def test_a_damaged_file_is_broken_and_forgotten(
    engine: Engine, tmp_path: Path, damage: str
) -> None:
    engine.put(CONTENT, notes=NOTES)
    (path,) = object_files(tmp_path)
    assert path.stat().st_size == SIZE
    DAMAGES[damage](path)
    assert engine.get()[0] is Answer.BROKEN
    assert engine.get()[0] is Answer.ABSENT
    assert engine.exist(NAME, *NOTES) == [""] * 4


def test_every_flipped_bit_is_found(tmp_path: Path) -> None:
    engine = Engine(tmp_path)
    content = content_of(2, 64)
    engine.put(content)
    (path,) = object_files(tmp_path)
    whole = path.read_bytes()
    for bit in range(len(whole) * 8):
        data = bytearray(whole)
        data[bit // 8] ^= 1 << bit % 8
        path.write_bytes(data)
        assert engine.get(64)[0] is Answer.BROKEN, bit
    path.write_bytes(whole)
    assert engine.get(64) == (Answer.WHOLE, content)


def test_the_bytes_of_another_object_are_broken(engine: Engine, tmp_path: Path) -> None:
    """A file was renamed, or is of another rank. Its seal fits only its original name and rank."""
    engine.put(CONTENT)
    other = NAME.replace("ab", "cb")
    engine.put(content_of(1), other)
    paths = {path.name: path for path in object_files(tmp_path)}
    shutil.copy(paths[other], paths[NAME])
    assert engine.get()[0] is Answer.BROKEN
    assert engine.get(name=other) == (Answer.WHOLE, content_of(1))


# Other things in the place of a file.


def make_folder(path: Path) -> None:
    path.mkdir()


def make_full_folder(path: Path) -> None:
    path.mkdir()
    (path / "something").write_text("of somebody else")


def make_socket(path: Path) -> None:
    with contextlib.chdir(path.parent), socket.socket(socket.AF_UNIX) as server:
        server.bind(path.name)


OTHER_THINGS: dict[str, Callable[[Path], object]] = {
    "folder": make_folder,
    "full folder": make_full_folder,
    "pipe": os.mkfifo,
    "socket": make_socket,
    "link to nothing": lambda path: path.symlink_to("nothing"),
    "link to itself": lambda path: path.symlink_to(path.name),
    "link to a folder": lambda path: path.symlink_to("/"),
}


@pytest.mark.parametrize("thing", OTHER_THINGS)
@pytest.mark.parametrize("place", ["object", "note"])
def test_something_else_in_a_place_concerns_that_object_only(
    engine: Engine, tmp_path: Path, place: str, thing: str
) -> None:
    """If the tier answered that it is unreachable, no request would use it."""
    other = NAME.replace("ab", "cd")
    engine.put(CONTENT, notes=NOTES)
    engine.put(content_of(1), other, notes=())
    files = object_files(tmp_path) if place == "object" else note_files(tmp_path)
    (path,) = (each for each in files if each.name in (NAME, NOTES[0]))
    path.unlink()
    OTHER_THINGS[thing](path)
    assert engine.exist(NAME, *NOTES[:1]) == ["" if place == "object" else NAME, ""]
    assert engine.tier.touch([f"{engine.namespace}/{NOTES[0]}"]) == [False]
    if place == "object":
        assert engine.get()[0] is Answer.ABSENT
    assert engine.get(name=other) == (Answer.WHOLE, content_of(1))
    assert engine.put(CONTENT, notes=NOTES) is Answer.WHOLE  # The object replaces the other thing.
    assert engine.get() == (Answer.WHOLE, CONTENT)
    assert engine.exist(NAME, *NOTES) == [NAME] * 4
    kept = [each.read_text() for each in tmp_path.rglob("something")]
    assert kept == (["of somebody else"] if thing == "full folder" else [])


def test_a_folder_that_was_moved_aside_is_not_counted(engine: Engine, tmp_path: Path) -> None:
    engine.put(CONTENT)
    (path,) = object_files(tmp_path)
    before = taken_bytes(tmp_path)
    path.with_name(f"{NAME}.aside").mkdir()
    assert taken_bytes(tmp_path) == before


# Notes. To see whether a note is right, a reader does not open the object.


def test_a_note_of_another_object_leads_nowhere(engine: Engine, tmp_path: Path) -> None:
    """Two notes have exchanged their links. Each link is whole, but has the other note's seal."""
    other = NAME.replace("ab", "cd")
    other_note = f"N{'4' * 32}"
    engine.put(CONTENT, notes=NOTES[:1])
    engine.put(content_of(1), other, (other_note,))
    links = {path.name: path for path in note_files(tmp_path)}
    targets = {name: os.readlink(path) for name, path in links.items()}
    for name, wrong in ((NOTES[0], other_note), (other_note, NOTES[0])):
        links[name].unlink()
        links[name].symlink_to(targets[wrong])
    assert engine.exist(NOTES[0], other_note) == ["", ""]
    assert engine.tier.touch([f"{engine.namespace}/{NOTES[0]}"]) == [False]
    engine.put(CONTENT, notes=NOTES[:1])  # A put of the same object repairs the note.
    assert engine.exist(NOTES[0], other_note) == [NAME, ""]


def test_an_object_that_gives_way_before_its_note_is_there_counts_as_put(
    engine: Engine, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Other engines remove links that lead nowhere, even links that are not finished."""
    engine.put(CONTENT, notes=NOTES[:1])
    (path,) = object_files(tmp_path)
    path.unlink()
    symlink = os.symlink

    def removed(target: str, link: str) -> None:
        symlink(target, link)
        if "." in os.path.basename(link):
            os.unlink(link)

    monkeypatch.setattr(os, "symlink", removed)
    assert engine.put(CONTENT, notes=NOTES[:1]) is Answer.WHOLE


@pytest.mark.parametrize("change", ["rank", "name space", "digit", "no seal", "as before"])
def test_a_note_is_whole_and_where_it_was_put(engine: Engine, tmp_path: Path, change: str) -> None:
    engine.put(CONTENT, notes=NOTES[:1])
    other = NAME.replace("ab", "cb")
    engine.put(CONTENT, other)
    (link,) = note_files(tmp_path)
    target = os.readlink(link)
    rank = 0
    namespace = engine.namespace
    if change in ("rank", "name space"):
        rank, namespace = (1, namespace) if change == "rank" else (0, "other")
        engine = Engine(tmp_path, rank=rank)
        engine.namespace = namespace
        engine.put(CONTENT)
        link = Path(engine.tier._path(f"{namespace}/{NOTES[0]}"))
        link.parent.mkdir(parents=True)
    else:
        link.unlink()
        target = {"digit": target.replace("ab", "cb"), "no seal": NAME}.get(change, target)
    link.symlink_to(target)
    assert engine.exist(NOTES[0]) == [NAME if change == "as before" else ""]


# The identities of engines.

IDENTITY = {"dtype": "bf16", "groups": [1, [2, 3]]}
BAD_IDENTITIES: dict[str, bytes | None] = {
    "number": b"5",
    "list": b"[1]",
    "pairs": b"[[1, 2]]",
    "null": b"null",
    "text": b'"a"',
    "nothing": b"",
    "cut": b'{"dtype": "bf',
    "not UTF-8": b'{"dtype": "\xff"}',
    "nested": b"[" * 200_000,
    "nested in an object": b'{"a":' * 200_000,
    "a large number": b'{"a": ' + b"9" * 10_000 + b"}",
    "another's": b'{"dtype": "fp16"}',
    "too large": b'{"dtype": "' + b"a" * (17 << 20) + b'"}',
    "pipe": None,
    "folder": None,
    "socket": None,
}


@pytest.mark.parametrize("kind", BAD_IDENTITIES)
def test_an_engine_file_that_says_nothing_stops_nobody(
    engine: Engine, tmp_path: Path, kind: str, caplog: pytest.LogCaptureFixture, monkeypatch: Any
) -> None:
    monkeypatch.setattr(logging.getLogger("vllm"), "propagate", True)
    good = {"dtype": "bf16"}
    for identity in (IDENTITY, good):
        engine.tier.introduce(namespace_of(identity), identity)
    path = tmp_path / "kvext4" / namespace_of(IDENTITY) / "engine.json"
    path.unlink()
    content = BAD_IDENTITIES[kind]
    if content is None:
        OTHER_THINGS[kind](path)
    else:
        path.write_bytes(content)
    found: list[object] = []
    thread = threading.Thread(target=lambda: found.append(engine.tier.engines()), daemon=True)
    thread.start()
    thread.join(20)
    assert found == [{namespace_of(good): good}]
    assert str(path) in caplog.text and "Delete it" in caplog.text
    caplog.clear()
    engine.tier.introduce(namespace_of(IDENTITY), IDENTITY)  # An engine of this identity starts.
    assert engine.tier.engines() == {namespace_of(each): each for each in (IDENTITY, good)}
    assert not [each for each in caplog.messages if "expected in" in each]


# A folder that does not work.


def test_a_folder_that_is_removed_is_made_again(engine: Engine, tmp_path: Path) -> None:
    engine.put(CONTENT, notes=NOTES)
    shutil.rmtree(tmp_path / "kvext4")
    assert engine.get()[0] is Answer.ABSENT
    assert engine.exist(NAME, *NOTES) == [""] * 4
    assert engine.put(CONTENT, notes=NOTES) is Answer.WHOLE
    assert engine.get() == (Answer.WHOLE, CONTENT)


@pytest.mark.parametrize("call", ["open", "write", "replace", "symlink", "readv", "mkdir"])
@pytest.mark.parametrize("number", [errno.ENOSPC, errno.EACCES, errno.EIO, errno.ESTALE])
def test_errors_of_the_system_are_answers(
    engine: Engine, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, call: str, number: int
) -> None:
    """After an error, no unfinished file takes room."""
    other = NAME.replace("ab", "cd")
    engine.put(CONTENT, other)

    def fail(*arguments: object, **named: object) -> None:
        raise OSError(number, os.strerror(number))

    monkeypatch.setattr(os, call, fail)
    if call == "readv":
        assert engine.get(name=other)[0] is Answer.UNREACHABLE
    else:
        assert engine.put(CONTENT, notes=NOTES) is Answer.UNREACHABLE
    monkeypatch.undo()
    assert [path.name for path in object_files(tmp_path) if "." in path.name] == []
    assert engine.get(name=other) == (Answer.WHOLE, CONTENT)
    assert engine.put(CONTENT, notes=NOTES) is Answer.WHOLE
    assert engine.get() == (Answer.WHOLE, CONTENT)
    assert engine.exist(*NOTES) == [NAME] * 3


def test_a_write_that_stops_half_way_leaves_nothing(
    engine: Engine, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write = os.write
    calls = []

    def short_write(file: int, data: Any) -> int:
        calls.append(len(data))
        if len(calls) > 3:
            raise OSError(errno.ENOSPC, "full")
        return write(file, data[:100])

    monkeypatch.setattr(os, "write", short_write)
    assert engine.put(CONTENT) is Answer.UNREACHABLE
    assert object_files(tmp_path) == []
    monkeypatch.setattr(os, "write", lambda file, data: write(file, data[:100]))
    assert engine.put(CONTENT) is Answer.WHOLE
    monkeypatch.undo()
    assert engine.get() == (Answer.WHOLE, CONTENT)


def test_what_is_not_a_folder_of_ones_own_is_refused(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    for path in (tmp_path / "file", tmp_path / "a" / "b"):
        with pytest.raises(SettingsError, match="leave shared_tier out"):
            Engine(path)
    shared = tmp_path / "shared"
    (shared / "kvext4").mkdir(parents=True)
    (shared / "kvext4").chmod(0o777)
    with pytest.raises(SettingsError, match="found mode 777"):
        Engine(shared)
    (shared / "kvext4").chmod(0o700)
    shared.chmod(0o777)
    with pytest.raises(SettingsError, match="in a folder of mode 0777"):
        Engine(shared)  # Other users could replace the folder.
    shared.chmod(0o1777)
    Engine(shared)
    with (
        mock.patch.object(os, "geteuid", lambda: os.getuid() + 1),
        pytest.raises(SettingsError, match=f"owner {os.getuid()}"),
    ):
        Engine(shared)


def test_a_look_at_its_status_removes_nothing(tmp_path: Path) -> None:
    """The command does not know the tier's capacity. Here it is 7/8 of the file system."""
    small = mock.Mock(f_blocks=8, f_frsize=1 << 20, f_bavail=4)
    with mock.patch.object(os, "statvfs", lambda path: small):
        tier = FilesTier(f"file://{tmp_path}", 7 << 20, 0)
        tier.register(memoryview(bytearray(1 << 16)))
        for number in range(96):
            tier.put(SharedObject(number, f"space/R0-16-{number:032x}", 0, 1 << 16))
        before = sorted(files_below(tier.root))
        assert describe(f"file://{tmp_path}")[0]
        assert sorted(files_below(tier.root)) == before


def test_a_slash_at_the_end_does_not_matter(tmp_path: Path) -> None:
    with pytest.raises(SettingsError, match="No such file"):
        FilesTier(f"file://{tmp_path}/a/b/", None, 0)
    assert FilesTier(f"file://{tmp_path}/a/", None, 0).root == f"{tmp_path}/a/kvext4"


@pytest.mark.parametrize("url", ["", "/tmp", "file:", "file://host/path", "http://a/b", "file://"])
def test_other_urls_are_refused(url: str) -> None:
    with pytest.raises(SettingsError, match="expected file:///path"):
        FilesTier(url, None, 0)


# Capacity.


def test_what_was_used_longest_ago_gives_way(tmp_path: Path) -> None:
    size = 64 << 10
    engine = Engine(tmp_path, capacity_bytes=32 * size)
    names = [f"R0-64-{number:032x}" for number in range(60)]
    for number, name in enumerate(names):
        assert engine.put(content_of(number, size), name, (f"N{number:032x}",)) is Answer.WHOLE
        (path,) = tmp_path.glob(f"kvext4/*/*/objects/*/{name}")
        os.utime(path, (number, number))
        if number >= 3:  # Object 3 is used again after each put.
            (path,) = tmp_path.glob(f"kvext4/*/*/objects/*/{names[3]}")
            os.utime(path, (number, number))
        assert taken_bytes(tmp_path) <= 32 * size
    there = [name for name in names if engine.exist(name) != [""]]
    assert there == [names[3], *names[-len(there) + 1 :]] and len(there) > 20
    assert len(there) <= len(note_files(tmp_path)) < len(names)
    assert engine.get(size, names[3]) == (Answer.WHOLE, content_of(3, size))


def test_a_get_counts_as_use(engine: Engine, tmp_path: Path) -> None:
    engine.put(CONTENT)
    (path,) = object_files(tmp_path)
    os.utime(path, (1, 1))
    engine.get()
    assert path.stat().st_mtime > 1


def test_a_touch_counts_as_use(engine: Engine, tmp_path: Path) -> None:
    """A touch of an object counts for the object. So does a touch of a note that leads to it."""
    other = NAME.replace("ab", "cd")
    engine.put(CONTENT, notes=NOTES)
    engine.put(CONTENT, other)
    paths = {path.name: path for path in object_files(tmp_path)}
    full = [f"{engine.namespace}/{each}" for each in (NAME, NOTES[1], other, f"N{'5' * 32}")]
    for touched, name in ((full[:1], NAME), (full[1:2], NAME), (full[2:3], other)):
        for path in paths.values():
            os.utime(path, (1, 1))
        assert engine.tier.touch(touched) == [True]
        renewed = {each for each, path in paths.items() if path.stat().st_mtime > 1}
        assert renewed == {name}
    paths[NAME].unlink()
    assert engine.tier.touch(full) == [False, False, True, False]


def test_a_put_of_what_is_there_counts_as_use(engine: Engine, tmp_path: Path) -> None:
    engine.put(CONTENT)
    (path,) = object_files(tmp_path)
    os.utime(path, (1, 1))
    assert engine.put(CONTENT) is Answer.WHOLE and path.stat().st_mtime > 1


@pytest.mark.parametrize("number", [errno.EIO, errno.ESTALE, errno.EACCES])
def test_a_touch_says_when_the_folder_does_not_work(
    engine: Engine, monkeypatch: pytest.MonkeyPatch, number: int
) -> None:
    engine.put(CONTENT)

    def fail(*arguments: object) -> None:
        raise OSError(number, os.strerror(number))

    monkeypatch.setattr(os, "utime", fail)
    assert engine.tier.touch([f"{engine.namespace}/{NAME}"]) is None


def test_what_does_not_fit_is_not_put(tmp_path: Path) -> None:
    assert Engine(tmp_path, capacity_bytes=NUM_BYTES).put(CONTENT) is Answer.UNREACHABLE
    assert object_files(tmp_path) == []


def test_engines_evict_at_once_and_keep_the_capacity(tmp_path: Path) -> None:
    """While several engines remove objects, no put or get brings wrong bytes."""
    size = 16 << 10
    capacity_bytes = 40 * (20 << 10)
    wrong: list[object] = []

    def work(seed: int) -> None:
        engine = Engine(tmp_path, capacity_bytes)
        rng = random.Random(seed)
        for _ in range(150):
            number = rng.randrange(120)
            name = f"R0-64-{number:032x}"
            answer, content = engine.get(size, name)
            if answer is Answer.WHOLE:
                if content != content_of(number, size):
                    wrong.append(name)
            elif answer is Answer.ABSENT:
                if engine.put(content_of(number, size), name, (f"N{number:032x}",)) is not (
                    Answer.WHOLE
                ):
                    wrong.append("not put")
            else:
                wrong.append(answer)

    threads = [threading.Thread(target=work, args=(seed,)) for seed in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert wrong == []
    assert taken_bytes(tmp_path) <= capacity_bytes


# Writers that are killed.

WRITER = """
import sys
from vllm_ascend_kvext.shared_tier.files import FilesTier
from vllm_ascend_kvext.shared_tier.backend import SharedObject
tier = FilesTier(f"file://{sys.argv[1]}", 1 << 30, 0)
memory = bytearray(b"x" * (64 << 20))
tier.register(memoryview(memory))
print("ready", flush=True)
for number in range(100):
    name = f"engine/R0-64-{number:032x}"
    tier.put(SharedObject(0, name, 0, 64 << 20, (f"N{number:032x}",)))
"""


def test_a_writer_that_is_killed_leaves_nothing_half(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    unfinished: list[Path] = []
    for delay_s in (0.01, 0.02, 0.03, 0.05):
        writer = subprocess.Popen(
            [sys.executable, "-c", WRITER, str(tmp_path)], stdout=subprocess.PIPE, cwd=tmp_path
        )
        assert writer.stdout is not None and writer.stdout.readline() == b"ready\n"
        threading.Event().wait(delay_s)
        writer.send_signal(signal.SIGKILL)
        writer.wait()
        writer.stdout.close()
        engine = Engine(tmp_path)
        engine.memory = bytearray(64 << 20)
        engine.tier.register(memoryview(engine.memory))
        for path in object_files(tmp_path):
            if "." in path.name:
                unfinished.append(path)
            else:
                what = SharedObject(0, f"engine/{path.name}", 0, 64 << 20)
                assert engine.tier.get_into(what, lambda num_bytes: None) is Answer.WHOLE
                engine.forget(path.name)
    assert unfinished
    # The files stay for now, because their writer may be alive but slow.
    engine.put(CONTENT)
    assert [path for path in unfinished if path.exists()]
    for path in unfinished:
        if path.exists():
            os.utime(path, (1, 1))
    Engine(tmp_path).put(CONTENT, NAME.replace("ab", "cd"))
    assert not [path for path in unfinished if path.exists()]


# Comparison with a dict.


class FilesAgainstDict(RuleBasedStateMachine):
    """Two engines on one folder behave like a dict. Both put, forget and damage objects."""

    names = st.integers(0, 5).map(lambda number: f"R0-64-{number:032x}")

    @initialize()
    def start(self) -> None:
        self.folder = Path(tempfile.mkdtemp(prefix="kvext-tier-"))
        self.engines = [Engine(self.folder), Engine(self.folder)]
        self.objects: dict[str, bytes | None] = {}  # None if damaged.

    def teardown(self) -> None:
        if hasattr(self, "folder"):
            shutil.rmtree(self.folder)

    @rule(name=names, seed=st.integers(0, 3), by=st.integers(0, 1))
    def put(self, name: str, seed: int, by: int) -> None:
        content = content_of(seed, 256)
        assert self.engines[by].put(content, name, ("N" + name[-32:],)) is Answer.WHOLE
        self.objects.setdefault(name, content)

    @rule(name=names, by=st.integers(0, 1))
    def get(self, name: str, by: int) -> None:
        answer, content = self.engines[by].get(256, name)
        if name not in self.objects:
            assert answer is Answer.ABSENT
        elif self.objects[name] is None:
            assert answer is Answer.BROKEN
            del self.objects[name]
        else:
            assert (answer, content) == (Answer.WHOLE, self.objects[name])

    @rule(name=names, by=st.integers(0, 1))
    def forget(self, name: str, by: int) -> None:
        self.engines[by].forget(name)
        self.objects.pop(name, None)

    @rule(name=names, at=st.integers(0, 255), by=st.integers(1, 255))
    def damage(self, name: str, at: int, by: int) -> None:
        if self.objects.get(name) is None:
            return
        (path,) = self.folder.glob(f"kvext4/*/*/objects/*/{name}")
        data = bytearray(path.read_bytes())
        data[at] ^= by
        path.write_bytes(data)
        self.objects[name] = None

    @rule(by=st.integers(0, 1))
    def exist(self, by: int) -> None:
        names = [f"R0-64-{number:032x}" for number in range(6)]
        there = [name if name in self.objects else "" for name in names]
        assert self.engines[by].exist(*names) == there
        assert self.engines[by].exist(*("N" + name[-32:] for name in names)) == there


FilesAgainstDict.TestCase.settings = settings(max_examples=30, deadline=None)
TestFilesAgainstDict = FilesAgainstDict.TestCase


@pytest.fixture(autouse=True)
def _no_threads_left() -> Iterator[None]:
    before = threading.active_count()
    yield
    assert threading.active_count() <= before
