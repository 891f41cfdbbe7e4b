# SPDX-License-Identifier: Apache-2.0
"""What a shared tier is asked, and what it answers, whoever keeps its objects.

An object is the bytes of one entry of host memory. Nobody changes one: who puts a name that is
there has nothing to do. *Notes* are further names that lead to it, one for each boundary within its
rows: by them a prompt that parts from another in the middle of a chunk finds what they share.
"""

from __future__ import annotations

import abc
import enum
import logging
import math
import queue
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

from xxhash import xxh3_128

from vllm_ascend_kvext.shared_tier.names import FORMAT_VERSION

logger = logging.getLogger("vllm.ascend_kvext.shared_tier")

Call = Callable[[], object]
SEAL_BYTES = 16
_QUIET_S = 10.0  # After an error was logged, others are not for so long.
MAX_HANG_S = 5.0  # A call that takes longer hangs: nobody waits for its end.
MAX_LEFT_BEHIND = 16  # So many threads at most hang beside those that go on.


def seal_with(checksum: xxh3_128, name: str, num_bytes: int) -> bytes:
    """As `seal_of`, of a content whose checksum has been taken, perhaps block by block."""
    checksum.update(f"{name} {num_bytes} {FORMAT_VERSION}".encode())
    return bytes(checksum.digest())


def seal_of(name: str, content: memoryview | bytes) -> bytes:
    """What is kept behind a content: XXH3 of it and its name. Shows damage; anybody can make it."""
    return seal_with(xxh3_128(content), name, len(content))


def is_sealed(name: str, value: memoryview | bytes) -> bool:
    """Whether bytes end with the seal of those before it."""
    return value[-SEAL_BYTES:] == seal_of(name, value[:-SEAL_BYTES])


class Answer(enum.Enum):
    """What has become of one object."""

    WHOLE = "whole"  # Got and verified; or it is there.
    ABSENT = "absent"
    BROKEN = "broken"  # Bytes, length or name are not those that were put. It is forgotten.
    UNREACHABLE = "unreachable"  # The tier does not work, or has no room.


class SharedObject(NamedTuple):
    """One object, and where in the registered memory its bytes are, or are to be.

    Attributes:
        number: Of the job, unique in the engine.
        name: That of the name space, a slash, and that of the piece: see ``names``.
        num_bytes: Behind them a seal has its place where the backend wants one.
        notes: Names without that of the name space; for puts.
    """

    number: int
    name: str
    offset_bytes: int
    num_bytes: int
    notes: tuple[str, ...] = ()


class UsedObjects(NamedTuple):
    """Objects, or notes that lead to them, that requests have used where they were already.

    Attributes:
        number: Of the job, unique in the engine.
        names: As that of a `SharedObject`.
    """

    number: int
    names: tuple[str, ...]


class SharedTier(abc.ABC):
    """A tier, as one rank of an engine uses it. Threads may share it.

    Calls take as long as they take, and raise nothing: threads make them for which nobody waits.

    Attributes:
        num_get_threads: How many calls of ``get_into`` at once are faster than one.
    """

    num_get_threads = 1

    def __init__(self, url: str) -> None:
        self._url = url
        self._logged_s = -math.inf
        self._memory = memoryview(b"")

    def register(self, memory: memoryview) -> None:
        """Objects are read from, and written to, this memory; dtype: uint8. Called once."""
        self._memory = memory

    @abc.abstractmethod
    def exist(self, names: Sequence[str]) -> list[str]:
        """For each object or note, the name of the object without that of the name space.

        Empty if there is none. No proof: it may be gone, or broken, when it is wanted.
        """

    def put(self, what: SharedObject) -> Answer:
        """Store an object. After anything but WHOLE, nobody can get any of its bytes."""
        try:
            self._put(what)
        except OSError as error:
            return self._unreachable(error)
        return Answer.WHOLE

    def get_into(self, what: SharedObject, on_bytes: Callable[[int], None]) -> Answer:
        """Bring an object; ``on_bytes`` is told of bytes as they come.

        After anything but WHOLE, its place holds anything.
        """
        try:
            answer = self._get(what, on_bytes)
        except OSError as error:
            return self._unreachable(error)
        if answer is Answer.BROKEN:
            self.forget(what.name)
            logger.warning("Shared tier %s: %s is broken, and is removed.", self._url, what.name)
        return answer

    def touch(self, names: Sequence[str]) -> list[bool] | None:
        """Objects, or those that notes lead to, are used: others are to give way before them.

        Returns:
            For each, whether it is there; None if the tier does not work.
        """
        try:
            return self._touch(names)
        except OSError as error:
            self._unreachable(error)
            return None

    @abc.abstractmethod
    def _touch(self, names: Sequence[str]) -> list[bool]:
        """As `touch`; raises OSError, as the next ones."""

    @abc.abstractmethod
    def _put(self, what: SharedObject) -> None:
        """As `put`."""

    @abc.abstractmethod
    def _get(self, what: SharedObject, on_bytes: Callable[[int], None]) -> Answer:
        """As `get_into`."""

    def _unreachable(self, error: OSError) -> Answer:
        """Of what comes often, not all is logged."""
        if time.monotonic() - self._logged_s > _QUIET_S:
            self._logged_s = time.monotonic()
            logger.warning("Shared tier %s: %s. What is lacking is computed.", self._url, error)
        return Answer.UNREACHABLE

    @abc.abstractmethod
    def forget(self, name: str) -> None:
        """Remove an object, if it is there."""

    @abc.abstractmethod
    def engines(self) -> dict[str, Mapping[str, Any]]:
        """The identities of engines that were introduced, as far as they are known; by name space.

        This one and the next may be called while an engine starts.
        """

    @abc.abstractmethod
    def introduce(self, namespace: str, identity: Mapping[str, Any]) -> None:
        """Say to others what a name space stands for: for people, nothing depends on it."""

    @abc.abstractmethod
    def describe(self) -> tuple[str, Mapping[str, str]]:
        """How full it is, and what is held of each name space, the largest first; for people."""

    def close(self) -> None:
        """Nothing is called any more."""
        self._memory = memoryview(b"")


