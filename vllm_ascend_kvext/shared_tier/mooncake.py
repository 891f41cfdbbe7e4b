# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vllm-ascend-kvext project
"""A shared tier in Mooncake Store. A master knows where objects are; `mooncake_client`s hold them.

    kvext3/r0/<name space>/<object>    an entry of rank 0, moved with its seal and without a copy
    kvext3/r0/<name space>/<note>      the name of an object, sealed
    kvext3/engine-<number>             what engines of a name space have in common, sealed

If an object is put twice, the first put stays. Mooncake evicts the objects that were asked for
longest ago. The question whether an object exists counts as use.
"""

from __future__ import annotations

import contextlib
import ctypes
import json
import os
import socket
import threading
import time
from collections.abc import Callable, Container, Mapping, Sequence
from typing import Any

from vllm_ascend_kvext.errors import DOCS_URL, SettingsError
from vllm_ascend_kvext.shared_tier.backend import (
    SEAL_BYTES,
    Answer,
    SharedObject,
    SharedTier,
    is_sealed,
    logger,
    seal_of,
)
from vllm_ascend_kvext.shared_tier.names import (
    FORMAT_VERSION,
    is_note,
    is_rows_name,
    parse_identity,
    piece_of,
)

_ROOT = f"kvext{FORMAT_VERSION}"
_NUM_ENGINES = 1024

_VARIABLES = {
    "MC_STORE_CLIENT_SETUP_RETRIES": "1",
    "MC_RPC_TIMEOUT_MS": "2000",
    "MC_TCP_STATUS_TIMEOUT_SEC": "5",
}
"""Settings of Mooncake. By default, Mooncake looks for a master for 90 s, and waits 30 s for a
server that hangs."""

_CONNECT_S = 2.0
"""The longest time to connect to the master."""

_BUFFER_BYTES = 16 << 20
"""The size of Mooncake's own buffer for small objects."""

_ABSENT = {-703, -704, -707}
"""Error codes of objects that are being written, do not exist, or were evicted meanwhile."""

_OF_GETS = {*_ABSENT, -600}
"""Usual error codes of gets. -600: the object is larger than its place."""

_OF_PUTS = {-601}
"""Usual error codes of puts. -601: another engine writes the object."""

_MEANINGS = {
    -200: "there is no room",
    -800: "the server with the memory does not answer",
    -900: "the master does not answer",
    -901: "the master does not answer",
}
"""The meanings of the error codes of a tier that does not work."""

_GIVEN_UP_S = 50.0
"""If a get takes longer, Mooncake may have given it up. Mooncake gives up a transfer after 60 s,
but does not stop it."""


