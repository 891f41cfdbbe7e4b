# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vllm-ascend-kvext project
"""The interface of a shared tier, the same for all backends.

An object is the bytes of one entry of host memory. Objects never change: a put of a name that
exists does nothing. *Notes* are further names that lead to an object, one for each boundary within
its rows. Two prompts may differ from the middle of a chunk on. With notes, the later prompt still
finds the rows that both share.
"""

from __future__ import annotations

import abc
import atexit
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

_QUIET_S = 10.0
"""After the tier has logged an error, it logs no other error for this time."""

MAX_HANG_S = 5.0
"""A call that takes longer counts as hanging. The tier does not wait for its end."""

MAX_LEFT_BEHIND = 16
"""The most hanging threads that are left behind at the same time."""

_MAX_END_S = 2.0
"""The end of a process waits for running calls no longer than this."""


def seal_with(checksum: xxh3_128, name: str, num_bytes: int) -> bytes:
    """The seal of a content whose checksum was computed before, perhaps block by block."""
    checksum.update(f"{name} {num_bytes} {FORMAT_VERSION}".encode())
    return bytes(checksum.digest())


def seal_of(name: str, content: memoryview | bytes) -> bytes:
    """The seal that is stored behind a content: the XXH3 hash of the content and its name.

    A seal shows damage. It is no protection against forgery, because any program can compute it.
    """
    return seal_with(xxh3_128(content), name, len(content))


def is_sealed(name: str, value: memoryview | bytes) -> bool:
    """Whether some bytes end with the seal of the bytes before the seal."""
    return value[-SEAL_BYTES:] == seal_of(name, value[:-SEAL_BYTES])


class Answer(enum.Enum):
    """The result of a call for one object."""

    WHOLE = "whole"
    """The tier has the object; a get has delivered and verified it."""

    ABSENT = "absent"
    """The tier does not have the object."""

    BROKEN = "broken"
    """The object's bytes, length or name differ from what was put. The object is removed."""

    UNREACHABLE = "unreachable"
    """The tier does not work, or has no room."""


class SharedObject(NamedTuple):
    """One object, and the place of its bytes in the registered memory.

    Attributes:
        number: The number of the job, unique in the engine.
        name: The name of the name space, a slash, and the name of the piece: see ``names``.
        offset_bytes: Where its bytes begin in the registered memory.
        num_bytes: The size of the object. Some backends need room for a seal behind the object.
        notes: For puts: the names of its notes, without the name space.
    """

    number: int
    name: str
    offset_bytes: int
    num_bytes: int
    notes: tuple[str, ...] = ()


class UsedObjects(NamedTuple):
    """Objects of the tier that requests have used in the engine's own memory.

    Attributes:
        number: The number of the job, unique in the engine.
        names: Names of objects, or of notes that lead to them, each as in `SharedObject`.
    """

    number: int
    names: tuple[str, ...]