class TierThread:
    """Makes calls of a tier, which may hang: nothing waits for their end.

    It begins them one after the other, in daemon threads; ``on_start`` is the first of each. A
    thread whose call hangs can be left behind: another takes its place, and it ends with its call.
    """

    def __init__(self, name: str, on_start: Call = lambda: None, num_threads: int = 1) -> None:
        self._name = name
        self._on_start = on_start
        self._calls: queue.SimpleQueue[Call | None] = queue.SimpleQueue()
        self._changed = threading.Lock()  # Guards the rest.
        self._began_s: dict[threading.Thread, float] = {}  # Of calls; without those left behind.
        self._left_behind: set[threading.Thread] = set()
        for _ in range(num_threads):
            self._start()

    def submit(self, call: Call) -> None:
        """Make a call some time later."""
        self._calls.put(call)

    def busy_s(self) -> float:
        """For how long the longest call has been made, those left behind not counted."""
        with self._changed:
            began_s = min(self._began_s.values(), default=math.inf)
        return max(0.0, time.monotonic() - began_s)

    def leave_behind(self, before: Callable[[int], object] = lambda _: None) -> None:
        """Leave threads behind whose call hangs.

        There are only so many. If all of these hang, further calls wait until one ends.

        Args:
            before: Told of their number before others go on.
        """
        before_s = time.monotonic() - MAX_HANG_S
        with self._changed:
            hanging = [each for each, began_s in self._began_s.items() if began_s < before_s]
            hanging = hanging[: MAX_LEFT_BEHIND - len(self._left_behind)]
            self._left_behind.update(hanging)
            for thread in hanging:
                del self._began_s[thread]
        if hanging:
            before(len(hanging))
        for _ in hanging:
            self._start()

    @property
    def has_left_behind(self) -> bool:
        """Whether a thread that was left behind is still at its call."""
        with self._changed:
            return bool(self._left_behind)

    def is_left_behind(self) -> bool:
        """Whether the thread that asks was left behind."""
        with self._changed:
            return threading.current_thread() in self._left_behind

    def close(self) -> None:
        """End the threads behind what was submitted; does not wait for them."""
        self._calls.put(None)

    def _start(self) -> None:
        threading.Thread(target=self._serve, name=self._name, daemon=True).start()

    def _serve(self) -> None:
        thread = threading.current_thread()
        call = self._on_start
        while True:
            try:
                call()
            except Exception:
                logger.exception("A call of the shared tier failed")
            with self._changed:
                self._began_s.pop(thread, None)
                if thread in self._left_behind:
                    self._left_behind.remove(thread)
                    return
            next_call = self._calls.get()
            if next_call is None:
                break
            call = next_call
            with self._changed:
                self._began_s[thread] = time.monotonic()
        self._calls.put(None)  # For the next thread.