class MooncakeTier(SharedTier):
    """The objects of one rank; see `SharedTier`. The engine lends Mooncake no memory.

    Args:
        url: ``mooncake://host:port`` of a master.

    Raises:
        SettingsError: If there is no master, or Mooncake's package is not installed.
    """

    def __init__(self, url: str, rank: int) -> None:
        super().__init__(url)
        self._prefix = f"{_ROOT}/r{rank}/"
        for name, value in _VARIABLES.items():
            os.environ.setdefault(name, value)
        protocol = os.environ.get("MOONCAKE_PROTOCOL", "tcp")
        network = (protocol, os.environ.get("MOONCAKE_DEVICE", ""))
        master = url.removeprefix("mooncake://")
        host, _, port = master.rpartition(":")
        try:
            from mooncake import store

            with socket.create_connection((host, int(port)), _CONNECT_S) as connection:
                own = connection.getsockname()[0]
            self._store: Any = store.MooncakeDistributedStore()
            code = self._store.setup(own, "P2PHANDSHAKE", 0, _BUFFER_BYTES, *network, master)
            if code:
                raise OSError(f"code {code} of its setup with {network}")
        except (ImportError, OSError, OverflowError) as error:
            raise SettingsError(
                f"shared_tier: expected Mooncake's package, and a mooncake_master at {url}, found: "
                f"{error}. pip install mooncake-transfer-engine-npu (or -non-cuda, without NPUs), "
                f"and start the master, see {DOCS_URL}shared_tier.md; or leave shared_tier out."
            ) from error
        self._pinned = store.ReplicateConfig()
        self._pinned.with_hard_pin = True

    def register(self, memory: memoryview) -> None:
        super().register(memory)
        self._address = ctypes.addressof(ctypes.c_char.from_buffer(memory))
        code = self._store.register_buffer(self._address, len(memory))
        if code:
            raise SettingsError(
                f"shared_tier: expected that Mooncake registers {len(memory)} bytes of memory, "
                f"found code {code}. Mind the limit of locked memory (ulimit -l)."
            )

    def close(self) -> None:
        # A call of a closed store would end the process, so no call can reach the store any more.
        store = self._store
        self._store = None
        if store is not None:
            store.close()

    def exist(self, names: Sequence[str]) -> list[str]:
        try:
            return self._existing(names)
        except OSError as error:
            self._unreachable(error)
            return [""] * len(names)

    def _touch(self, names: Sequence[str]) -> list[bool]:
        return [bool(each) for each in self._existing(names)]

    def _existing(self, names: Sequence[str]) -> list[str]:
        notes = [name for name in names if is_note(name)]
        contents = self._read([self._prefix + note for note in notes])
        leads = {note: _lead(content) for note, content in zip(notes, contents, strict=True)}
        objects = [leads.get(name, name) for name in names]
        existing = self._there([self._prefix + name for name in objects if name])
        return [
            name.rpartition("/")[2] if self._prefix + name in existing else "" for name in objects
        ]

    def _put(self, what: SharedObject) -> None:
        key, place, address = self._place(what)
        if not self._there([key]):
            place[what.num_bytes :] = seal_of(key, place[: what.num_bytes])
            _checked(self._store.batch_put_from([key], [address], [len(place)]), _OF_PUTS)
        namespace, _, own = what.name.rpartition("/")
        notes = [f"{namespace}/{note}" for note in what.notes]
        first = piece_of(own).first_tokens
        leads = zip(notes, self.exist(notes), strict=True)
        late_notes = [
            note for note, lead in leads if not lead or piece_of(lead).first_tokens > first
        ]
        self._write({self._prefix + note: what.name.encode() for note in late_notes})

    def _get(self, what: SharedObject, on_bytes: Callable[[int], None]) -> Answer:
        key, place, address = self._place(what)
        began_s = time.monotonic()
        codes = self._store.batch_get_into([key], [address], [len(place)])
        if codes == [len(place)]:
            on_bytes(what.num_bytes)
            if is_sealed(key, place):
                return Answer.WHOLE
        elif time.monotonic() - began_s > _GIVEN_UP_S:
            logger.error(
                "Shared tier: Mooncake has given up %s, and may go on writing it into host memory: "
                "its place is not used again until this engine starts again.",
                what.name,
            )
            # The thread waits for ever, because the place would be reused after an answer.
            threading.Event().wait()
        return Answer.BROKEN if _ABSENT.isdisjoint(_checked(codes)) else Answer.ABSENT

    def forget(self, name: str) -> None:
        self._store.batch_remove([self._prefix + name], True)

    def engines(self) -> dict[str, Mapping[str, Any]]:
        keys = [f"{_ROOT}/engine-{number}" for number in range(_NUM_ENGINES)]
        found: dict[str, Mapping[str, Any]] = {}
        with contextlib.suppress(OSError):
            there = [*self._there(keys)]
            for key, text in zip(there, self._read(there), strict=True):
                with contextlib.suppress(ValueError):  # The text is damaged, or is no identity.
                    namespace, identity = parse_identity(text)
                    if key == _engine_key(namespace):
                        found[namespace] = identity
        return found

    def introduce(self, namespace: str, identity: Mapping[str, Any]) -> None:
        with contextlib.suppress(OSError):
            text = json.dumps(identity).encode()
            self._write({_engine_key(namespace): text}, self._pinned)

    def describe(self) -> tuple[str, Mapping[str, str]]:
        return "only the metrics of its master say how full it is (port 9003 by default)", {}

    def _place(self, what: SharedObject) -> tuple[str, memoryview, int]:
        """The key of an object, its place with the seal, and the address of the place."""
        place = self._memory[what.offset_bytes :][: what.num_bytes + SEAL_BYTES]
        return self._prefix + what.name, place, self._address + what.offset_bytes

    def _there(self, keys: list[str]) -> set[str]:
        codes = _checked(self._store.batch_is_exist(keys) if keys else [])
        return {key for key, code in zip(keys, codes, strict=True) if code == 1}

    def _read(self, keys: list[str]) -> list[bytes]:
        """Read small contents. A missing or damaged content is empty."""
        values = self._store.get_batch(keys) if keys else []
        pairs = zip(keys, values, strict=True)
        return [value[:-SEAL_BYTES] if is_sealed(key, value) else b"" for key, value in pairs]

    def _write(self, contents: Mapping[str, bytes], *how: object) -> None:
        """Write small contents, and replace existing contents."""
        values = [content + seal_of(key, content) for key, content in contents.items()]
        codes = [self._store.upsert_batch([*contents], values, *how)] if contents else []
        _checked(codes, _OF_PUTS)


def _engine_key(namespace: str) -> str:
    return f"{_ROOT}/engine-{int(namespace, 16) % _NUM_ENGINES}"


def _lead(content: bytes) -> str:
    """The object, with its name space, to which the content of a note leads; empty if none."""
    name = content.decode(errors="replace")
    return name if is_rows_name(name.rpartition("/")[2]) else ""


def _checked(codes: list[int], usual: Container[int] = _OF_GETS) -> list[int]:
    """The codes that a call has returned; raises OSError for a code that is not usual."""
    for code in codes:
        if code < 0 and code not in usual:
            meaning = _MEANINGS.get(code, f"see {DOCS_URL}shared_tier.md")
            raise OSError(f"{meaning} (code {code})")
    return codes