class SharedTier(abc.ABC):
    """A tier, as one rank of an engine uses it. Threads may share it.

    A call may take any time, and raises nothing. The engine makes calls in threads for which it
    does not wait.

    Attributes:
        num_get_threads: How many calls of ``get_into`` should run at the same time.
    """

    num_get_threads = 1

    def __init__(self, url: str) -> None:
        self._url = url
        self._logged_s = -math.inf
        self._memory = memoryview(b"")

    def register(self, memory: memoryview) -> None:
        """Set the memory that objects are read from and written to. dtype: uint8. Called once."""
        self._memory = memory

    @abc.abstractmethod
    def exist(self, names: Sequence[str]) -> list[str]:
        """For each object or note, the name of the object without the name space; empty if none.

        The answer is no promise: the object may be gone or broken when it is wanted.
        """

    def put(self, what: SharedObject) -> Answer:
        """Store an object. After any answer but WHOLE, no engine can get any of its bytes."""
        try:
            self._put(what)
        except OSError as error:
            return self._unreachable(error)
        return Answer.WHOLE

    def get_into(self, what: SharedObject, on_bytes: Callable[[int], None]) -> Answer:
        """Read an object into its place.

        After any answer but WHOLE, the content of the place is undefined.

        Args:
            what: The object.
            on_bytes: Called each time that bytes have arrived, with their number.
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
        """Mark objects, and the objects that notes lead to, as used, so that they stay longer.

        Returns:
            For each name, whether the object exists; None if the tier does not work.
        """
        try:
            return self._touch(names)
        except OSError as error:
            self._unreachable(error)
            return None

    @abc.abstractmethod
    def _touch(self, names: Sequence[str]) -> list[bool]:
        """As `touch`. This method and the next two raise OSError if the tier does not work."""

    @abc.abstractmethod
    def _put(self, what: SharedObject) -> None:
        """As `put`."""

    @abc.abstractmethod
    def _get(self, what: SharedObject, on_bytes: Callable[[int], None]) -> Answer:
        """As `get_into`."""

    def _unreachable(self, error: OSError) -> Answer:
        """Log an error, unless another error was logged shortly before."""
        if time.monotonic() - self._logged_s > _QUIET_S:
            self._logged_s = time.monotonic()
            logger.warning("Shared tier %s: %s. What is lacking is computed.", self._url, error)
        return Answer.UNREACHABLE

    @abc.abstractmethod
    def forget(self, name: str) -> None:
        """Remove an object, if it is there."""

    @abc.abstractmethod
    def engines(self) -> dict[str, Mapping[str, Any]]:
        """The identities of the engines that were introduced, by name space, as far as known.

        `engines` and `introduce` may be called while an engine starts.
        """

    @abc.abstractmethod
    def introduce(self, namespace: str, identity: Mapping[str, Any]) -> None:
        """Tell other engines what a name space stands for. Only messages to people use it."""

    @abc.abstractmethod
    def describe(self) -> tuple[str, Mapping[str, str]]:
        """Describe the tier for people.

        Returns:
            How full the tier is, and what it holds of each name space, the largest first.
        """

    def close(self) -> None:
        """Release the tier. No method is called any more."""
        self._memory = memoryview(b"")


class TierThread:
    """Makes calls of a tier in daemon threads. A call may hang, and nothing waits for its end.

    Calls begin in the order in which they were submitted. A thread whose call hangs can be left
    behind: another thread takes its place, and the hanging thread ends with its call.

    The end of the process waits for running calls, but not for long. CPython ends a thread that
    asks for the interpreter's lock after that. If the thread is in compiled code, the whole process
    aborts.

    Args:
        name: The name of the threads.
        num_threads: The number of threads.
    """

    def __init__(self, name: str, num_threads: int = 1) -> None:
        self._name = name
        self._calls: queue.SimpleQueue[Call | None] = queue.SimpleQueue()
        self._changed = threading.Lock()  # Guards the rest.
        # When each running call began. Threads that were left behind are not in it.
        self._began_s: dict[threading.Thread, float] = {}
        self._left_behind: set[threading.Thread] = set()
        self._threads: set[threading.Thread] = set()
        self._ends_with_process = False
        for _ in range(num_threads):
            self._start()

    def submit(self, call: Call) -> None:
        """Make a call in one of the threads, at a later time."""
        self._calls.put(call)

    def busy_s(self) -> float:
        """The age of the oldest running call. Threads that were left behind do not count."""
        with self._changed:
            began_s = min(self._began_s.values(), default=math.inf)
        return max(0.0, time.monotonic() - began_s)

    def leave_behind(self, before: Callable[[int], object] = lambda _: None) -> None:
        """Leave threads behind whose call hangs, at most `MAX_LEFT_BEHIND` at the same time.

        If all threads hang and no more can be left behind, further calls wait until a call ends.

        Args:
            before: Called with the number of threads, before new threads take their places.
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
        """Whether a call of a thread that was left behind still runs."""
        with self._changed:
            return bool(self._left_behind)

    def is_left_behind(self) -> bool:
        """Whether the calling thread is one that was left behind."""
        with self._changed:
            return threading.current_thread() in self._left_behind

    def close(self) -> None:
        """End the threads after all submitted calls. The method does not wait for them."""
        self._calls.put(None)

    def _end_with_process(self) -> None:
        """Begin no further call, and wait for the running ones, unless they hang."""
        self._ends_with_process = True
        self.close()
        last_s = time.monotonic() + _MAX_END_S
        with self._changed:
            threads = self._threads - self._left_behind
        for thread in threads:
            thread.join(max(0.0, last_s - time.monotonic()))

    def _start(self) -> None:
        thread = threading.Thread(target=self._serve, name=self._name, daemon=True)
        with self._changed:
            if not self._threads:
                atexit.register(self._end_with_process)
            self._threads.add(thread)
        thread.start()

    def _serve(self) -> None:
        thread = threading.current_thread()
        try:
            self._serve_calls(thread)
        finally:
            with self._changed:
                self._threads.remove(thread)
                if not self._threads:
                    atexit.unregister(self._end_with_process)

    def _serve_calls(self, thread: threading.Thread) -> None:
        while (call := self._calls.get()) is not None and not self._ends_with_process:
            with self._changed:
                self._began_s[thread] = time.monotonic()
            try:
                call()
            except Exception:
                logger.exception("A call of the shared tier failed")
            with self._changed:
                self._began_s.pop(thread, None)
                if thread in self._left_behind:
                    self._left_behind.remove(thread)
                    return
        self._calls.put(None)  # The next thread ends, too.
